"""Sends finished groups and knows when they are in the log. Bounded by the writer's byte budget.

A group too large for one record is split into halves (readers assemble split groups); a single row that is
too large or invalid is lost with a reason, and the trainer closes its group by time-out. An unacknowledged record is
sent again a few times: readers de-duplicate by claim, index and row hash.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.logs import event
from infra.ports import Delivery, EventWriter, Message, Placed
from schemas.errors import BudgetExhausted, DriftlogError, InvalidRecord, LogError, LogUnavailable, MessageTooLarge
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import encode_group, group_message_headers

log = logging.getLogger(__name__)

_SEND_TRIES = 3


@dataclass(frozen=True, slots=True)
class NotSent:
    """The Delivery of a record that the writer did not even take."""

    error: LogError

    def done(self) -> bool:
        """It failed at once."""
        return True

    def result(self, timeout_s: float) -> Placed:
        """Why."""
        raise self.error


@dataclass(slots=True)
class _Part:
    """Rows that go into one record."""

    rows: tuple[Trajectory, ...]
    delivery: Delivery | None = None
    tries: int = 0


@dataclass(slots=True)
class _Parcel:
    """One finished group on its way."""

    claim: tuple[int, int]
    """(partition, offset) of its request"""
    group_id: str
    traceparent: str | None
    """of the request"""
    waiting: deque[_Part] = field(default_factory=deque)
    sent: list[_Part] = field(default_factory=list)


class Outbox:
    """Groups that are finished but not yet acknowledged by the log."""

    def __init__(self, writer: EventWriter, topic: str, source: str) -> None:
        self._writer = writer
        self._topic = topic
        self._source = source
        self._parcels: list[_Parcel] = []
        self.lost_rows = 0

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def is_stuck(self) -> bool:
        """Something could not be handed to the writer: admit no new work."""
        return any(parcel.waiting for parcel in self._parcels)

    def group_ids(self) -> frozenset[str]:
        """Groups not yet acknowledged."""
        return frozenset(parcel.group_id for parcel in self._parcels)

    def put(self, claim: tuple[int, int], rows: Sequence[Trajectory], traceparent: str | None = None) -> None:
        """A finished group; `traceparent`: of its request, goes on with its rows."""
        parcel = _Parcel(claim, rows[0].group_id, traceparent)
        parcel.waiting.append(_Part(tuple(rows)))
        self._parcels.append(parcel)

    def step(self) -> list[tuple[int, int]]:
        """Send what can be sent; the claims whose groups are done with (delivered, or lost with a reason)."""
        done: list[tuple[int, int]] = []
        for parcel in self._parcels:
            self._collect(parcel)
            self._send(parcel)
            if not parcel.waiting and not parcel.sent:
                done.append(parcel.claim)
        self._parcels = [parcel for parcel in self._parcels if parcel.waiting or parcel.sent]
        return done

    def _send(self, parcel: _Parcel) -> None:
        while parcel.waiting:
            part = parcel.waiting[0]
            try:
                value = encode_group(part.rows)
                headers = group_message_headers(part.rows, value, self._source, parcel.traceparent)
                message = Message(topic=self._topic, key=parcel.group_id.encode(), value=value, headers=headers)
                part.delivery = self._writer.send(message)
            except (BudgetExhausted, LogUnavailable):
                return  # the writer has no room, or replaces its client: try again at the next step
            except (InvalidRecord, MessageTooLarge) as error:
                parcel.waiting.popleft()
                self._split(parcel, part, error)
                continue
            part.tries += 1
            parcel.sent.append(parcel.waiting.popleft())

    def _collect(self, parcel: _Parcel) -> None:
        for part in [p for p in parcel.sent if p.delivery is not None and p.delivery.done()]:
            parcel.sent.remove(part)
            assert part.delivery is not None
            try:
                part.delivery.result(0.0)
            except MessageTooLarge as error:
                self._split(parcel, part, error)
            except LogError as error:
                event(log, "delivery_failed", level=logging.WARNING, group=parcel.group_id, reason=str(error))
                if part.tries < _SEND_TRIES:
                    parcel.waiting.append(part)
                else:
                    self._lose(parcel, part, error)

    def _split(self, parcel: _Parcel, part: _Part, error: DriftlogError) -> None:
        """Halves until what cannot be sent stands alone: too much for one record, or one row no reader would take."""
        if len(part.rows) == 1:
            self._lose(parcel, part, error)
            return
        half = len(part.rows) // 2
        parcel.waiting.extend((_Part(part.rows[:half]), _Part(part.rows[half:])))

    def _lose(self, parcel: _Parcel, part: _Part, error: DriftlogError) -> None:
        self.lost_rows += len(part.rows)
        event(log, "rows_lost", level=logging.ERROR, group=parcel.group_id, rows=len(part.rows), reason=str(error))
