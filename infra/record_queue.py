"""The bounded queue between a reader thread and its service, and the positions that travel through it.

A position reaches the service only after every record below it was taken: positions queue up behind records.
Entries of a partition that was sought or revoked meanwhile carry an old epoch and are dropped when taken.
Knows nothing of Kafka. All methods are thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infra.ports import Record
from infra.wakeup import Wakeup

Place = tuple[str, int]
"""(topic, partition)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    place: Place
    epoch: int
    record: Record | None
    """None: only the position moved (transaction markers, aborted records)"""
    position: int


def record_bytes(record: Record) -> int:
    """What a record holds in memory, headers included."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(value) for name, value in record.headers)


class RecordQueue:
    """First in, first out, with room for so many records and bytes."""

    def __init__(self, *, max_records: int, max_bytes: int, wakeup: Wakeup) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._wakeup = wakeup
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        self._records = 0
        self._bytes = 0
        self._epochs: dict[Place, int] = {}
        self._last_epoch = 0
        self._positions: dict[Place, int] = {}
        self._queued_positions: dict[Place, int] = {}
        self._error: Exception | None = None

    # ------------------------------------------------------------ the service's side

    def start_at(self, place: Place, position: int) -> int:
        """Begin (again) at this position: what is queued of the partition is forgotten. Returns the new epoch."""
        with self._changed:
            self._drop(place)
            self._last_epoch += 1
            self._epochs[place] = self._last_epoch
            self._positions[place] = self._queued_positions[place] = position
            self._error = None
            self._changed.notify_all()
            return self._last_epoch

    def forget(self, place: Place) -> None:
        """The partition is no longer ours: its queued records and its position are gone."""
        with self._changed:
            self._drop(place)
            self._epochs.pop(place, None)
            self._positions.pop(place, None)
            self._queued_positions.pop(place, None)
            self._changed.notify_all()

    def take(self, max_records: int) -> list[Record]:
        """At most max_records; raises what the reader thread reported. Never waits."""
        taken: list[Record] = []
        with self._changed:
            if self._error is not None:
                raise self._error
            while self._entries:
                if self._entries[0].record is not None and len(taken) == max_records:
                    break
                entry = self._entries.popleft()
                self._positions[entry.place] = entry.position
                if entry.record is not None:
                    self._account(entry.record, -1)
                    taken.append(entry.record)
            self._changed.notify_all()
        return taken

    def positions(self) -> dict[Place, int]:
        """Per partition: every committed record below was taken."""
        with self._changed:
            return dict(self._positions)

    # ------------------------------------------------------------ the reader thread's side

    def epoch(self, place: Place) -> int | None:
        """The current epoch of a partition; None when it is not ours."""
        with self._changed:
            return self._epochs.get(place)

    def room(self) -> int:
        """How many records may be added now; 0 when the bytes are used up."""
        with self._changed:
            return self._room()

    def wait_for_room(self, limit_s: float) -> int:
        """`room`, after waiting at most limit_s for some."""
        with self._changed:
            self._changed.wait_for(lambda: self._room() > 0, timeout=limit_s)
            return self._room()

    def wait_until_taken(self, limit_s: float) -> bool:
        """Wait at most limit_s for the service to take every record; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._records == 0, timeout=limit_s)

    def put(self, place: Place, epoch: int, records: Iterable[Record], position: int) -> None:
        """Add what one poll brought of one partition, and how far it got. An old epoch is dropped here."""
        with self._changed:
            if self._epochs.get(place) != epoch:
                return
            added = False
            for record in records:
                self._entries.append(_Entry(place=place, epoch=epoch, record=record, position=record.offset + 1))
                self._account(record, +1)
                self._queued_positions[place] = record.offset + 1
                added = True
            if position > self._queued_positions[place]:
                self._queued_positions[place] = position
                self._entries.append(_Entry(place=place, epoch=epoch, record=None, position=position))
                added = True
        if added:
            self._wakeup.ring()

    def fail(self, error: Exception) -> None:
        """Every further `take` raises this, until a partition is started anew."""
        with self._changed:
            self._error = error
        self._wakeup.ring()

    def failed(self) -> bool:
        """An error waits for the service."""
        with self._changed:
            return self._error is not None

    def snapshot(self) -> Mapping[str, int]:
        """Records and bytes held now."""
        with self._changed:
            return {"records": self._records, "bytes": self._bytes}

    # ------------------------------------------------------------ inside

    def _room(self) -> int:
        return max(0, self._max_records - self._records) if self._bytes < self._max_bytes else 0

    def _account(self, record: Record, sign: int) -> None:
        self._records += sign
        self._bytes += sign * record_bytes(record)

    def _drop(self, place: Place) -> None:
        kept = deque(entry for entry in self._entries if entry.place != place)
        for entry in self._entries:
            if entry.place == place and entry.record is not None:
                self._account(entry.record, -1)
        self._entries = kept
