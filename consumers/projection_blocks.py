"""Blocks of training steps: what a person wants of the ledger as a CSV file, and the topic ranges a block read.

One file and one dataset a block and not a version: a tracker's run carries all of them, and is slow with thousands.
Pure; bounded by BLOCK_STEPS lines.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from consumers.projection_rows import BlockRow
from infra.tracker_port import RangeRead
from schemas.headers import rfc3339
from schemas.ledger import Decision, DecisionRow, LedgerEnded, Position, StepCompleted, Subject

BLOCK_STEPS = 50
_COLUMNS = (
    "version", "parent", "at", "groups", "trajectories", "trained", "replayed", "dropped", "dropped_by_reason",
    "groups_dropped_by_reason", "policy_lag_histogram", "ledger_offsets", "trajectories_read",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class StepTally:
    """Decisions between two control records."""

    decisions: Counter[str] = field(default_factory=Counter)
    """of trajectories, by decision"""
    dropped: Counter[str] = field(default_factory=Counter)
    """trajectories and undecodable records, by reason"""
    groups_dropped: Counter[str] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    """policy lag of what was used"""

    def add(self, rows: Sequence[DecisionRow]) -> None:
        """Count them."""
        for row in rows:
            if row.subject is Subject.GROUP:
                if row.decision is Decision.DROPPED:
                    self.groups_dropped[row.reason] += 1
                continue
            self.decisions[row.decision.value] += 1
            if row.decision is Decision.DROPPED:
                self.dropped[row.reason] += 1
            elif row.policy_lag is not None:
                self.lags[row.policy_lag] += 1


class Blocks:
    """Feed it decisions and control records of the ledger from the begin of a block, in order."""

    def __init__(self, trajectories_topic: str) -> None:
        self._topic = trajectories_topic
        self._tally = StepTally()
        self._lines: list[list[str]] = []
        self._first: int | None = None
        self._last = 0
        self._at_start: Position | None = None
        """where the trainer stood when the block began"""
        self._position: Position | None = None
        self._settled: Position | None = None
        """after the step before: a step's own range begins here"""
        self._offset = 0
        """ledger offset where the step's records begin"""

    def passed(self, position: Position, offset: int) -> None:
        """A control record of a block that was shown before."""
        self._at_start = self._position = self._settled = position
        self._offset = offset

    def decisions(self, rows: Sequence[DecisionRow]) -> None:
        """Decisions of the step under way."""
        self._tally.add(rows)

    def settled(self, position: Position) -> None:
        """A transaction without a version: its decisions are told with the step that follows."""
        if self._at_start is None:
            self._at_start = self._settled = position
        self._position = position

    def range_of_step(self, position: Position) -> RangeRead:
        """What was read newly since the step before."""
        return _between(self._topic, self._settled, position)

    def step(self, control: StepCompleted, offset: int) -> BlockRow | None:
        """A step is complete; the block, when it is full with it."""
        version, parent = str(control.version_out), str(control.version_in)
        self._line(version, parent, control, control.groups, control.trajectories, offset)
        self._first = control.version_out if self._first is None else self._first
        self._last = control.version_out
        return self._close() if len(self._lines) >= BLOCK_STEPS else None

    def end(self, control: LedgerEnded, offset: int) -> BlockRow | None:
        """The run is complete: the block ends with it. None when it has no line."""
        self._line("end", str(control.last_version), control, 0, 0, offset)
        self._first = control.last_version if self._first is None else self._first
        self._last = max(self._last, control.last_version)
        return self._close()

    def open_file(self) -> tuple[str, str] | None:
        """(path, text) of the block that is not complete; None when it has no line."""
        return (self._path(), self._text()) if self._lines else None

    def _line(
        self, version: str, parent: str, control: StepCompleted | LedgerEnded, groups: int, members: int, offset: int
    ) -> None:
        tally, self._tally = self._tally, StepTally()
        read = self.range_of_step(control.position)
        counts = tally.decisions
        self._lines.append(
            [
                version, parent, rfc3339(control.at_us), str(groups), str(members),
                *(str(counts[decision.value]) for decision in (Decision.TRAINED, Decision.REPLAYED, Decision.DROPPED)),
                _counts(tally.dropped), _counts(tally.groups_dropped), _counts(tally.lags),
                f"{self._offset}-{offset}", range_text(read),
            ]
        )  # fmt: skip
        self._position = self._settled = control.position
        self._offset = offset + 1

    def _close(self) -> BlockRow:
        assert self._first is not None
        assert self._position is not None
        read = _between(self._topic, self._at_start, self._position)
        name = f"{self._topic} for v{self._first}-v{self._last} up to ledger@{self._offset}"
        row = BlockRow(name=name, read=read, path=self._path(), text=self._text())
        self._lines = []
        self._first = None
        self._at_start = self._position
        return row

    def _path(self) -> str:
        # By offset, not by version: a run that is extended after its end begins another block at the same version.
        return f"ledger/from-{int(self._lines[0][11].partition('-')[0]):09d}.csv"

    def _text(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(self._lines)
        return text.getvalue()


def range_text(read: RangeRead) -> str:
    """For a tag or a table cell: `0:[5,9) 1:[4,4) carried 0:3`."""
    words = [f"{number}:[{first},{end})" for number, (first, end) in sorted(read.partitions.items())]
    carried = [f"{number}:{'+'.join(map(str, offsets))}" for number, offsets in sorted(read.carried.items())]
    return " ".join([*words, *(["carried", *carried] if carried else [])])


def _between(topic: str, before: Position | None, after: Position) -> RangeRead:
    """What lies between two positions, and what the first had left undecided."""
    old = {} if before is None else before.partitions
    first = {number: old[number].next_offset if number in old else 0 for number in after.partitions}
    return RangeRead(
        topic=topic,
        partitions={number: (first[number], progress.next_offset) for number, progress in after.partitions.items()},
        carried={number: progress.undecided for number, progress in old.items() if progress.undecided},
    )


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in sorted(counts.items()))
