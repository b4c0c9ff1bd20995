"""stale.action = down_weight through the real trainer: what is older than max_lag counts less, up to a limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from consumers.trainer.service import TrainerService
from consumers.trainer.step import AgeWeights, StepMaker
from schemas.ledger import Decision, DecisionRow, Subject
from tests.cases.trainer_rig import TrainerRig, sample_advantages

MAX_LAG, HARD_MAX_LAG, DECAY = 2, 4, 0.5


class WeighingRig(TrainerRig):
    """A trainer with the weights of down_weight; the rig's own weighs everything alike."""

    def build(self, process: str = "trainer") -> TrainerService:
        service = super().build(process)
        weights = AgeWeights(max_lag=MAX_LAG, decay=DECAY)
        service._p.step_maker = StepMaker(clock=self.clock, advantages=sample_advantages, age_weights=weights)
        return service


def at_depth(depth: int, directory: Path) -> WeighingRig:
    """Trained that far in order, every version live; what comes next is sampled as the test says."""
    rig = WeighingRig(
        directory, groups_per_step=1, versions=9, run_ahead=1, max_lag=MAX_LAG, hard_max_lag=HARD_MAX_LAG,
        stale_decay=DECAY,
    ).begin()  # fmt: skip
    for version in range(depth):
        rig.answer(version, version=version)
        rig.step()
        rig.go_live(version + 1)
    return rig


def decided_on(rig: WeighingRig, position: int) -> list[DecisionRow]:
    """The decisions on the rows of that request."""
    [group] = [request.group_id for request in rig.requests() if request.request_position == position]
    return [d for d in rig.decisions() if d.subject is Subject.TRAJECTORY and d.group_id == group]


@pytest.mark.parametrize(
    ("policy_lag", "weight"),
    [(0, 1.0), (2, 1.0), (3, 0.5), (4, 0.25)],
)
def test_a_row_above_max_lag_is_trained_with_less_weight_and_the_ledger_says_so(
    policy_lag: int, weight: float, tmp_path: Path
) -> None:
    rig = at_depth(5, tmp_path)
    rig.answer(5, version=5 - policy_lag)
    rig.step()

    rows = decided_on(rig, 5)
    assert [(d.decision, d.policy_lag, d.weight) for d in rows] == [(Decision.TRAINED, policy_lag, weight)] * 4
    assert len(rig.steps()) == 6


def test_a_row_above_hard_max_lag_is_dropped_as_stale_with_no_weight(tmp_path: Path) -> None:
    rig = at_depth(5, tmp_path)
    rig.answer(5, version=0)
    rig.wait(2)

    rows = decided_on(rig, 5)
    assert [(d.decision, d.reason, d.detail, d.weight) for d in rows] == [
        (Decision.DROPPED, "stale", "lag 5 > 4", 0.0)
    ] * 4
    assert len(rig.steps()) == 5


def test_members_of_one_group_are_weighed_each_by_its_own_age(tmp_path: Path) -> None:
    rig = at_depth(5, tmp_path)
    [request] = [request for request in rig.requests() if request.request_position == 5]
    [fresh, *others] = rig.rows(request, [1, 0, 0, 1], version=5)
    old, older, oldest = (
        replace(row, segments=rig.rows(request, [1], version=version)[0].segments)
        for row, version in zip(others, (2, 1, 0), strict=True)
    )
    rig.send([fresh, old, older, oldest])
    rig.step()

    rows = sorted(decided_on(rig, 5), key=lambda d: d.trajectory_id or "")
    assert [(d.decision.value, d.policy_lag, d.weight) for d in rows] == [
        ("trained", 0, 1.0), ("trained", 3, 0.5), ("trained", 4, 0.25), ("dropped", 5, 0.0),
    ]  # fmt: skip


def test_the_batch_that_is_trained_carries_the_weights_of_the_ledger(tmp_path: Path) -> None:
    rig = at_depth(3, tmp_path)
    seen: list[tuple[int, float]] = []
    learner = rig.trainer._p.learner
    train = learner.train

    def watching(batch: object) -> object:
        seen.extend((row.policy_lag, row.weight) for row in batch.rows)  # type: ignore[attr-defined]
        return train(batch)  # type: ignore[arg-type]

    learner.train = watching  # type: ignore[method-assign,assignment]
    rig.answer(3, version=0)
    rig.step()

    assert seen == [(3, 0.5)] * 4
    assert [(d.policy_lag, d.weight) for d in decided_on(rig, 3)] == seen
