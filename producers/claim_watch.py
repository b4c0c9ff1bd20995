"""Who was working on what when it died: finds prompts that kill workers.

Reads the heartbeats of all workers. A request that stood in the last heartbeat of two incarnations that are gone
is not generated a third time; it goes to the dead letters and the trainer decides `poison_prompt`.
"""

from __future__ import annotations

from collections import OrderedDict

from infra.ports import EventReader
from schemas.errors import InvalidRecord
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

    def advance(self) -> None:
        """Read what has arrived; an undecodable heartbeat says nothing."""
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

    def deaths(self, fold: PolicyFold, group_id: str) -> list[WorkerKey]:
        """Incarnations that are gone and had claimed this group when they were last heard of."""
        return sorted(key for key, claims in self._claims.items() if group_id in claims and not fold.is_current(key))
