"""Writers that tell somebody else what they have written: metrics and traces hang on here, not in the services.

Without a tap the writer itself is used, so what is off costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from infra.ports import Delivery, EventWriter, Message, Placed, TransactionalWriter

Tap = Callable[[Sequence[Message]], None]
"""told of records after the log, or its client, took them; must not raise"""


class TappedWriter:
    """An EventWriter; a record is told of once the client has taken it."""

    def __init__(self, writer: EventWriter, taps: Sequence[Tap]) -> None:
        self._writer = writer
        self._taps = taps

    def send(self, message: Message) -> Delivery:
        """As the writer's."""
        delivery = self._writer.send(message)
        for tap in self._taps:
            tap((message,))
        return delivery

    def in_flight_bytes(self) -> int:
        """As the writer's."""
        return self._writer.in_flight_bytes()

    def close(self, timeout_s: float) -> int:
        """As the writer's."""
        return self._writer.close(timeout_s)


class TappedTransactions:
    """A TransactionalWriter; records are told of once they are committed."""

    def __init__(self, writer: TransactionalWriter, taps: Sequence[Tap]) -> None:
        self._writer = writer
        self._taps = taps

    def init(self) -> None:
        """As the writer's."""
        self._writer.init()

    def commit(
        self,
        messages: Sequence[Message],
        *,
        group: str | None = None,
        offsets: Mapping[tuple[str, int], int] | None = None,
    ) -> Sequence[Placed]:
        """As the writer's."""
        placed = self._writer.commit(messages, group=group, offsets=offsets)
        for tap in self._taps:
            tap(messages)
        return placed

    def close(self) -> None:
        """As the writer's."""
        self._writer.close()


def tapped(writer: EventWriter, taps: Sequence[Tap]) -> EventWriter:
    """The writer, heard by every tap."""
    return TappedWriter(writer, taps) if taps else writer


def tapped_transactions(writer: TransactionalWriter, taps: Sequence[Tap]) -> TransactionalWriter:
    """The writer, heard by every tap."""
    return TappedTransactions(writer, taps) if taps else writer
