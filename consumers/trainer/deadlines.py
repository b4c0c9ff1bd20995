"""Group time-outs. A deadline fires only when the trainer has read to an end offset taken after it: an outage
must not close groups whose rows lie unread in the log. Bounds every wait for a group (G7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from infra.ports import EventReader
from schemas.errors import LogUnavailable

Ends = Mapping[tuple[str, int], int]


class GroupDeadlines:
    """Mutable; a restart gives every open group its full time again."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline_s: dict[str, float] = {}
        self._suspects: tuple[frozenset[str], Ends] | None = None
        self._closing_ends: Ends | None = None

    def restart(self, group_ids: Iterable[str], now_s: float) -> None:
        """Forget everything; these groups are open."""
        self._deadline_s = {}
        self._suspects = None
        self._closing_ends = None
        self.add(group_ids, now_s)

    def add(self, group_ids: Iterable[str], now_s: float) -> None:
        """These groups were issued now."""
        self._deadline_s.update((group_id, now_s + self._timeout_s) for group_id in group_ids)

    def expired(self, open_ids: Iterable[str], now_s: float, reader: EventReader) -> frozenset[str]:
        """Open groups whose time is up for certain. Asks the broker at most once per set of suspects."""
        still_open = frozenset(open_ids)
        if len(self._deadline_s) > 2 * len(still_open) + 16:
            self._deadline_s = {g: t for g, t in self._deadline_s.items() if g in still_open}
        if self._suspects is not None:
            suspects, ends = self._suspects
            if not has_read(reader, ends):
                return frozenset()
            self._suspects = None
            return suspects & still_open
        overdue = frozenset(g for g in still_open if self._deadline_s.get(g, now_s + 1) <= now_s)
        if overdue:
            try:
                self._suspects = (overdue, dict(reader.end_offsets()))
            except LogUnavailable:
                return frozenset()  # no answer, no judgement; asked again at the next step
        return frozenset()

    def caught_up(self, reader: EventReader) -> bool:
        """Everything that lay in the log when this was first asked has been read."""
        if self._closing_ends is None:
            self._closing_ends = dict(reader.end_offsets())
        return has_read(reader, self._closing_ends)


def has_read(reader: EventReader, ends: Ends) -> bool:
    """The reader stands at or beyond these end offsets."""
    positions = reader.positions()
    return all(positions[key] >= end for key, end in ends.items())
