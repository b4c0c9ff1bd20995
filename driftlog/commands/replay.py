"""driftlog replay: train versions again from log and checkpoint store, without generators, and compare bit for bit.

Compared are the batch digest, every logged metric that is a result, the trainer's log-probabilities, and the sha256 of
weights, optimizer and RNG state. What differs is named by part: environment (libraries, threads, device, code: told
before training starts, no sign of corruption), data (which trajectory, where), state, metrics, scores, weights.

Exit 0: equal. Exit 1 with --verify: something differs, or could not be trained again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import opened_run
from infra.clock import SystemClock
from infra.runner import ExitCode
from schemas.errors import UsageError

if TYPE_CHECKING:
    from consumers.offline.replay.report import ReplaySum

EXAMPLE = "driftlog replay --run demo --version 1 --to -1 --verify"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("replay", help="train versions again from the log and compare them bit for bit")
    add_run_options(parser)
    parser.add_argument("--version", type=int, required=True, metavar="N", help="the version to make again")
    parser.add_argument("--to", type=int, metavar="M", help="and all after it up to M; -1: up to the newest")
    parser.add_argument("--verify", action="store_true", help="exit 1 when anything differs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the last version's model there, as made here")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Replay; 1 when something differs and was to be verified."""
    from consumers.offline.replay import replay
    from consumers.offline.replay.plan import plan_replay
    from consumers.offline.replay.report import ReplaySum
    from consumers.offline.wholeness import read_policy
    from driftlog.wiring_replay import retrainers

    _check(options)
    total, reached = ReplaySum(), False
    with opened_run(options) as at:
        log, store = at.log(), at.store()
        policy = read_policy(log)
        fold = policy.fold
        plan = plan_replay(fold, options.version, options.to, policy.retired)
        if plan.why_earlier:
            _say(plan.why_earlier)
        for step, directory in replay(
            log, fold, store, retrainers(at, fold, store, _say), plan, clock=SystemClock(), tell=_say
        ):
            total.add(step)
            if options.json:
                print(json.dumps(step.to_dict()), flush=True)
            for line in step.lines() if not (options.json and step.equal) else ():
                _say(line)
            if step.version == plan.last and step.trained:
                reached = True
                if options.out is not None:
                    shutil.copytree(directory, options.out, dirs_exist_ok=True)
    if options.json:
        print(json.dumps(total.to_dict()))
    _say(_words(total))
    if not reached:
        _say(f"version {plan.last} could not be trained again")
    return ExitCode.FAILED if not reached or (options.verify and total.mismatched) else ExitCode.OK


def _check(options: argparse.Namespace) -> None:
    out: Path | None = options.out
    if out is None and not options.verify:
        raise UsageError("nothing to do: --verify compares, --out DIR writes the model; give one of them, or both")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out}: exists and is not an empty folder")


def _words(total: ReplaySum) -> str:
    speed = total.to_dict()["speed_vs_training"]
    differing = f"{total.mismatched} differ: {total.versions[:10]}" if total.mismatched else "all equal"
    times = f"{total.replay_s:.1f} s of batches and training here, {total.recorded_s:.1f} s in the run ({speed}x)"
    return f"{total.replayed} versions trained again, {differing}; {times}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
