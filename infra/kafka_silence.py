"""When the silence of a Kafka consumer is its own fault. Pure: positions, ends and times are passed in.

kafka-python's clients have been seen to hear nothing any more after an outage or in a rebalance, without an error. A
client is at fault when it stood before committed records at two looks in a row and read none in between.
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.record_queue import Place


class Silence:
    """Of one client. `heard` whenever it read something, or could not have."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._due_s: float | None = None
        self._behind: Mapping[Place, int] = {}
        """positions at the last look, where committed records were not read"""
        self._tried: Mapping[Place, int] = {}
        """the same, when the client was replaced last: once is enough for one place"""

    def heard(self) -> None:
        """It is not at fault."""
        self._behind = {}
        self._due_s = None

    def is_due(self, now_s: float) -> bool:
        """Nothing was read for a while: look where the topics end."""
        if self._due_s is None:
            self._due_s = now_s + self._look_s
        return now_s >= self._due_s

    def look(self, positions: Mapping[Place, int | None], ends: Mapping[Place, int], now_s: float) -> Place | None:
        """A place whose records the client does not read, when it should be replaced for it.

        Args: positions: by place, None where the client does not know it; ends: last stable offsets."""
        self._due_s = now_s + self._look_s
        behind = {place: at for place, at in positions.items() if at is not None and at < ends.get(place, 0)}
        before, self._behind = self._behind, behind
        if not behind or behind != before or behind == self._tried:
            return None
        return min(behind)

    def replaced(self) -> None:
        """It was, for what the last look found."""
        self._behind, self._tried = {}, self._behind
