"""On policy, kill -9 of trainer and coordinator moves no bit of the final weights, and a kill is found where it hit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.chaos_plan import BASELINE, COORDINATOR, ON_POLICY, SAME, TRAINER, Fault, Phase, RunPlan, What
from tests.e2e.chaos_run import carry_out

pytestmark = pytest.mark.long

SMALL = ("generator.workers=2", "coordinator.min_workers=2", "coordinator.lease_s=12.0")
KILLED = RunPlan(
    name=SAME,
    versions=14,
    faults=(
        Fault(what=What.KILL, service=TRAINER, phase=Phase.BETWEEN, wait_versions=1),
        Fault(what=What.KILL, service=COORDINATOR, wait_versions=1),
    ),
    settings=ON_POLICY,
)


def test_kills_of_trainer_and_coordinator_leave_the_final_weights_as_they_are(tmp_path: Path, kafka_jars: Path) -> None:
    said: list[str] = []
    calm, killed = (
        carry_out(plan, tmp_path / plan.name, seed=0, say=said.append, settings=SMALL)
        for plan in (replace(KILLED, name=BASELINE, faults=()), KILLED)
    )

    assert (calm.wrong, killed.wrong) == ([], []), "\n".join(said)
    assert (len(calm.hits), len(killed.hits)) == (0, 2)
    assert calm.weights_sha256 == killed.weights_sha256 != ""
