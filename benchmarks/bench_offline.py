"""Audit, replay and reanalysis of one short run of the demo, as multiples of the time that the run trained for.

    python -m benchmarks.bench_offline [--versions 80] [--rounds 2]

Each command is a process of its own, its start and its imports included (`start` is the same with nothing to do). The
training time is from the first version's activation to the last step's end; `computed` is what the trainer's own steps
took of it. How fast the log is read is bench_replay's. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.short_runs import RUN_LIMIT_S, Stage, medians, policy_of, stage, steps_of, tell
from schemas import policy_events as ev

RUN = "offline"
COMMANDS = {
    "start": ("audit", "--help"),
    "audit": ("audit",),
    "audit with 50 rows scored again": ("audit", "--recompute", "50"),
    "replay of every version": ("replay", "--version", "1", "--to", "-1", "--verify"),
    "reanalysis": ("reanalyse",),
    "reanalysis with another limit": ("reanalyse", "--set", "trainer.max_lag=0"),
}


def timed(at: Stage, words: Sequence[str]) -> float:
    """Seconds of one command. SystemExit when it finds something or fails."""
    where = [] if "--help" in words else ["--run", RUN, "--directory", str(at.folder / "runs")]
    command = [sys.executable, "-m", "driftlog", *words, *where]
    begun_s = time.monotonic()
    done = subprocess.run(
        command, env=at.environment(), capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        )
    return time.monotonic() - begun_s


def main(arguments: Sequence[str] | None = None) -> int:
    """One run, then the commands in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    with stage("bench-offline") as at:
        at.run(RUN, [f"run.versions={options.versions}", f'model.init="{at.warm}"'])
        log = at.log(RUN)
        first_us = next(event.at_us for event in policy_of(log) if isinstance(event, ev.VersionActivated))
        steps = steps_of(log)
        taken: list[dict[str, float]] = []
        for _ in range(options.rounds):
            taken.append({name: timed(at, words) for name, words in COMMANDS.items()})
            print(taken[-1], file=sys.stderr, flush=True)
    training_s = (steps[-1].at_us - first_us) / 1e6
    seconds = medians(taken)
    tell(
        {
            "versions": options.versions,
            "rounds": options.rounds,
            "trajectories": sum(step.trajectories for step in steps),
            "training_s": round(training_s, 2),
            "computed_s": round(sum(step.phase_s["batch"] + step.phase_s["train"] for step in steps), 2),
            "commands": {
                name: {"seconds": round(value, 2), "times_training": round(training_s / value, 2)}
                for name, value in seconds.items()
            },
        }
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
