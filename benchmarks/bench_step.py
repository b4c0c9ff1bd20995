"""What a training step costs beside the learner's update: one short run of the demo, every step by phase.

    python -m benchmarks.bench_step [--versions 80] [--warm-up 10]

`overhead_ms` is batch making, scoring for metrics, the checkpoint and its probe: what the trainer does for a step that
is not the update. `waiting_ms` is the rest of the step: groups that are not there yet, intake and the transaction.
The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.bench_switching import quantile
from benchmarks.short_runs import quantiles_ms, stage, steps_of, tell
from schemas.ledger import StepCompleted

UPDATE = "learner_update"


def figures(steps: Sequence[StepCompleted]) -> dict[str, object]:
    """Quantiles of each phase and of what follows from them."""
    phases = [dict(step.phase_s) for step in steps]
    names = list(dict.fromkeys(name for one in phases for name in one))
    busy_s = [one["batch"] + one["train"] + one["checkpoint"] for one in phases]
    overhead_s = [busy - one.get(UPDATE, 0.0) for busy, one in zip(busy_s, phases, strict=True)]
    waiting_s = [max(0.0, one["whole"] - busy) for busy, one in zip(busy_s, phases, strict=True)]
    update_s = [one.get(UPDATE, 0.0) for one in phases]
    return {
        "steps": len(steps),
        "trajectories_a_step": round(sum(step.trajectories for step in steps) / max(1, len(steps))),
        "whole": quantiles_ms([one["whole"] for one in phases]),
        "update": quantiles_ms(update_s),
        "overhead": quantiles_ms(overhead_s),
        "waiting": quantiles_ms(waiting_s),
        "overhead_to_update": round(quantile(overhead_s, 0.5) / max(1e-9, quantile(update_s, 0.5)), 3),
        "phases": {name: quantiles_ms([one[name] for one in phases if name in one]) for name in names},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """One run, then its ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=80)
    parser.add_argument("--warm-up", type=int, default=10, help="first steps that are left out")
    options = parser.parse_args(arguments)
    if options.versions <= options.warm_up:
        parser.error("--versions must be above --warm-up")
    with stage("bench-step") as at:
        at.run("step", [f"run.versions={options.versions}", f'model.init="{at.warm}"'])
        steps = steps_of(at.log("step"))[options.warm_up :]
    found = figures(steps)
    for name, value in found.items():
        print(f"{name:20} {value}", file=sys.stderr)
    tell(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
