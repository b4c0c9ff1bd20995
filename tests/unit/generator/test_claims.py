"""Which requests are taken, finished and may be committed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.claims import Claims, PartitionClaims, finished_in


def test_the_committed_offset_is_the_lowest_unfinished_and_finished_ones_above_travel_along() -> None:
    claims = PartitionClaims(0)
    taken = [claims.take(offset) for offset in range(4)]
    claims.finish(1)
    claims.finish(3)

    assert taken == [True] * 4
    assert claims.commit_value() == (0, '{"finished":[1,3]}')
    claims.finish(0)
    assert claims.commit_value() == (2, '{"finished":[3]}')
    claims.finish(2)
    assert claims.commit_value() == (4, "")


def test_nothing_new_is_nothing_to_commit() -> None:
    claims = PartitionClaims(0)
    claims.take(0)
    claims.finish(0)
    claims.commit_value()

    assert claims.commit_value() is None
    assert PartitionClaims(None).commit_value() is None


def test_a_new_owner_skips_what_the_former_one_finished() -> None:
    former = PartitionClaims(5)
    for offset in (5, 6, 7, 8):
        former.take(offset)
    former.finish(6)
    former.finish(8)
    value = former.commit_value()
    assert value is not None

    owner = PartitionClaims(value[0], finished_in(value[1]))

    assert [owner.take(offset) for offset in (5, 6, 7, 8, 9)] == [True, False, True, False, True]


def test_a_request_is_taken_once() -> None:
    claims = PartitionClaims(3)

    assert [claims.take(3), claims.take(3), claims.take(2)] == [True, False, False]


def test_gaps_from_transaction_markers_are_stepped_over() -> None:
    claims = PartitionClaims(0)
    claims.take(0)
    claims.take(2)
    claims.finish(0)
    claims.finish(2)

    assert claims.commit_value() == (3, "")


def test_metadata_that_does_not_fit_is_cut_and_only_costs_work() -> None:
    claims = PartitionClaims(0)
    for offset in range(10_000):
        claims.take(offset)
        if offset:
            claims.finish(offset)
    value = claims.commit_value()

    assert value is not None
    assert value[0] == 0
    assert len(value[1]) <= 3_500
    assert finished_in(value[1]) == list(range(1, len(finished_in(value[1])) + 1))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"finished": "x"}', '{"other": [1]}', "null", '{"finished": [true, "a"]}']
)
def test_unreadable_metadata_counts_as_nothing(text: str) -> None:
    assert [offset for offset in finished_in(text) if not isinstance(offset, bool)] == []


def test_revoked_partitions_are_forgotten_and_never_committed() -> None:
    claims = Claims()
    claims.assign(0, None)
    claims.assign(1, (4, ""))
    claims.take(0, 0)
    claims.take(1, 4)
    claims.revoke(1)
    claims.finish(1, 4)
    claims.finish(0, 0)

    assert claims.owned() == {0}
    assert claims.commits() == {0: (1, "")}
    assert not claims.take(1, 5)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60))
def test_the_committed_offset_never_passes_an_unfinished_request(story: list[tuple[int, bool]]) -> None:
    """Requests are read in order; any of those taken may be finished at any time."""
    claims, read, finished, low = PartitionClaims(0), 0, set(), 0
    for pick, reads_on in story:
        if reads_on:
            claims.take(read)
            read += 1
        elif read:
            claims.finish(pick % read)
            finished.add(pick % read)
        value = claims.commit_value()
        if value is not None:
            low, above = value[0], set(finished_in(value[1]))
            assert all(offset in finished for offset in range(low))
            assert above <= finished
    unfinished = [offset for offset in range(read) if offset not in finished]
    assert low == (min(unfinished) if unfinished else read)
