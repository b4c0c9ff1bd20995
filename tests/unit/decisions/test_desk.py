"""The trainer's desk: every row, group and record gets exactly one decision, in one transaction."""

from __future__ import annotations

from dataclasses import replace

from consumers.trainer.admission import AdmissionRules
from consumers.trainer.desk import Desk
from consumers.trainer.pacing import PacingRules
from consumers.trainer.replay import ReplayRules
from consumers.trainer.requests import Cursor, Issued, RequestRules
from consumers.trainer.selection import ReadyGroup, SelectionRules, judge_group
from infra.ports import Record
from schemas.errors import InvalidRecord
from schemas.ids import RunId
from schemas.ledger import Decision, DecisionRow, OpenGroup, PartitionProgress, Position, Reason, Subject
from schemas.trajectory import Sampling
from tests.fakes.log_script import G0, G1, TOKENIZER, decoded, group, running, trajectory

A = "demo/p000000/e0/a0"
RULES = RequestRules(
    run=RunId("demo"),
    group_size=4,
    max_lag=2,
    max_attempts=2,
    sampling=Sampling(),
    pacing=PacingRules(groups_per_step=1, run_ahead=0, last_step=9),
)
SELECTION = SelectionRules(
    groups_per_step=1,
    order="issue",
    min_group=2,
    filter_zero_variance=False,
    admission=AdmissionRules(max_lag=2, barrier=True, tokenizer_digest=TOKENIZER),
)


def desk(group_id: str = A) -> Desk:
    attempt = int(group_id.rsplit("a", 1)[1])
    open_group = OpenGroup(group_id=group_id, request_position=0, issued_at_us=0, attempt=attempt, intended_step=0)
    partitions = {p: PartitionProgress(next_offset=0) for p in range(2)}
    position = Position(open_groups=(open_group,), next_request=1, prompt_cursor=1, partitions=partitions)
    return Desk(position, RULES, ReplayRules())


def told(decisions: list[DecisionRow]) -> list[tuple[str, str, str]]:
    return [(d.subject.value, d.decision.value, d.reason) for d in decisions]


def test_rows_of_an_open_group_are_held_undecided() -> None:
    found = desk()
    found.take_rows((0, 0), decoded(group(A, [1, 0, 0, 1])), 0)

    assert not found.has_decisions()
    assert found.low_waters() == {0: 0, 1: 0}
    assert found.position().partitions[0] == PartitionProgress(next_offset=1, undecided=(0,))


def test_rows_of_a_closed_group_are_decided_at_once() -> None:
    found = desk()
    found.take_rows((0, 0), decoded(group("demo/p000009/e0/a0", [1, 0, 0, 1])), 0)

    assert told(found.decisions) == [("trajectory", "dropped", "group_closed")] * 4
    assert found.low_waters() == {0: 1, 1: 0}


def test_a_record_that_does_not_decode_is_decided_by_position_and_kept_for_the_dead_letters() -> None:
    found = desk()
    record = Record(topic="t", partition=1, offset=3, key=b"k", value=b"\x00", headers=(), timestamp_ms=0)
    found.take_poison(record, InvalidRecord("not_arrow", "planted"), 0)

    assert told(found.decisions) == [("record", "dropped", "invalid:not_arrow")]
    assert (found.decisions[0].partition, found.decisions[0].offset) == (1, 3)
    assert [dead.value for dead, _ in found.dead] == [b"\x00"]
    assert found.low_waters()[1] == 4


def test_a_trained_group_decides_members_losers_and_refused_rows() -> None:
    script, proofs = running(G0, G1)
    found = desk()
    mine = group(A, [1, 0, None, 1], segments=[(0, 2, proofs[G0, 0])])
    found.take_rows((0, 0), decoded(group(A, [0, 0, 0, 0], key=G1)[:2]), 0)
    found.take_rows((0, 1), decoded(mine[:3]), 0)
    found.take_rows((0, 2), decoded([mine[0], mine[3]]), 0)
    ready = judge_group(found.assembler.buffers()[0], script.fold, 0, SELECTION, group_size=4)
    assert isinstance(ready, ReadyGroup)

    found.finish(ready, {0: 0.5, 1: -0.5, 3: 0.5}, {0: 1.0, 1: 1.0, 3: 1.0}, 0)

    assert told(found.decisions) == [
        ("group", "trained", ""),
        ("trajectory", "trained", ""),
        ("trajectory", "trained", ""),
        ("trajectory", "dropped", "reward_failed"),
        ("trajectory", "trained", ""),
        ("trajectory", "dropped", "duplicate"),
        ("trajectory", "dropped", "duplicate"),
        ("trajectory", "dropped", "duplicate"),
    ]
    rows = [(d.offset, d.row) for d in found.decisions if d.subject is Subject.TRAJECTORY]
    assert sorted(rows) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert found.low_waters() == {0: 3, 1: 0}
    assert len(found.assembler) == 0


