"""CPU that every service takes while it has nothing to do, as a share of one core.

    python -m benchmarks.bench_idle [--seconds 20]

A run of the demo with MLflow and evaluation. Once it trains, the trainer is stopped (SIGSTOP): the workers finish what
was asked for and then wait, as the coordinator, the projector and the evaluator do. Then the trainer goes on, and the
workers are stopped, so that it is the trainer that waits. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from benchmarks.short_runs import stage, tell
from benchmarks.watching import pids_of, sample

LIVE_LIMIT_S = 120.0
SETTLE_S = 6.0
"""for what was under way when the others were stopped"""
TRAINER = "trainer"


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """These processes stand still meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def shares(pids: Mapping[str, int], seconds: float) -> dict[str, float]:
    """CPU seconds a second of each, from now on."""
    time.sleep(SETTLE_S)
    before = {name: sample(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    found: dict[str, float] = {}
    for name, pid in pids.items():
        first, last = before[name], sample(pid)
        if first is None or last is None:
            raise SystemExit(f"{name} ended while it was measured")
        found[name] = round((last.cpu_s - first.cpu_s) / ((last.at_us - first.at_us) / 1e6), 4)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args(arguments)
    with stage("bench-idle") as at:
        sets = [
            "run.versions=10000", f'model.init="{at.warm}"', "mlflow.enabled=true", "evaluation.enabled=true",
            "trainer.group_timeout_s=600",
        ]  # fmt: skip
        with at.started("idle", sets) as up:
            at.until_live(up, "idle", 3, LIVE_LIMIT_S)
            pids = pids_of(at, "idle")
            workers = {name: pid for name, pid in pids.items() if name.startswith("generator")}
            others = {name: pid for name, pid in pids.items() if name != TRAINER}
            with stopped([pids[TRAINER]]):
                found = shares(others, options.seconds)
            with stopped(list(workers.values())):
                found |= shares({TRAINER: pids[TRAINER]}, options.seconds)
    for name, share in sorted(found.items()):
        print(f"{name:14} {share}", file=sys.stderr)
    tell({"seconds": options.seconds, "services": dict(sorted(found.items())), "most": max(found.values())})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
