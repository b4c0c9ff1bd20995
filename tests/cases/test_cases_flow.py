"""Public failure cases about staleness, backlog and resume, through the trainer: C42, C45, C47, C51, C59."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.ids import GroupId
from schemas.ledger import LedgerEnded, Subject
from tests.cases.trainer_rig import TrainerRig
from tests.fakes.log_script import group


def at_version_5(directory: Path, *, max_lag: int) -> TrainerRig:
    """Versions 0-5 went live one after the other; one group a step."""
    rig = TrainerRig(directory, groups_per_step=1, run_ahead=0, max_lag=max_lag, versions=8).begin()
    for version in range(5):
        rig.answer(version, version=version)
        rig.step()
        rig.go_live(version + 1)
    return rig


@pytest.mark.parametrize(
    ("max_lag", "version", "expected"),
    [
        (2, 5, ("trained", "", 0)),
        (2, 4, ("trained", "", 1)),
        (2, 3, ("trained", "", 2)),
        (2, 2, ("dropped", "stale", 3)),
        (0, 5, ("trained", "", 0)),
        (0, 4, ("dropped", "stale", 1)),
        (99, 2, ("trained", "", 3)),
    ],
)
def test_c42_lag_is_trained_up_to_the_limit_and_dropped_with_its_number_above(
    tmp_path: Path, max_lag: int, version: int, expected: tuple[str, str, int]
) -> None:
    """C42: the trainer stands at version 5; groups sampled by 5, 4, 3 and 2 under limits 2, 0 and none."""
    rig = at_version_5(tmp_path, max_lag=max_lag)
    rig.answer(5, version=version)
    rig.step()
    rig.wait(2)

    last = [d for d in rig.decisions() if d.subject is Subject.TRAJECTORY and d.group_id == rig.requests()[5].group_id]
    assert {d.decision.value for d in last} == {expected[0]}
    assert {d.reason for d in last} == {expected[1]}
    if expected[0] == "trained":
        assert {d.policy_lag for d in last} == {expected[2]}
    else:
        assert {d.detail for d in last} == {f"lag {expected[2]} > {max_lag}"}


@pytest.mark.parametrize("max_lag", [2, 99])
def test_c42_a_version_from_the_future_is_kept_out_and_closed_by_its_time_out(tmp_path: Path, max_lag: int) -> None:
    """C42: version 6 does not exist yet when the trainer stands at 5."""
    rig = at_version_5(tmp_path, max_lag=max_lag)
    rig.answer(5, version=6)
    rig.wait(30)
    waiting = rig.steps()
    rig.wait(31)
    rig.wait(2)

    assert [step.version_out for step in waiting] == [1, 2, 3, 4, 5]
    assert (rig.requests()[5].group_id, "dropped", "unproven") in rig.told()


def test_c45_a_backlog_that_is_too_old_is_passed_by_and_the_fresh_group_trained(tmp_path: Path) -> None:
    """C45: 100 groups of an earlier life of the topic, then the open groups too old, then one that is fresh."""
    rig = at_version_5(tmp_path, max_lag=2)
    for number in range(100):
        old = group(GroupId(f"sim/p{number:06d}/e9/a0"), [1.0, 0.0], group_size=4, segments=[(0, 1, 3)])
        rig.send(old)
    rig.answer(5, version=0)
    rig.step(12)
    rig.wait(2)
    again = rig.requests()[-1]
    rig.answer(again.request_position, version=5)
    rig.step()

    ends = {p: len(rig.log.partition("sim.trajectories", p).entries) for p in range(4)}
    reasons = [d.reason for d in rig.decisions() if d.subject is Subject.TRAJECTORY]
    assert reasons.count("group_closed") == 200
    assert (rig.requests()[5].group_id, "dropped", "stale") in rig.told()
    assert (again.group_id, "trained", "") in rig.told()
    assert rig.committed() == ends, "nothing is read again"
    assert rig.steps()[-1].version_out == 6


def test_c45_a_drop_is_counted_in_the_step_that_follows(tmp_path: Path) -> None:
    """C45: what was dropped on the way to a step shows in its metrics."""
    rig = at_version_5(tmp_path, max_lag=2)
    for number in range(10):
        rig.send(group(GroupId(f"sim/p{number:06d}/e9/a0"), [1.0], group_size=4, segments=[(0, 1, 3)]))
    rig.answer(5, version=5)
    rig.step(1)

    assert rig.steps()[-1].metrics["dropped/group_closed"] == 10.0


def test_c47_memory_stays_bounded_however_much_lies_in_the_log_and_everything_is_accounted(tmp_path: Path) -> None:
    """C47: workers wrote far more than was asked for; sixteen groups are open, the rest is refused as it is read."""
    rig = TrainerRig(tmp_path, groups_per_step=8, run_ahead=1, versions=4)
    rig.changes = {"max_pending_decisions": 32, "poll_records": 8}
    rig.trainer = rig.build()
    rig.begin()
    for number in range(300):
        rig.send(group(GroupId(f"sim/p{number:06d}/e9/a0"), [1.0, 0.0], group_size=4, segments=[(0, 1, 3)]))
    rig.answer(*range(1, 16))
    held, pending = 0, 0
    for _ in range(120):
        rig.step(1)
        desk = rig.trainer._desk
        assert desk is not None
        held = max(held, sum(len(list(buffer.rows())) for buffer in desk.assembler.buffers()))
        pending = max(pending, len(desk.decisions))
    rig.answer(0)
    rig.step(8)

    told = [d for d in rig.decisions() if d.subject is Subject.TRAJECTORY]
    assert held <= 16 * 4
    assert pending <= 32 + 8 * 4
    assert len([d for d in told if d.reason == "group_closed"]) == 600
    assert len([d for d in told if d.decision.value == "trained"]) == 16 * 4
    assert len({(d.partition, d.offset, d.row) for d in told}) == len(told) == 300 * 2 + 16 * 4


def test_c47_a_backlog_above_the_bound_of_decisions_does_not_block_the_end_of_the_run(tmp_path: Path) -> None:
    """C47 at the end: after the last step more rows lie in the log than may be held undecided."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=1)
    rig.changes = {"max_pending_decisions": 4, "poll_records": 2}
    rig.trainer = rig.build()
    rig.begin()
    rig.answer(0)
    rig.step(3)
    for number in range(20):
        rig.send(group(GroupId(f"sim/p{number:06d}/e9/a0"), [1.0, 0.0], group_size=4, segments=[(0, 1, 3)]))
    rig.go_live(1)
    rig.step(60)

    assert rig.trainer.finished
    assert len([d for d in rig.decisions() if d.reason == "group_closed"]) == 40
    assert isinstance(rig.controls()[-1], LedgerEnded)


