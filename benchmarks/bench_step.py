"""What a training step costs beside the learner's update: runs of the demo, every step by phase, from the ledger.

    python -m benchmarks.bench_step [--versions 80] [--long-versions 25] [--warm-up 10]

`inline` publishes each version before the next step, `overlapped` behind its compute; `two_seconds` is overlapped with
a model whose update takes about that long, and one worker. `overhead` is the main thread's time of a step but the
update: batch, scores, metrics, and as much of checkpoint and transaction as it does itself. `waiting` is the time
in which it had nothing to do. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench_switching import quantile
from benchmarks.models import SHAPES, make_model
from benchmarks.short_runs import quantiles_ms, stage, steps_of, tell
from schemas.ledger import StepCompleted

UPDATE = "learner_update"
OVERLAPPED = "trainer.overlap_publication=true"
TWO_SECONDS = (
    "generator.workers=1", "coordinator.min_workers=1", "trainer.learning_rate=1e-4", "task.max_tokens=48",
    "trainer.groups_per_step=12",
)  # fmt: skip
"""of a run whose model is `benchmarks.models.SHAPES["two_seconds"]`: two processes that compute, on two cores"""


def figures(steps: Sequence[StepCompleted]) -> dict[str, Any]:
    """Quantiles of each phase and of what follows from them."""
    phases = [dict(step.phase_s) for step in steps]
    names = list(dict.fromkeys(name for one in phases for name in one))
    update_s = [one.get(UPDATE, 0.0) for one in phases]
    worked_s = [max(0.0, one["whole"] - one["waiting"]) for one in phases]
    overhead_s = [max(0.0, worked - update) for worked, update in zip(worked_s, update_s, strict=True)]
    return {
        "steps": len(steps),
        "trajectories_a_step": round(sum(step.trajectories for step in steps) / max(1, len(steps))),
        "whole": quantiles_ms([one["whole"] for one in phases]),
        "update": quantiles_ms(update_s),
        "overhead": quantiles_ms(overhead_s),
        "waiting": quantiles_ms([one["waiting"] for one in phases]),
        "overhead_share": round(quantile(overhead_s, 0.5) / max(1e-9, quantile(worked_s, 0.5)), 4),
        "phases": {name: quantiles_ms([one[name] for one in phases if name in one]) for name in names},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The runs, then their ledgers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=80)
    parser.add_argument("--long-versions", type=int, default=25, help="of the run with long steps")
    parser.add_argument("--warm-up", type=int, default=10, help="first steps that are left out")
    options = parser.parse_args(arguments)
    if min(options.versions, options.long_versions) <= options.warm_up:
        parser.error("--versions and --long-versions must be above --warm-up")
    found: dict[str, Mapping[str, Any]] = {}
    with stage("bench-step") as at:
        large = at.folder / "two-seconds"
        make_model(SHAPES["two_seconds"], large)
        runs = {
            "inline": (options.versions, at.warm, ()),
            "overlapped": (options.versions, at.warm, (OVERLAPPED,)),
            "two_seconds": (options.long_versions, large, (OVERLAPPED, *TWO_SECONDS)),
        }
        for name, (versions, model, sets) in runs.items():
            at.run(name.replace("_", "-"), [f"run.versions={versions}", f'model.init="{model}"', *sets])
            found[name] = figures(steps_of(at.log(name.replace("_", "-")))[options.warm_up :])
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    tell(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
