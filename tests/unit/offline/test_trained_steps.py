"""Steps beside their rows: whole, in batch order, with little in memory; what is said of rows that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.offline.run_log import RunLog
from consumers.offline.trained_steps import Shelf, TrainedStep, trained_steps
from consumers.trainer.replay import ReplayRules
from schemas.errors import IllegalState, RangeMissing
from schemas.ledger import Decision
from schemas.row_hash import batch_digest
from schemas.topics import TopicName
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun

REPLAYING = ReplayRules(steps=3, groups_per_step=1, max_use=2)


def _steps(log: RunLog, first: int | None = None, last: int | None = None) -> list[TrainedStep]:
    return list(trained_steps(log, first=first, last=last))


def test_every_step_comes_with_its_rows_in_the_order_of_the_batch(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=5, max_lag=2, replay=REPLAYING)

    steps = _steps(run.run_log())

    assert [step.control.version_out for step in steps] == [1, 2, 3, 4, 5]
    assert [step.problems for step in steps] == [()] * 5
    for step in steps:
        assert batch_digest(step.row_sha256) == step.control.batch_digest
        assert [row.trajectory_id for row in step.whole_rows] == [d.trajectory_id for d in step.decisions]
        assert [len(group.members) for group in step.groups] == [3, 3]
    replayed = [d for step in steps for d in step.decisions if d.decision is Decision.REPLAYED]
    assert len(replayed) >= 3


def test_a_range_of_versions_gives_the_same_steps_as_the_whole(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=5, max_lag=2, replay=REPLAYING)
    whole = {step.control.version_out: step for step in _steps(run.run_log())}

    middle = _steps(run.run_log(), first=3, last=4)

    assert [step.control.version_out for step in middle] == [3, 4]
    for step in middle:
        assert step.row_sha256 == whole[step.control.version_out].row_sha256
        assert step.before == whole[step.control.version_out].before


def test_a_branch_start_has_no_step_and_the_steps_behind_it_come_in_the_order_of_the_ledger(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=4, then_branch_from=2)

    steps = _steps(run.run_log())

    pairs = [(step.control.version_in, step.control.version_out) for step in steps]
    assert pairs == [(0, 1), (1, 2), (2, 3), (3, 4), (5, 6), (6, 7)]
    assert [step.problems for step in steps] == [()] * 6


def test_members_of_a_losing_claim_are_in_the_group_but_not_in_its_baseline(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)

    group = next(g for step in _steps(run.run_log()) for g in step.groups if len(g.rows) > 2)

    assert [row.decision.reason for row in group.rows] == ["", "", "duplicate", "duplicate"]
    assert [row.decision.reason for row in group.members] == ["", ""]


def test_no_more_records_are_held_than_are_undecided_or_may_be_replayed(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=8, max_lag=2, replay=REPLAYING)
    log = run.run_log()
    shelf, most = Shelf(log, None), 0
    for transaction in log.transactions():
        for row in transaction.decisions:
            if row.partition is not None and row.offset is not None:
                shelf.get((row.partition, row.offset))
        most = max(most, shelf.held())
        shelf.forget(transaction)
    shelf.close()

    records = len(list(log.trajectories()))
    assert records >= 16
    assert most <= 2 * 3 + 4


# ---------------------------------------------------------------------- rows that are not what the ledger says


def test_an_altered_reward_is_named_with_trajectory_place_and_field(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    _, decision = Forge(run).trained()[0]
    Forge(run).edit_trajectory(str(decision.trajectory_id), reward=0.25)

    problems = [problem for step in _steps(run.run_log()) for problem in step.problems]

    assert [(p.kind, p.trajectory_id) for p in problems] == [("altered", decision.trajectory_id)]
    assert problems[0].place == f"trajectories[{decision.partition}]@{decision.offset} row {decision.row}"
    assert "reward was 1.0 when it was decided, in the log it is 0.25" in str(problems[0])


def test_altered_log_probabilities_are_named_although_the_ledger_does_not_repeat_them(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    _, decision = Forge(run).trained()[0]
    Forge(run).edit_trajectory(str(decision.trajectory_id), finish_reason="length")

    (problem,) = [problem for step in _steps(run.run_log()) for problem in step.problems]

    assert (problem.kind, problem.trajectory_id) == ("altered", decision.trajectory_id)
    assert "a field the ledger does not repeat" in problem.detail


def test_a_reward_that_is_altered_in_the_ledger_alone_is_named(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    _, decision = Forge(run).trained()[0]
    Forge(run).edit_decision(str(decision.trajectory_id), reward=9.0)

    (problem,) = [problem for step in _steps(run.run_log()) for problem in step.problems]

    assert "reward was 9.0 when it was decided, in the log it is 1.0" in problem.detail


def test_a_record_that_is_gone_or_broken_is_named_and_the_other_steps_stay_whole(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    forge = Forge(run)
    trained = forge.trained()
    places = {(d.partition, d.offset): None for _, d in trained}
    records = {(r.partition, r.offset): r for r in forge.records(TopicName.TRAJECTORIES)}
    first, *_, last = places
    forge.remove(records[first])
    forge.flip_byte(records[last], 0)

    steps = _steps(run.run_log())

    assert [{p.kind for p in step.problems} for step in steps] == [{"missing"}, set(), {"unreadable"}]
    assert steps[0].rows.count(None) == 2
    with pytest.raises(IllegalState, match=r"version 1 cannot be put together: tiny/p"):
        _ = steps[0].whole_rows


# ---------------------------------------------------------------------- retention


def test_removed_records_are_a_typed_error_that_names_them_and_the_way_out(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=5)
    whole = _steps(run.run_log())
    ends = {
        (d.partition, d.offset) for step in whole[:2] for d in step.decisions if d.partition is not None
    }  # fmt: skip
    for partition in range(4):
        offsets = [offset for p, offset in ends if p == partition and offset is not None]
        if offsets:
            run.log.drop_before("sim.trajectories", partition, max(offsets) + 1)

    with pytest.raises(RangeMissing, match=r"version 1 .* retention removed trajectories\[\d\] records") as raised:
        _steps(run.run_log())

    assert "ask for versions from " in str(raised.value)
    whole_from = int(str(raised.value).split("from ")[-1].split()[0])
    assert whole_from >= 3
    retained = _steps(run.run_log(), first=whole_from)
    assert [step.row_sha256 for step in retained] == [step.row_sha256 for step in whole[whole_from - 1 :]]


def test_when_no_version_is_whole_it_says_so(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=3)
    for partition in range(4):
        run.log.drop_before("sim.trajectories", partition, 10**6)

    with pytest.raises(RangeMissing, match="no later version is whole"):
        _steps(run.run_log())
