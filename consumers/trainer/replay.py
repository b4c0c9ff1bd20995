"""Replay: groups of the last steps, still fresh enough, enter a later step once more (multi-step reuse).

Tokens, rewards, advantages of the first use and old log-probabilities stay; only the current log-probabilities
and the ratio are computed anew. What may be replayed stands in the Position, so a restart replays the same.
Off by default. Mutable, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from consumers.trainer.admission import Admission, AdmissionRules, judge
from consumers.trainer.positions import RecordKey
from schemas.ledger import ReplayGroup, ReplayRow
from schemas.policy_fold import PolicyFold
from schemas.trajectory import DecodedRow, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRules:
    """Fixed for a run."""

    steps: int = 0
    """groups first trained within that many training steps may be used again; 0: no replay"""
    groups_per_step: int = 0
    """at most that many of them a step"""
    max_use: int = 2
    """uses of one group, the first one included"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRow:
    """A row of a replayed group, ready for the batch."""

    key: RecordKey
    row: DecodedRow
    advantage: float
    policy_lag: int

    @property
    def trajectory(self) -> Trajectory:
        """The decoded row."""
        assert self.row.trajectory is not None
        return self.row.trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedGroup:
    """A group chosen for another use."""

    group_id: str
    use_count: int
    """of this use: 2 for the first replay"""
    rows: tuple[ReplayedRow, ...]


@dataclass(slots=True)
class _Entry:
    group: ReplayGroup
    rows: dict[tuple[int, int, int], DecodedRow] = field(default_factory=dict)

    def is_here(self) -> bool:
        return len(self.rows) == len(self.group.rows)


class ReplayBuffer:
    """What was trained lately. Bounded by steps x groups a step."""

    def __init__(self, rules: ReplayRules, saved: Iterable[ReplayGroup]) -> None:
        self._rules = rules
        self._entries = {group.group_id: _Entry(group) for group in saved} if rules.steps else {}

    def snapshot(self) -> tuple[ReplayGroup, ...]:
        """The value for the Position, oldest first."""
        return tuple(entry.group for entry in self._entries.values())

    def clear(self) -> None:
        """Forget everything."""
        self._entries = {}

    # ------------------------------------------------------------------ after a restart

    def missing(self) -> set[RecordKey]:
        """Records that must be read again before anything is chosen."""
        return {
            (row.partition, row.offset)
            for entry in self._entries.values()
            for row in entry.group.rows
            if (row.partition, row.offset, row.row) not in entry.rows
        }

    def restore(self, key: RecordKey, rows: tuple[DecodedRow, ...]) -> None:
        """A record that was read again."""
        entry = self._entries.get(rows[0].group_id)
        if entry is None:
            return
        wanted = {(row.partition, row.offset, row.row) for row in entry.group.rows}
        for row in rows:
            place = (*key, row.row)
            if place in wanted:
                entry.rows[place] = row

    def forget_gone(self, partition: int, first: int) -> None:
        """Records below `first` are gone from the log: groups that wait for one of them are never used again."""
        gone = {key for key in self.missing() if key[0] == partition and key[1] < first}
        for group_id, entry in list(self._entries.items()):
            if not entry.is_here() and gone & {(row.partition, row.offset) for row in entry.group.rows}:
                del self._entries[group_id]

    # ------------------------------------------------------------------ every step

    def choose(self, fold: PolicyFold, base: int, admission: AdmissionRules, *, ahead: int = 0) -> list[ReplayedGroup]:
        """Groups to use again in the step that updates `base` and the `ahead` steps made on it (`judge`): least used
        first, then the newest."""
        if not self._rules.groups_per_step:
            return []
        ranked = sorted(
            (entry for entry in self._entries.values() if entry.is_here() and entry.group.uses < self._rules.max_use),
            key=lambda entry: (entry.group.uses, -entry.group.first_depth, entry.group.group_id),
        )
        chosen: list[ReplayedGroup] = []
        for entry in ranked:
            if len(chosen) == self._rules.groups_per_step:
                break
            rows = _fresh_rows(entry, fold, base, admission, ahead)
            if rows is not None:
                chosen.append(ReplayedGroup(group_id=entry.group.group_id, use_count=entry.group.uses + 1, rows=rows))
        return chosen

    def used(self, groups: Iterable[ReplayedGroup]) -> None:
        """These were in the step."""
        for group in groups:
            entry = self._entries[group.group_id]
            entry.group = entry.group.model_copy(update={"uses": group.use_count})

    def add(self, group_id: str, depth: int, rows: Iterable[tuple[RecordKey, DecodedRow, float]]) -> None:
        """A group was trained for the first time, in the step that updated weights of this depth."""
        if not self._rules.steps:
            return
        listed = list(rows)
        saved = tuple(
            ReplayRow(partition=key[0], offset=key[1], row=row.row, advantage=advantage)
            for key, row, advantage in listed
        )
        entry = _Entry(ReplayGroup(group_id=group_id, first_depth=depth, uses=1, rows=saved))
        entry.rows = {(*key, row.row): row for key, row, _ in listed}
        self._entries[group_id] = entry

    def expire(self, depth: int) -> None:
        """The step that updated weights of this depth is done: forget what is too old or used up."""
        self._entries = {
            group_id: entry
            for group_id, entry in self._entries.items()
            if depth - entry.group.first_depth < self._rules.steps and entry.group.uses < self._rules.max_use
        }


def _fresh_rows(
    entry: _Entry, fold: PolicyFold, base: int, admission: AdmissionRules, ahead: int
) -> tuple[ReplayedRow, ...] | None:
    """The rows in their order, or None when one of them may not be trained any more."""
    rows = []
    for saved in entry.group.rows:
        row = entry.rows[(saved.partition, saved.offset, saved.row)]
        assert row.trajectory is not None
        verdict = judge(row.trajectory, fold, base, admission, ahead=ahead)
        if verdict.admission is not Admission.ADMIT or verdict.policy_lag is None:
            return None
        key = (saved.partition, saved.offset)
        rows.append(ReplayedRow(key=key, row=row, advantage=saved.advantage, policy_lag=verdict.policy_lag))
    return tuple(rows)
