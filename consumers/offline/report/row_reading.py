"""What the trajectories say, joined with the steps that used them: age, who sampled, tokens over time, texts to read.

Fed records one at a time, in any order between partitions. Bounded: histograms, one count for each pair of versions
that met, and two texts a group of the newest step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from consumers.offline.outcomes import Ends
from consumers.offline.report.bins import Histogram
from consumers.offline.report.ledger_reading import Use
from consumers.offline.run_log import RecordKey, TrajectoryEntry
from schemas.trajectory import Trajectory

TEXTS_EACH = 3
"""best and worst completions of the newest step that are shown"""
_TIME_BIN_S = 2.0**-6
_AGE_BIN_S = 2.0**-7
_AGE_BINS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A trajectory to read."""

    trajectory_id: str
    group_id: str
    reward: float
    tokens: int
    finish_reason: str
    sampled_under: tuple[int, ...]
    text: str


@dataclass(slots=True, kw_only=True)
class RowReading:
    """Feed it every record of trajectories, once the ledger has been read."""

    uses: dict[RecordKey, Use]
    ends: Ends
    started_us: int
    """of the run: the zero of all times"""
    newest_step: int | None
    """version whose texts are kept; None: none are"""
    rows: int = 0
    """in the log, up to the end of the run"""
    refused_rows: int = 0
    ages: Histogram = field(default_factory=lambda: Histogram(_AGE_BIN_S, _AGE_BINS))
    """seconds from the end of sampling to the update"""
    tokens: dict[str, Histogram] = field(default_factory=dict)
    """worker -> tokens sampled, by the second of the run at which sampling ended"""
    met: dict[tuple[int, int], int] = field(default_factory=dict)
    """(version made, versions back) -> rows of which a part was sampled that many versions before the update"""
    best: dict[str, Text] = field(default_factory=dict)
    """group of the newest step -> its best completion"""
    worst: dict[str, Text] = field(default_factory=dict)

    def add(self, entry: TrajectoryEntry) -> None:
        """Count one record."""
        if not self.ends.counts(entry.partition, entry.offset):
            return
        use = self.uses.get(entry.key)
        for row in entry.rows:
            self.rows += 1
            trajectory = row.trajectory
            if trajectory is None:
                self.refused_rows += 1
                continue
            self._sampled(trajectory)
            if use is not None and use.rows >> row.row & 1:
                self._used(trajectory, use)

    def _sampled(self, t: Trajectory) -> None:
        tokens = self.tokens.get(t.worker_id)
        if tokens is None:
            tokens = self.tokens[t.worker_id] = Histogram(_TIME_BIN_S)
        tokens.add((t.finished_at_us - self.started_us) / 1e6, float(t.loss_mask.sum()))

    def _used(self, t: Trajectory, use: Use) -> None:
        self.ages.add((use.consumed_us - t.finished_at_us) / 1e6)
        for version in {segment.version for segment in t.segments}:
            pair = use.version_out, use.version_in - version
            self.met[pair] = self.met.get(pair, 0) + 1
        if use.version_out == self.newest_step and t.text is not None and t.reward is not None:
            text = Text(
                trajectory_id=t.trajectory_id, group_id=t.group_id, reward=t.reward, tokens=len(t.token_ids),
                finish_reason=t.finish_reason, sampled_under=tuple(s.version for s in t.segments), text=t.text,
            )  # fmt: skip
            if t.group_id not in self.best or t.reward > self.best[t.group_id].reward:
                self.best[t.group_id] = text
            if t.group_id not in self.worst or t.reward < self.worst[t.group_id].reward:
                self.worst[t.group_id] = text

    def texts(self) -> tuple[list[Text], list[Text]]:
        """Best and worst, each with the extreme one first, one a group, none of them twice."""
        best = sorted(self.best.values(), key=lambda text: (-text.reward, text.group_id))[:TEXTS_EACH]
        shown = {text.trajectory_id for text in best}
        worst = sorted(self.worst.values(), key=lambda text: (text.reward, text.group_id))
        return best, [text for text in worst if text.trajectory_id not in shown][:TEXTS_EACH]
