"""Memory of every service while a run goes through many groups: resident size, and its slope after the warm-up.

    python -m benchmarks.bench_memory [--groups 10000] [--group-size 4]

A run of the demo with small groups and MLflow; /proc is read every second. The growth is that of anonymous memory from
the end of the warm-up (a tenth of the groups) to the end of the run. The slope is a least-squares line through the
samples of the second half, in bytes a trained group: a service that forgets what it has settled has one near zero. The
last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Sequence
from statistics import linear_regression, median

from benchmarks.short_runs import stage, steps_of, tell
from benchmarks.watching import Sample, watch
from schemas.ledger import StepCompleted

RUN_LIMIT_S = 1_500.0
GROUPS_A_STEP = 16
WARM_UP = 0.1
"""share of the groups after which a service has all it keeps: buffers, arenas, imported modules"""


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
    lived = [sample for sample in samples if steps[0].at_us <= sample.at_us <= last_us]
    if len(lived) < 4:
        return {"samples": len(lived)}
    groups = groups_at(steps, [sample.at_us for sample in lived])
    half = [place for place, count in enumerate(groups) if count >= groups[-1] / 2]
    xs = [float(groups[place]) for place in half]
    ys = [float(lived[place].anonymous) for place in half]
    steep = linear_regression(xs, ys).slope if len(set(xs)) > 1 else 0.0
    warm = [row.anonymous for row, count in zip(lived, groups, strict=True) if count >= WARM_UP * groups[-1]]
    few = max(1, len(warm) // 20)
    return {
        "samples": len(lived),
        "resident_mib_first": round(lived[0].resident / 2**20, 1),
        "resident_mib_last": round(lived[-1].resident / 2**20, 1),
        "resident_mib_most": round(max(sample.resident for sample in lived) / 2**20, 1),
        "anonymous_growth_mib": round((median(warm[-few:]) - median(warm[:few])) / 2**20, 1),
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
        samples = watch(at, "memory", sets, RUN_LIMIT_S)
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
            "most_growth_mib": max(figures.get("anonymous_growth_mib", 0.0) for figures in found.values()),
            "services": found,
        }
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
