"""Follows policy, ledger, heartbeats and evaluations into a RunState: for the live view and `status --watch`.

An outage of the broker is no failure here: what was read stays, reading goes on when it is back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from driftlog.view_state import RunState
from schemas.errors import LogUnavailable
from schemas.ids import RunId
from schemas.topics import TOPICS, TopicName, topic

if TYPE_CHECKING:
    from infra.kafka_clients import KafkaSettings

_TOPICS = (TopicName.POLICY, TopicName.LEDGER, TopicName.WORKERS, TopicName.EVALUATIONS)
_RECORDS_A_READ = 500


class LogTail:
    """One reader over all of them."""

    def __init__(self, settings: KafkaSettings, run: RunId) -> None:
        from infra.kafka_reader import KafkaEventReader

        topics = {topic(run, name): TOPICS[name].partitions for name in _TOPICS}
        self._reader = KafkaEventReader(settings, topics, "beginning")

    def read(self, state: RunState) -> int:
        """Fold what has arrived; how many records."""
        try:
            records = self._reader.poll(_RECORDS_A_READ)
        except LogUnavailable:
            return 0
        for record in records:
            state.apply(record)
        return len(records)

    def read_to_end(self, state: RunState, limit_s: float = 60.0) -> None:
        """Fold everything that is committed now. LogUnavailable after limit_s."""
        deadline_s = time.monotonic() + limit_s
        ends = self._reader.end_offsets()
        while True:
            if self.read(state):
                continue
            positions = self._reader.positions()
            if all(positions[place] >= end for place, end in ends.items()):
                return
            if time.monotonic() > deadline_s:
                raise LogUnavailable(f"the log was not read to its end within {limit_s:g} s")
            time.sleep(0.02)

    def close(self) -> None:
        """Safe to call twice."""
        self._reader.close()