def test_c51_after_a_kill_the_untrained_groups_are_trained_and_the_trained_ones_not_again(tmp_path: Path) -> None:
    """C51: groups 0-7 are read, 0-3 trained, the process killed; then the rest, and at the end no other pass."""
    rig = TrainerRig(tmp_path, groups_per_step=2, run_ahead=3, max_lag=3, versions=4).begin()
    rig.answer(0, 1, 2, 3, 5, 6, 7)
    rig.step(8)
    before = [step.version_out for step in rig.steps()]
    rig.restart()
    rig.answer(4)
    rig.step(8)
    rig.wait(11)
    rig.restart()
    rig.wait(11)

    groups = [name for name, decision, _ in rig.told() if decision == "trained"]
    assert before == [1, 2]
    assert groups == [request.group_id for request in rig.requests()]
    assert len(groups) == 8
    assert rig.trainer.finished
    assert [step.version_out for step in rig.steps()] == [1, 2, 3, 4]


def test_c59_a_kill_loses_nothing_and_committed_offsets_never_pass_an_untrained_group(tmp_path: Path) -> None:
    """C59: eight groups are read, three trained, then the process is killed without warning."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=7, max_lag=7, versions=8).begin()
    rig.answer(*range(8))
    for _ in range(3):
        while len(rig.steps()) < _ + 1:
            rig.step(1)
        undecided = {p: progress.undecided for p, progress in rig.steps()[-1].position.partitions.items()}
        assert all(offset <= min(undecided[p], default=offset) for p, offset in rig.committed().items())
    rig.clock.advance(10)
    rig.restart()
    rig.step(12)

    assert [name for name, decision, _ in rig.told() if decision == "trained"] == [r.group_id for r in rig.requests()]
    assert [step.version_out for step in rig.steps()] == list(range(1, 9))
