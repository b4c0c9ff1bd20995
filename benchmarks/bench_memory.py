"""Memory of every service while a run goes through many groups: resident size, and its slope after the warm-up.

    python -m benchmarks.bench_memory [--groups 10000] [--group-size 4]

A run of the demo with small groups and MLflow; /proc is read every second. The slope is a least-squares line through
the samples of the second half, in bytes a trained group: a service that forgets what it has settled has one near zero.
The broker and this program are not services. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression

from benchmarks.short_runs import Stage, stage, steps_of, tell
from schemas.ledger import StepCompleted

SAMPLE_S = 1.0
RUN_LIMIT_S = 1_500.0
GROUPS_A_STEP = 16
Sample = tuple[int, int, int]
"""(microseconds since 1970, resident bytes, of them anonymous)"""


def resident_bytes(pid: int) -> tuple[int, int] | None:
    """(resident, of it anonymous) bytes of a process; None when it is gone."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "RssAnon"):
                found[name] = int(rest.split()[0]) * 1024
    return (found["VmRSS"], found["RssAnon"]) if len(found) == 2 else None


def watch(at: Stage, name: str, sets: Sequence[str]) -> dict[str, list[Sample]]:
    """Run to the end; (when, resident, anonymous) by service."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    deadline_s = time.monotonic() + RUN_LIMIT_S
    with at.started(name, sets) as up:
        while up.poll() is None and time.monotonic() < deadline_s:
            for file in at.directory(name).pids.glob("*"):
                with contextlib.suppress(OSError, ValueError):
                    sizes = resident_bytes(int(file.read_text(encoding="ascii")))
                    if sizes is not None:
                        samples[file.name.partition(".")[0]].append((time.time_ns() // 1000, *sizes))
            time.sleep(SAMPLE_S)
        at.end(up, name, 1.0)
    return dict(samples)


def groups_at(steps: Sequence[StepCompleted], when_us: Sequence[int]) -> list[int]:
    """How many groups had been trained at each of these times."""
    ends = [step.at_us for step in steps]
    total, sums = 0, [0]
    for step in steps:
        total += step.groups
        sums.append(total)
    return [sums[bisect_right(ends, at_us)] for at_us in when_us]


def slope_of(samples: Sequence[Sample], steps: Sequence[StepCompleted]) -> dict[str, float]:
    """Of one service, while the run trained."""
    last_us = steps[-1].at_us
    lived = [sample for sample in samples if steps[0].at_us <= sample[0] <= last_us]
    if len(lived) < 4:
        return {"samples": len(lived)}
    groups = groups_at(steps, [at_us for at_us, _, _ in lived])
    half = [place for place, count in enumerate(groups) if count >= groups[-1] / 2]
    xs = [float(groups[place]) for place in half]
    ys = [float(lived[place][2]) for place in half]
    steep = linear_regression(xs, ys).slope if len(set(xs)) > 1 else 0.0
    return {
        "samples": len(lived),
        "resident_mib_first": round(lived[0][1] / 2**20, 1),
        "resident_mib_last": round(lived[-1][1] / 2**20, 1),
        "resident_mib_most": round(max(resident for _, resident, _ in lived) / 2**20, 1),
        "bytes_a_group": round(steep),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--group-size", type=int, default=4, help="smaller than the demo's 16, so that it ends")
    options = parser.parse_args(arguments)
    versions = max(2, options.groups // GROUPS_A_STEP)
    with stage("bench-memory") as at:
        sets = [
            f"run.versions={versions}", f'model.init="{at.warm}"', f"task.group_size={options.group_size}",
            f"trainer.groups_per_step={GROUPS_A_STEP}", "checkpoints.keep=8", "mlflow.enabled=true",
        ]  # fmt: skip
        samples = watch(at, "memory", sets)
        steps = steps_of(at.log("memory"))
    found = {name: slope_of(rows, steps) for name, rows in sorted(samples.items())}
    for name, figures in found.items():
        print(f"{name:14} {figures}", file=sys.stderr)
    tell(
        {
            "groups": sum(step.groups for step in steps),
            "group_size": options.group_size,
            "versions": len(steps),
            "seconds": round((steps[-1].at_us - steps[0].at_us) / 1e6, 1),
            "services": found,
        }
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
