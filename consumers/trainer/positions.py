"""Which records of `trajectories` are decided: the arithmetic behind "nothing is lost, nothing twice" (G1, G5).

Per partition: the next offset to read, and the offsets below it that are still undecided. A record below
next_offset that is not listed was decided and is skipped when it is read again after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from schemas.ledger import PartitionProgress

RecordKey = tuple[int, int]
"""(partition, offset)"""


class Progress:
    """Mutable; rebuilt from the last committed Position on restart."""

    def __init__(self, partitions: Mapping[int, PartitionProgress]) -> None:
        self._next = {partition: progress.next_offset for partition, progress in partitions.items()}
        self._undecided = {partition: set(progress.undecided) for partition, progress in partitions.items()}

    def is_decided(self, key: RecordKey) -> bool:
        """The record was decided in a committed transaction, or is being held already."""
        partition, offset = key
        return offset < self._next[partition] and offset not in self._undecided[partition]

    def receive(self, key: RecordKey) -> None:
        """The record was read and is held, undecided. Gaps (transaction markers) are stepped over."""
        partition, offset = key
        if offset >= self._next[partition]:
            self._next[partition] = offset + 1
            self._undecided[partition].add(offset)

    def decide(self, key: RecordKey) -> None:
        """Every row of the record has its decision in the transaction being built."""
        partition, offset = key
        if offset not in self._undecided[partition]:
            raise AssertionError(f"trajectories[{partition}]@{offset} was decided twice")
        self._undecided[partition].remove(offset)

    def step_over(self, partition: int, first: int, held: Collection[RecordKey]) -> int:
        """Records below `first` are gone from the log and were never decided: forget them; how many offsets that is.

        What is held of them is decided as if nothing had happened."""
        gone = {offset for offset in self._undecided[partition] if offset < first and (partition, offset) not in held}
        unread = max(0, first - self._next[partition])
        self._undecided[partition] -= gone
        self._next[partition] += unread
        return len(gone) + unread

    def low_waters(self) -> dict[int, int]:
        """Per partition: where reading must begin again after a restart."""
        return {p: min(undecided, default=self._next[p]) for p, undecided in self._undecided.items()}

    def snapshot(self) -> dict[int, PartitionProgress]:
        """The value that goes into the ledger."""
        return {
            partition: PartitionProgress(next_offset=self._next[partition], undecided=tuple(sorted(undecided)))
            for partition, undecided in self._undecided.items()
        }
