"""Groups assembled from records by claim: the first complete claim wins, and every row ends somewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from consumers.trainer.grouping import Assembler, GroupBuffer
from schemas.ledger import OpenGroup, Reason
from schemas.trajectory import DecodedRow
from tests.fakes.log_script import G0, G1, decoded, group, trajectory

A = "demo/p000000/e0/a0"
B = "demo/p000001/e0/a0"


def open_group(group_id: str, position: int = 0, step: int = 0) -> OpenGroup:
    attempt = int(group_id.rsplit("a", 1)[1])
    return OpenGroup(group_id=group_id, request_position=position, issued_at_us=0, attempt=attempt, intended_step=step)


def assembler(size: int = 4) -> Assembler:
    return Assembler([open_group(A), open_group(B, 1)], size)


def buffer_of(found: Assembler, group_id: str) -> GroupBuffer:
    return next(b for b in found.buffers() if b.group.group_id == group_id)


def broken(row: DecodedRow, code: str = "nan_logprob") -> DecodedRow:
    return replace(row, trajectory=None, code=code, detail="planted")


def reasons(refused: list) -> list[str]:
    return [held.refusal for held in refused]


def test_a_whole_group_in_one_record_is_complete_at_once() -> None:
    found = assembler()

    assert found.add((0, 0), decoded(group(A, [1, 0, 0, 1]))) == []
    assert buffer_of(found, A).winner == "g0/i1/0"


def test_a_group_split_over_records_and_partitions_is_one_group() -> None:
    """C21: two members from partition 0, the other two from partition 1 later, another group in between."""
    found, rows = assembler(), group(A, [1, 1, 0, 0])
    found.add((0, 7), decoded(rows[:2]))
    found.add((0, 8), decoded(group(B, [1, 0, 1, 0])))
    incomplete = buffer_of(found, A).winner
    found.add((1, 3), decoded(rows[2:]))

    buffer = buffer_of(found, A)
    assert incomplete is None
    assert buffer.winner == "g0/i1/0"
    assert [m.trajectory.reward for _, m in sorted(buffer.claims["g0/i1/0"].members.items())] == [1, 1, 0, 0]
    assert buffer.records() == {(0, 7), (1, 3)}


def test_members_of_two_claims_never_make_one_group() -> None:
    found, mine, other = assembler(), group(A, [1, 1, 0, 0]), group(A, [1, 0, 1, 0], key=G1)
    found.add((0, 0), decoded(mine[:2]))
    found.add((0, 1), decoded(other[2:]))

    assert buffer_of(found, A).winner is None


def test_the_first_complete_claim_wins_not_the_first_to_begin() -> None:
    found, slow, fast = assembler(), group(A, [1, 1, 0, 0]), group(A, [1, 0, 1, 0], key=G1)
    found.add((0, 0), decoded(slow[:3]))
    found.add((0, 1), decoded(fast))
    late = found.add((0, 2), decoded(slow[3:]))

    assert buffer_of(found, A).winner == "g1/i1/0"
    assert reasons(late) == ["duplicate"]
    assert late[0].detail == "claim g1/i1/0 was complete first"


def test_the_same_rows_again_are_duplicates_and_other_bytes_a_conflict() -> None:
    found, rows = assembler(), group(A, [1, 0, 0, 1])
    found.add((0, 0), decoded(rows))

    assert reasons(found.add((0, 1), decoded(rows))) == ["duplicate"] * 4
    assert reasons(found.add((0, 2), decoded([replace(rows[1], reward=0.5)]))) == ["conflict"]
    assert buffer_of(found, A).claims["g0/i1/0"].members[1].trajectory.reward == 0


def test_a_record_of_old_and_new_rows_waits_for_its_group() -> None:
    found, rows = assembler(), group(A, [1, 0, 0, 1])
    found.add((0, 0), decoded(rows[:2]))

    assert found.add((0, 1), decoded(rows)) == []
    buffer = buffer_of(found, A)
    assert reasons(buffer.refused) == ["duplicate", "duplicate"]
    assert len(list(buffer.rows())) == 6


def test_a_group_outside_the_open_set_is_closed() -> None:
    found = assembler()

    refused = found.add((0, 0), decoded(group("demo/p000009/e0/a0", [1, 0, 0, 1])))

    assert reasons(refused) == ["group_closed"] * 4


def test_a_late_member_is_refused_and_never_a_group_of_its_own() -> None:
    """C19: three of four arrived, the group was closed at its deadline, then the fourth comes."""
    found, rows = assembler(), group(A, [1, 0, 0, 1])
    found.add((0, 0), decoded(rows[:3]))
    closed = found.close(A)

    assert len(list(closed.rows())) == 3
    assert reasons(found.add((0, 1), decoded(rows[3:]))) == ["group_closed"]
    assert len(found) == 1


def test_a_member_that_says_it_is_alone_is_a_conflict() -> None:
    """C16: every member its own group of one, while the run asks for four."""
    found = assembler()

    refused = [found.add((0, i), decoded([trajectory(A, 0, group_size=1, claim=f"c{i}")])) for i in range(4)]

    assert [reasons(r) for r in refused] == [["conflict"]] * 4
    assert refused[0][0].detail == "group_size 1, the run asks for 4"
    assert buffer_of(found, A).winner is None


def test_a_broken_member_spoils_its_claim_and_another_claim_may_still_win() -> None:
    found, rows = assembler(), decoded(group(A, [1, 0, 0, 1]))
    found.add((0, 0), (rows[0], broken(rows[1]), rows[2], rows[3]))
    claim = buffer_of(found, A).claims["g0/i1/0"]
    spoilt = (claim.is_complete(4), claim.is_spoilt(4))
    found.add((0, 1), decoded(group(A, [1, 1, 0, 0], key=G1)))

    assert spoilt == (False, True)
    assert buffer_of(found, A).winner == "g1/i1/0"


def test_a_claim_is_not_spoilt_before_all_its_members_are_there() -> None:
    found, rows = assembler(), decoded(group(A, [1, 0, 0, 1]))
    found.add((0, 0), (rows[0], broken(rows[1])))

    assert not buffer_of(found, A).claims["g0/i1/0"].is_spoilt(4)


def test_a_broken_row_that_follows_the_complete_claim_is_refused_at_once() -> None:
    """It would have no place in the group that is trained, so it must get its decision elsewhere."""
    found, rows = assembler(), decoded(group(A, [1, 0, 0, 1]))
    found.add((0, 0), rows)

    assert reasons(found.add((0, 1), (broken(rows[0]),))) == ["invalid:nan_logprob"]


def test_a_broken_row_too_many_in_the_record_of_the_winner_is_held_as_refused() -> None:
    found, rows = assembler(), decoded(group(A, [1, 0, 0, 1]))
    found.add((0, 0), (*rows, broken(replace(rows[0], row=4))))

    buffer = buffer_of(found, A)
    assert buffer.winner == "g0/i1/0"
    assert reasons(buffer.refused) == ["invalid:nan_logprob"]


def test_the_claims_of_a_group_are_bounded() -> None:
    found = assembler()
    outcomes = [found.add((0, i), decoded([trajectory(A, 0, claim=f"c{i}")])) for i in range(10)]

    assert [reasons(o) for o in outcomes] == [[]] * 8 + [["duplicate"]] * 2
    assert outcomes[8][0].detail == "more than 8 claims"


def test_broken_rows_of_a_claim_are_bounded() -> None:
    found, rows = assembler(), decoded(group(A, [1, 0, 0, 1]))
    outcomes = [found.add((0, i), (broken(rows[0]),)) for i in range(6)]

    assert [reasons(o) for o in outcomes] == [[]] * 4 + [["invalid:nan_logprob"]] * 2


def test_groups_are_trained_oldest_step_first_then_by_request() -> None:
    groups = [open_group(f"demo/p00000{i}/e0/a0", position, step) for i, (position, step) in
              enumerate([(5, 2), (9, 1), (3, 2), (8, 1)])]  # fmt: skip

    found = Assembler(groups, 4)

    assert [b.group.request_position for b in found.buffers()] == [8, 9, 3, 5]
    assert [g.request_position for g in found.open_groups()] == [3, 5, 8, 9]


def test_a_slot_is_freed_once_and_a_group_opened_once() -> None:
    found = assembler()
    found.close(A)

    with pytest.raises(KeyError):
        found.close(A)
    with pytest.raises(AssertionError, match="is open already"):
        found.open(open_group(B))


def test_memory_is_bounded_by_the_open_set_however_much_arrives() -> None:
    """C47 in small: what belongs to no open group is handed back at once, and repeats are not kept."""
    found, rows = assembler(), decoded(group(A, [1, 0, 0, 1]))
    for number in range(200):
        found.add((0, number), rows)
        found.add((1, number), decoded([trajectory("demo/p000077/e0/a0", 0)]))

    assert sum(len(list(b.rows())) for b in found.buffers()) == 4


def test_a_refusal_names_the_reason_of_the_row_before_that_of_its_group() -> None:
    found, rows = assembler(), decoded(group("demo/p000009/e0/a0", [1, 0], group_size=2, key=G0))

    assert reasons(found.add((0, 0), (broken(rows[0]), rows[1]))) == ["invalid:nan_logprob", Reason.GROUP_CLOSED]
