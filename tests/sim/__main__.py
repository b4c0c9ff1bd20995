"""Run the simulator by hand: one seed again, or many. The last line is `RESULT {json}`; exit 1 when anything failed.

python -m tests.sim --seed 17 --crash 0.05          a failing seed again
python -m tests.sim --seeds 500                     what continuous integration runs
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.sim.faults import plan_of, simulate_faults
from tests.sim.invariants import check
from tests.sim.stamps import check_stamps
from tests.sim.world import World, simulate


def run(seed: int, crash: float | None, *, faults: bool, directory: Path) -> tuple[World, list[str]]:
    """One seed: the world as it ended, and every violation."""
    plan = plan_of(seed, crash)
    world = simulate_faults(plan, directory) if faults else simulate(plan, directory)
    return world, check(world) or check_stamps(world)


def replay_command(seed: int, crash: float, *, faults: bool) -> str:
    """How to see one seed again."""
    return f"python -m tests.sim --seed {seed} --crash {crash:g}" + ("" if faults else " --crashes-only")


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="The deterministic simulator.")
    parser.add_argument("--seed", type=int, help="run this seed and show where its processes died")
    parser.add_argument("--seeds", type=int, default=50, help="run seeds 0..N-1 (default: %(default)s)")
    parser.add_argument("--crash", type=float, help="crash probability of a port call (default: by seed, 0.02-0.08)")
    parser.add_argument("--crashes-only", action="store_true", help="no other faults than crashes")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.seed is not None else logging.CRITICAL)
    seeds = range(options.seeds) if options.seed is None else [options.seed]
    started_s, failed, restarts, virtual_s = time.perf_counter(), [], 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            world, problems = run(
                seed, options.crash, faults=not options.crashes_only, directory=Path(folder) / "store"
            )
            restarts += sum(process.restarts for process in world.processes)
            virtual_s += world.clock.monotonic_s()
            if problems:
                failed.append(seed)
                say(f"seed {seed}: {problems[:5]}")
                say("  " + replay_command(seed, world.plan.crash_probability, faults=not options.crashes_only))
            if options.seed is not None:
                for process in world.processes:
                    say(f"{process.name}: done {process.done}, error {process.error!r}, died at {process.deaths}")
    result = {
        "seeds": len(seeds), "failed": failed, "restarts": restarts, "virtual_s": round(virtual_s, 1),
        "wall_s": round(time.perf_counter() - started_s, 2),
    }  # fmt: skip
    say(f"RESULT {json.dumps(result)}")
    return 1 if failed else 0


def say(line: str) -> None:
    """One line on stdout."""
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
