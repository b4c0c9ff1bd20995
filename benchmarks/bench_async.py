"""Asynchronous against synchronous: the demo with max_lag 1 and run_ahead 1, and with max_lag 0; same code and seeds.

    python -m benchmarks.bench_async [--versions 80] [--seeds 0 1 2]

One run of each side for every seed, interleaved, in turns first. Versions a second are counted between the activations
of the first version after the warm-up and of the last one. Success is the mean reward of the trained answers over the
last quarter of the same number of versions. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

from benchmarks.bench_switching import switches_of
from benchmarks.short_runs import Stage, medians, policy_of, stage, steps_of, tell

SIDES = {
    "asynchronous": ("trainer.max_lag=1", "trainer.run_ahead=1"),
    "synchronous": ("trainer.max_lag=0", "trainer.run_ahead=0"),
}
WARM_UP = 10
REWARD = "critic/rewards/mean"


def measure(at: Stage, name: str, sets: Sequence[str]) -> dict[str, float]:
    """One run."""
    at.run(name, sets)
    log = at.log(name)
    from_us, to_us, versions = switches_of(policy_of(log)).window(WARM_UP)
    steps = steps_of(log)
    last = steps[-max(1, len(steps) // 4) :]
    return {
        "versions_per_s": versions / ((to_us - from_us) / 1e6),
        "success": statistics.fmean(step.metrics.get(REWARD, 0.0) for step in last),
        "trainer_idle": statistics.fmean(step.metrics.get("trainer/idle_fraction", 0.0) for step in steps[WARM_UP:]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Both sides for every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with stage("bench-async") as at:
        for place, seed in enumerate(options.seeds):
            for side in list(SIDES)[:: -1 if place % 2 else 1]:
                common = (f"run.versions={options.versions}", f"run.seed={seed}", f'model.init="{at.warm}"')
                found[side].append(measure(at, f"{side}-{seed}", (*common, *SIDES[side])))
                print(f"{side} {seed}: {json.dumps(found[side][-1])}", file=sys.stderr, flush=True)
    ratios = [
        one["versions_per_s"] / other["versions_per_s"]
        for one, other in zip(found["asynchronous"], found["synchronous"], strict=True)
    ]
    tell(
        {
            **{side: medians(runs) for side, runs in found.items()},
            "versions": options.versions,
            "seeds": options.seeds,
            "versions_per_s_ratio": round(statistics.median(ratios), 3),
            "ratio_by_seed": [round(ratio, 3) for ratio in ratios],
            "success_by_seed": {side: [round(run["success"], 3) for run in runs] for side, runs in found.items()},
        }
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
