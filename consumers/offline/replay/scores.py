"""The scores of one training step after another, from one pass over the topic; one record a partition in memory."""

from __future__ import annotations

from collections.abc import Generator

from consumers.offline.run_log import RunLog, ScoresEntry
from consumers.offline.wholeness import refuse_newer
from schemas.scores_codec import ScoreRow
from schemas.topics import TopicName, topic


class StepScores:
    """Ask for the steps in the order of the ledger: records lie in that order in each partition."""

    def __init__(self, run_log: RunLog) -> None:
        self._run = run_log.run
        self._beginnings = run_log.beginnings(TopicName.SCORES)
        ends = {p: run_log.ends[topic(run_log.run, TopicName.SCORES), p] for p in self._beginnings}
        # Each partition by itself, as far as the step reaches: one reader over all would run ahead of it.
        self._readers: dict[int, Generator[ScoresEntry, None, None]] = {
            p: run_log.scores(start={q: end for q, end in ends.items() if q != p}) for p in self._beginnings
        }
        self._ahead: dict[int, ScoresEntry | None] = {}
        """partition -> the first record that is not used yet; None: there is none"""

    @property
    def is_whole(self) -> bool:
        """Retention has removed nothing."""
        return not any(self._beginnings.values())

    def of(self, version_in: int) -> tuple[dict[str, ScoreRow], list[str]]:
        """Trajectory id -> its scores in the step that updated that version; and what could not be read on the way.

        IllegalState at a record that a newer build wrote."""
        found: dict[str, ScoreRow] = {}
        problems: list[str] = []
        for partition in self._readers:
            while (entry := self._peek(partition)) is not None:
                if entry.problem:
                    refuse_newer(entry.problem, f"{self._run}.scores[{partition}]@{entry.offset}")
                    problems.append(f"scores[{partition}]@{entry.offset} cannot be read: {entry.problem}")
                elif min((row.version_in for row in entry.rows), default=0) > version_in:
                    break
                found |= {row.trajectory_id: row for row in entry.rows if row.version_in == version_in}
                del self._ahead[partition]
        return found, problems

    def close(self) -> None:
        """Leave the log."""
        for reader in self._readers.values():
            reader.close()

    def _peek(self, partition: int) -> ScoresEntry | None:
        if partition not in self._ahead:
            self._ahead[partition] = next(self._readers[partition], None)
        return self._ahead[partition]
