"""Who was working on what when it died: finds prompts that kill workers.

Reads the heartbeats of all workers. A request that stood in the last heartbeat of two incarnations that are gone
is not generated a third time; it goes to the dead letters and the trainer decides `poison_prompt`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from infra.ports import EventReader
from schemas.errors import InvalidRecord, LogUnavailable
from schemas.heartbeat import decode_heartbeat
from schemas.policy_fold import PolicyFold
from schemas.policy_state import WorkerKey

# Incarnations whose last claims are remembered; a run that loses more workers than this has other troubles.
_REMEMBERED = 1000


class ClaimWatch:
    """The last claims of every incarnation. Bounded."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader
        self._claims: OrderedDict[WorkerKey, frozenset[str]] = OrderedDict()
        self._start_ends: Mapping[tuple[str, int], int] | None = None
        self._has_read_start = False

    def advance(self) -> bool:
        """Read what has arrived; an undecodable heartbeat says nothing.

        False until everything that lay there at the start is read: a worker that claimed before would not know
        of the deaths, and die as well, time after time."""
        for record in self._reader.poll(500):
            try:
                beat = decode_heartbeat(record.value)
            except InvalidRecord:
                continue
            key = (beat.worker, beat.incarnation)
            self._claims[key] = frozenset(beat.claims)
            self._claims.move_to_end(key)
        while len(self._claims) > _REMEMBERED:
            self._claims.popitem(last=False)
        if not self._has_read_start:
            try:
                self._start_ends = self._start_ends or dict(self._reader.end_offsets())
            except LogUnavailable:
                return False
            positions = self._reader.positions()
            self._has_read_start = all(positions[place] >= end for place, end in self._start_ends.items())
        return self._has_read_start

    def deaths(self, fold: PolicyFold, group_id: str) -> list[WorkerKey]:
        """Incarnations that are gone and had claimed this group when they were last heard of."""
        return sorted(key for key, claims in self._claims.items() if group_id in claims and not fold.is_current(key))
