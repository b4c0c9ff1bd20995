"""Which records an export or a cache would be silent about: removed by retention, or cut off a topic's end.

Nothing is left out without a word: either the caller accepts the gaps by name, or there is one message that says
topic, partition, range and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from consumers.offline.run_log import RunLog
from schemas.errors import RangeMissing
from schemas.ledger import Position
from schemas.topics import TOPICS, TopicName, topic


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRange:
    """Records first ... end - 1 of one partition."""

    topic: str
    partition: int
    first: int
    end: int
    why: str
    is_truncated: bool = False
    """cut off at the end, which no retention does"""

    @property
    def words(self) -> str:
        """One clause."""
        return f"{self.topic}[{self.partition}]: records {self.first}-{self.end - 1} {self.why}"


def missing_ranges(run_log: RunLog, names: Collection[TopicName], position: Position | None) -> list[MissingRange]:
    """What is gone from these topics. `position`: where the trainer stood last; it has read all that lies below.

    Compacted topics are left out: that they lose records is their purpose.
    """
    found: list[MissingRange] = []
    for name in sorted(names):
        if TOPICS[name].cleanup == "compact":
            continue
        full = topic(run_log.run, name)
        for partition, first in sorted(run_log.beginnings(name).items()):
            if first:
                why = "are no longer in the log (retention)"
                found.append(MissingRange(topic=full, partition=partition, first=0, end=first, why=why))
    full = topic(run_log.run, TopicName.TRAJECTORIES)
    if position is not None and TopicName.TRAJECTORIES in names:
        for partition, progress in sorted(position.partitions.items()):
            end = run_log.ends.get((full, partition), 0)
            if progress.next_offset > end:
                why = f"were decided by the trainer, but the topic ends at {end}: it was truncated or made anew"
                found.append(
                    MissingRange(
                        topic=full, partition=partition, first=end, end=progress.next_offset, why=why, is_truncated=True
                    )
                )
    return found


def require_whole(found: Sequence[MissingRange], way_out: str) -> None:
    """RangeMissing with one message, unless nothing is missing."""
    if found:
        words = "; ".join(one.words for one in found)
        raise RangeMissing(f"{words}. {way_out}", {(one.topic, one.partition): one.end for one in found})
