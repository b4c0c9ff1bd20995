"""Asynchronous against synchronous: max_lag 1, run_ahead 1 and overlapped publication, or none of it; same code, seeds.

    python -m benchmarks.bench_async [--versions 60] [--seeds 0 1 2] [--long-versions 16] [--long-seeds 0 1]

The demo (two workers, steps of a fifth of a second) and a model whose steps take two seconds (one worker). One run of
each side for every seed, interleaved, in turns first. `G` and `T` are the seconds a version needs for generation and
for training, each alone: in the synchronous runs the workers stand while the trainer works, and the other way round.

    overlap_share = (T_sync / T_async) / ((G + T) / max(G, T))

T_sync and T_async are the seconds a version takes. 1 means that all that could run side by side did. Success is the
mean reward of the trained answers over the last quarter. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_step import OVERLAPPED, TWO_SECONDS
from benchmarks.bench_switching import switches_of
from benchmarks.models import SHAPES, make_model
from benchmarks.short_runs import RUN_LIMIT_S, Stage, medians, policy_of, stage, steps_of, tell
from benchmarks.watching import cpu_between, watch
from consumers.offline.run_log import RunLog

SIDES = {
    "asynchronous": ("trainer.max_lag=1", "trainer.run_ahead=1", OVERLAPPED),
    "synchronous": ("trainer.max_lag=0", "trainer.run_ahead=0"),
}
WARM_UP = 5
REWARD = "critic/rewards/mean"


def generation_s(log: RunLog, live_us: dict[int, int]) -> float:
    """Median seconds from a version's activation to the last group that was sampled with it and published."""
    last_us: dict[int, int] = {}
    for entry in log.trajectories():
        for row in entry.rows:
            if row.trajectory is not None:
                version = row.trajectory.segments[-1].version
                last_us[version] = max(last_us.get(version, 0), row.trajectory.published_at_us)
    spans = [
        last_us[version] - at_us for version, at_us in live_us.items() if version >= WARM_UP and version in last_us
    ]
    return statistics.median(spans) / 1e6


def measure(at: Stage, name: str, sets: Sequence[str]) -> dict[str, float]:
    """One run."""
    samples = watch(at, name, sets, RUN_LIMIT_S)
    log = at.log(name)
    switches = switches_of(policy_of(log))
    from_us, to_us, versions = switches.window(WARM_UP)
    steps = steps_of(log)
    last, steady = steps[-max(1, len(steps) // 4) :], steps[WARM_UP:]
    return {
        "versions_per_s": versions / ((to_us - from_us) / 1e6),
        "cpu_s_a_version": cpu_between(samples, from_us, to_us) / versions,
        "success": statistics.fmean(step.metrics.get(REWARD, 0.0) for step in last),
        "trainer_idle": statistics.fmean(step.metrics.get("trainer/idle_fraction", 0.0) for step in steady),
        "training_s": statistics.median(step.phase_s["whole"] - step.phase_s["waiting"] for step in steady),
        "generation_s": generation_s(log, switches.live_us),
    }


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Both sides: medians, and the ratios seed by seed. G and T are the synchronous side's."""
    pairs = list(zip(runs["asynchronous"], runs["synchronous"], strict=True))
    ratios = [one["versions_per_s"] / other["versions_per_s"] for one, other in pairs]
    possible = [
        (other["generation_s"] + other["training_s"]) / max(other["generation_s"], other["training_s"])
        for _, other in pairs
    ]
    shares = [ratio / most for ratio, most in zip(ratios, possible, strict=True)]
    return {
        **{side: medians(rows) for side, rows in runs.items()},
        "versions_per_s_ratio": round(statistics.median(ratios), 3),
        "ratio_by_seed": [round(ratio, 3) for ratio in ratios],
        "possible_ratio": round(statistics.median(possible), 3),
        "overlap_share": round(statistics.median(shares), 3),
        "success_by_seed": {side: [round(run["success"], 3) for run in rows] for side, rows in runs.items()},
    }


def both_sides(at: Stage, size: str, model: Path, versions: int, seeds: Sequence[int], sets: Sequence[str]) -> Any:
    """Every seed, the sides in turns."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for place, seed in enumerate(seeds):
        for side in list(SIDES)[:: -1 if place % 2 else 1]:
            common = (f"run.versions={versions}", f"run.seed={seed}", f'model.init="{model}"', *sets)
            found[side].append(measure(at, f"{size}-{side}-{seed}", (*common, *SIDES[side])))
            print(f"{size} {side} {seed}: {json.dumps(found[side][-1])}", file=sys.stderr, flush=True)
    return {"versions": versions, "seeds": list(seeds), **compared(found)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Both sides for every size and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--long-versions", type=int, default=16, help="of the runs with steps of two seconds")
    parser.add_argument("--long-seeds", type=int, nargs="*", default=[0, 1])
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with stage("bench-async") as at:
        if options.long_seeds:
            model = at.folder / "two-seconds"
            make_model(SHAPES["two_seconds"], model)
            found["two_seconds"] = both_sides(at, "long", model, options.long_versions, options.long_seeds, TWO_SECONDS)
        if options.seeds:
            found["demo"] = both_sides(at, "demo", at.warm, options.versions, options.seeds, ())
    tell(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
