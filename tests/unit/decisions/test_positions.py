"""Which records are decided: nothing lost, nothing twice, over restarts, gaps and several partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.trainer.positions import Progress
from schemas.ledger import PartitionProgress


def at(*next_offsets: int) -> Progress:
    return Progress({p: PartitionProgress(next_offset=n) for p, n in enumerate(next_offsets)})


def take(progress: Progress, *keys: tuple[int, int]) -> None:
    for key in keys:
        progress.receive(key)


def test_the_committed_offset_is_the_one_after_the_last_trained() -> None:
    """C61: last trained 41."""
    progress = at(41)
    take(progress, (0, 41))
    progress.decide((0, 41))

    assert progress.low_waters() == {0: 42}
    restarted = Progress(progress.snapshot())
    assert restarted.is_decided((0, 41))
    assert not restarted.is_decided((0, 42))


def test_every_partition_of_a_mixed_batch_moves_on() -> None:
    """C62: p0 10 and 11, p1 5, p2 7, in that poll order."""
    progress = at(10, 5, 7)
    keys = [(0, 10), (0, 11), (1, 5), (2, 7)]
    take(progress, *keys)
    for key in keys:
        progress.decide(key)

    assert progress.low_waters() == {0: 12, 1: 6, 2: 8}
    restarted = Progress(progress.snapshot())
    assert all(restarted.is_decided(key) for key in keys)


def test_reading_begins_again_at_the_oldest_undecided_record() -> None:
    progress = at(0)
    take(progress, (0, 0), (0, 1), (0, 2))
    progress.decide((0, 1))

    assert progress.low_waters() == {0: 0}
    assert progress.snapshot() == {0: PartitionProgress(next_offset=3, undecided=(0, 2))}


def test_a_re_read_record_is_decided_only_if_it_is_listed() -> None:
    progress = Progress({0: PartitionProgress(next_offset=10, undecided=(4, 8))})

    assert [offset for offset in range(12) if not progress.is_decided((0, offset))] == [4, 8, 10, 11]


def test_offsets_of_transaction_markers_are_stepped_over() -> None:
    progress = at(0)
    take(progress, (0, 0), (0, 3))
    progress.decide((0, 0))
    progress.decide((0, 3))

    assert progress.low_waters() == {0: 4}
    assert progress.is_decided((0, 1))


def test_receiving_a_listed_record_again_changes_nothing() -> None:
    progress = Progress({0: PartitionProgress(next_offset=10, undecided=(4,))})
    progress.receive((0, 4))

    assert progress.snapshot() == {0: PartitionProgress(next_offset=10, undecided=(4,))}


def test_deciding_twice_is_our_own_mistake_and_loud() -> None:
    progress = at(0)
    take(progress, (0, 0))
    progress.decide((0, 0))

    with pytest.raises(AssertionError, match=r"trajectories\[0\]@0 was decided twice"):
        progress.decide((0, 0))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40), st.data())
def test_over_any_restart_every_record_is_decided_exactly_once(
    log: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """`log` is what lies in three partitions: records and markers. Each life decides some of what it holds."""
    partitions: dict[int, list[bool]] = {p: [is_record for q, is_record in log if q == p] for p in range(3)}
    records = {(p, o) for p, entries in partitions.items() for o, is_record in enumerate(entries) if is_record}
    decided: list[tuple[int, int]] = []
    position = at(0, 0, 0).snapshot()
    for life in range(3):
        progress = Progress(position)
        held = []
        for partition, start in progress.low_waters().items():
            for offset in range(start, len(partitions[partition])):
                if (partition, offset) in records and not progress.is_decided((partition, offset)):
                    progress.receive((partition, offset))
                    held.append((partition, offset))
        chosen = held if life == 2 else data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        for key in chosen:
            progress.decide(key)
        if life == 2 or data.draw(st.booleans()):  # otherwise: died before the commit
            decided += chosen
            position = progress.snapshot()

    assert sorted(decided) == sorted(records)