def test_a_withheld_member_keeps_its_reason_and_lag() -> None:
    script, proofs = running(G0, versions=5)
    found = desk()
    versions = [4, 4, 4, 1]
    rows = [
        trajectory(A, i, reward=float(i % 2), segments=[(v, 2, proofs[G0, v])]) for i, v in enumerate(versions)
    ]  # fmt: skip
    found.take_rows((0, 0), decoded(rows), 0)
    ready = judge_group(found.assembler.buffers()[0], script.fold, 4, SELECTION, group_size=4)
    assert isinstance(ready, ReadyGroup)
    found.finish(ready, dict.fromkeys(range(3), 0.5), dict.fromkeys(range(3), 1.0), 0)

    last = found.decisions[-1]
    assert (last.trajectory_id, last.decision, last.reason) == (f"{A}/3", Decision.DROPPED, Reason.STALE)
    assert (last.policy_lag, last.detail, last.reward, last.weight) == (3, "lag 3 > 2", 1.0, 0.0)


def test_a_group_dropped_before_a_claim_was_complete_gives_its_reason_to_all_its_rows() -> None:
    found = desk()
    rows = list(decoded(group(A, [1, 0, 0, 1])))
    rows[1] = replace(rows[1], trajectory=None, code="nan_logprob")
    found.take_rows((0, 0), tuple(rows[:3]), 0)
    found.drop(found.assembler.buffers()[0], Reason.INCOMPLETE, 0, "3/4 members")

    assert told(found.decisions) == [
        ("group", "dropped", "incomplete"),
        ("trajectory", "dropped", "incomplete"),
        ("trajectory", "dropped", "incomplete"),
        ("trajectory", "dropped", "invalid:nan_logprob"),
    ]
    assert found.low_waters()[0] == 1


def test_a_group_dropped_after_a_claim_won_calls_the_losers_duplicates() -> None:
    found = desk()
    found.take_rows((0, 0), decoded(group(A, [0, 0, 0, 0], key=G1)[:1]), 0)
    found.take_rows((0, 1), decoded(group(A, [1, 0, 0, 1])), 0)
    found.drop(found.assembler.buffers()[0], Reason.STALE, 0)

    assert told(found.decisions) == [
        ("group", "dropped", "stale"),
        *[("trajectory", "dropped", "stale")] * 4,
        ("trajectory", "dropped", "duplicate"),
    ]


def test_a_group_without_a_row_is_decided_too() -> None:
    found = desk()
    found.drop(found.assembler.buffers()[0], Reason.LOST, 0)

    assert told(found.decisions) == [("group", "dropped", "lost")]


def test_a_dropped_prompt_is_put_up_for_another_attempt_or_on_the_never_trained_list() -> None:
    first, last = desk(), desk("demo/p000000/e0/a1")
    for found in (first, last):
        found.drop(found.assembler.buffers()[0], Reason.LOST, 0)
    fixed = desk()
    fixed.drop(fixed.assembler.buffers()[0], Reason.STEP_FAILED, 0)

    assert ([g.group_id for g in first.again], first.never_trained) == ([A], 0)
    assert (last.again, last.never_trained) == ([], 1)
    assert (fixed.again, fixed.never_trained) == ([], 1)


def test_the_end_of_the_run_decides_everything_that_is_open_and_asks_for_nothing() -> None:
    found = desk()
    found.take_rows((0, 0), decoded(group(A, [1, 0, 0, 1])[:2]), 0)
    found.end_everything(0)

    assert told(found.decisions) == [("group", "dropped", "run_ended"), *[("trajectory", "dropped", "run_ended")] * 2]
    assert found.position().open_groups == ()
    assert (found.again, found.never_trained) == ([], 0)


def test_a_committed_transaction_clears_the_desk_and_adopted_requests_open_their_groups() -> None:
    found = desk()
    found.drop(found.assembler.buffers()[0], Reason.LOST, 0)
    new = OpenGroup(group_id="demo/p000000/e0/a1", request_position=1, issued_at_us=0, attempt=1, intended_step=0)
    found.adopt(Issued(requests=(), groups=(new,), cursor=Cursor(next_request=2, prompt_cursor=1)))
    found.taken()

    assert not found.has_decisions()
    assert (found.again, found.dead) == ([], [])
    assert found.position().open_groups == (new,)
    assert (found.position().next_request, found.position().prompt_cursor) == (2, 1)
