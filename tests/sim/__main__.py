"""Run the simulator by hand: one seed again, or many. The last line is `RESULT {json}`; exit 1 when anything failed.

python -m tests.sim --seed 17                        a failing seed again, with what happened when
python -m tests.sim --seeds 2000 --jobs 2            what `make sim` runs
python -m tests.sim --mutants                        does it find what is planted?
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from tests.sim.faults import Fault, faults_of, plan_of
from tests.sim.mutant_runs import run_mutants
from tests.sim.plan import Plan
from tests.sim.shrink import differences, shrink
from tests.sim.verdict import Verdict, judged, quiet, run_chunk, scratch

_CHUNK = 20
_SHRUNK = 5
"""failing seeds that are made smaller; the others are only named"""


def run_seeds(seeds: Sequence[int], crash: float | None, jobs: int) -> tuple[list[Verdict], float]:
    """All seeds, in `jobs` processes; (verdicts in order, CPU seconds of all processes)."""
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    if jobs <= 1 or len(chunks) == 1:
        done = [run_chunk(chunk, crash) for chunk in chunks]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            done = list(pool.map(run_chunk, chunks, [crash] * len(chunks)))
    return [verdict for verdicts, _ in done for verdict in verdicts], sum(cpu_s for _, cpu_s in done)


def replay_command(seed: int, changes: dict[str, object] | None = None, faults: Sequence[int] | None = None) -> str:
    """How to see one seed again; `faults`: numbers of the seed's faults that are kept."""
    words = [f"python -m tests.sim --seed {seed}"]
    words += [
        f"--set {shlex.quote(f'{name}={value!r}')}" for name, value in (changes or {}).items() if name != "replay"
    ]
    if changes and "replay" in changes:
        words.append("--no-replay")
    if faults is not None:
        words.append("--faults " + (",".join(map(str, faults)) or "none"))
    return " ".join(words)


def explain(seed: int, problems: Sequence[str], directory: Path) -> list[str]:
    """A failing seed: what is wrong, how to see it again, and the smallest run that fails like it."""
    plan = plan_of(seed)
    faults = faults_of(seed, plan)
    small = shrink(plan, faults, problems, directory)
    kept = [number for number, fault in enumerate(faults) if fault in small.faults]
    return [
        f"seed {seed}: {problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
        f"  again:  {replay_command(seed)}",
        f"  shrunk: {replay_command(seed, differences(small.plan, plan), kept)}",
        f"          {small.problem}",
        *(f"          {fault.kind} {fault.worker} {fault.from_s:.2f}-{fault.to_s:.2f} s" for fault in small.faults),
    ]


def show(plan: Plan, faults: Sequence[Fault]) -> list[str]:
    """Run one plan and tell what happened; the problems."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        world, problems = judged(plan, Path(folder) / "store", faults)
        say(f"plan: {plan}")
        for fault in faults:
            say(f"fault: {fault.kind} {fault.worker} {fault.from_s:.2f}-{fault.to_s:.2f} s")
        if world is not None:
            for process in world.processes:
                say(f"{process.name}: done {process.done}, error {process.error!r}, died at {process.deaths}")
            say(f"virtual seconds: {world.clock.monotonic_s():.2f}, turns: {world.steps}")
        for problem in problems:
            say(f"violation: {problem}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="The deterministic simulator.")
    parser.add_argument("--seed", type=int, help="run this seed and tell what happened")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="with --seed: change its plan")
    parser.add_argument("--faults", help="with --seed: numbers of its faults to keep, such as 0,2, or none")
    parser.add_argument("--no-replay", action="store_true", help="with --seed: without replay")
    parser.add_argument("--seeds", type=int, default=2000, help="run seeds 0..N-1 (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="begin at this seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--crash", type=float, help="crash probability of a port call (default: by seed)")
    parser.add_argument("--mutants", action="store_true", help="plant bugs and see that each is found")
    parser.add_argument("--only", help="with --mutants: those whose name holds this")
    options = parser.parse_args(arguments)
    if options.mutants:
        return run_mutants(options.only, say, scratch(), options.jobs)
    if options.seed is not None:
        return _one(options)
    return _many(options)


def _one(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(message)s")
    plan = plan_of(options.seed, options.crash)
    changes = dict(setting.split("=", 1) for setting in options.set)
    plan = replace(plan, **{name: ast.literal_eval(value) for name, value in changes.items()})
    if options.no_replay:
        plan = replace(plan, replay=type(plan.replay)())
    faults = faults_of(options.seed, plan_of(options.seed, options.crash))
    if options.faults is not None:
        kept = [] if options.faults == "none" else [int(number) for number in options.faults.split(",")]
        faults = [faults[number] for number in kept]
    problems = show(plan, faults)
    say("RESULT " + json.dumps({"seeds": 1, "violations": len(problems), "failed": [options.seed] if problems else []}))
    return 1 if problems else 0


def _many(options: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    seeds = range(options.first, options.first + options.seeds)
    verdicts, cpu_s = run_seeds(seeds, options.crash, options.jobs)
    wall_s = time.perf_counter() - started_s
    failed = [verdict for verdict in verdicts if verdict.problems]
    places: Counter[str] = sum((v.crash_places for v in verdicts), Counter())
    faults: Counter[str] = sum((v.faults for v in verdicts), Counter())
    for line in crash_table(places):
        say(line)
    say("faults that happened: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())))
    names = sorted({name for v in verdicts for name in v.largest})
    say("largest sizes seen: " + ", ".join(f"{n} {max(v.largest.get(n, 0) for v in verdicts)}" for n in names))
    for verdict in failed[:_SHRUNK]:
        with quiet(), tempfile.TemporaryDirectory(dir=scratch()) as folder:
            for line in explain(verdict.seed, verdict.problems, Path(folder) / "store"):
                say(line)
    for verdict in failed[_SHRUNK:]:
        say(f"seed {verdict.seed}: {verdict.problems[0]}\n  again:  {replay_command(verdict.seed)}")
    result = {
        "seeds": len(verdicts), "violations": len(failed), "failed": [v.seed for v in failed][:20],
        "restarts": sum(v.restarts for v in verdicts), "crash_places": len(places), "faults": sum(faults.values()),
        "versions": sum(v.versions for v in verdicts), "virtual_s": round(sum(v.virtual_s for v in verdicts)),
        "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1), "jobs": options.jobs,
    }  # fmt: skip
    say(f"RESULT {json.dumps(result)}")
    return 1 if failed else 0


def crash_table(places: Counter[str]) -> list[str]:
    """Where processes died: t trainer, c coordinator, g generator; deaths on a poison prompt as one line."""
    grouped: Counter[str] = Counter()
    for place, count in places.items():
        grouped["g on a poison prompt" if " on sim/" in place else place] += count
    lines = [f"{sum(grouped.values())} deaths at {len(grouped)} places (t trainer, c coordinator, g generator)"]
    cells = [f"{count:6d}  {place}" for place, count in sorted(grouped.items(), key=lambda item: (item[0], -item[1]))]
    half = (len(cells) + 1) // 2
    for left, right in zip(cells[:half], [*cells[half:], ""], strict=False):
        lines.append(f"{left:<52}{right}".rstrip())
    return lines


def say(line: str) -> None:
    """One line on stdout."""
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
