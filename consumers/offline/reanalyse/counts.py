"""What was trained and dropped, as recorded and as judged again: counts, and who changes sides. Mutable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from consumers.offline.reanalyse.judge import Fate, JudgedGroup
from schemas.ledger import Decision, DecisionRow, Subject
from schemas.trajectory import Trajectory


@dataclass(slots=True)
class Counts:
    """Groups and trajectories by what became of them."""

    groups_trained: int = 0
    groups_dropped: Counter[str] = field(default_factory=Counter)
    rows_trained: int = 0
    rows_replayed: int = 0
    rows_dropped: Counter[str] = field(default_factory=Counter)
    groups_usable: int = 0
    """dropped in the run, kept by these rules: they would have been usable at that step, and are in no batch here"""
    rows_usable: int = 0
    groups_waiting: int = 0
    """neither kept nor dropped at that instant"""

    def add(self, other: Counts) -> None:
        """Both together."""
        for name in ("groups_trained", "rows_trained", "rows_replayed", "groups_usable", "rows_usable"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.groups_waiting += other.groups_waiting
        self.groups_dropped += other.groups_dropped
        self.rows_dropped += other.rows_dropped

    def flat(self) -> dict[str, float]:
        """By name, for a table."""
        found = {
            "groups/trained": self.groups_trained,
            "groups/usable": self.groups_usable,
            "groups/waiting": self.groups_waiting,
            "rows/trained": self.rows_trained,
            "rows/replayed": self.rows_replayed,
            "rows/usable": self.rows_usable,
            **{f"groups/dropped/{reason}": count for reason, count in sorted(self.groups_dropped.items())},
            **{f"rows/dropped/{reason}": count for reason, count in sorted(self.rows_dropped.items())},
        }
        return {name: float(value) for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "groups_trained": self.groups_trained,
            "rows_trained": self.rows_trained,
            "rows_replayed": self.rows_replayed,
            "groups_dropped": dict(sorted(self.groups_dropped.items())),
            "rows_dropped": dict(sorted(self.rows_dropped.items())),
            "groups_usable": self.groups_usable,
            "rows_usable": self.rows_usable,
            "groups_waiting": self.groups_waiting,
        }


def recorded_counts(decisions: Iterable[DecisionRow]) -> Counts:
    """As the ledger has it."""
    counts = Counts()
    for row in decisions:
        if row.subject is Subject.GROUP:
            counts.groups_trained += row.decision is Decision.TRAINED
            if row.decision is Decision.DROPPED:
                counts.groups_dropped[row.reason] += 1
        elif row.subject is Subject.TRAJECTORY:
            counts.rows_trained += row.decision is Decision.TRAINED
            counts.rows_replayed += row.decision is Decision.REPLAYED
            if row.decision is Decision.DROPPED:
                counts.rows_dropped[row.reason] += 1
    return counts


def count_group(counts: Counts, group: JudgedGroup) -> None:
    """One group by other rules."""
    was_trained = group.recorded.was_trained
    usable = group.fate is Fate.TRAINED and not was_trained
    if group.fate is Fate.WAITING:
        counts.groups_waiting += 1
    elif usable:
        counts.groups_usable += 1
    elif group.fate is Fate.TRAINED or (group.fate is Fate.CARRIED_OVER and was_trained):
        counts.groups_trained += 1
    else:
        counts.groups_dropped[group.reason] += 1
    for row in group.recorded.rows:
        why = fate_of_row(group, row.decision)
        if why:
            counts.rows_dropped[why] += 1
        elif usable:
            counts.rows_usable += 1
        else:
            counts.rows_trained += 1


def fate_of_row(group: JudgedGroup, row: DecisionRow) -> str:
    """ "" for a row that these rules train or could use, else why it is dropped."""
    if group.fate is Fate.CARRIED_OVER:
        return row.reason
    return group.fate_of(row)


@dataclass(slots=True)
class Side:
    """Rows on one side, and how long and how good they are."""

    rows: int = 0
    tokens: int = 0
    rewarded: int = 0
    reward: float = 0.0
    truncated: int = 0

    def add(self, row: Trajectory) -> None:
        """One row; its reward as recorded."""
        self.rows += 1
        self.tokens += len(row.token_ids)
        self.truncated += row.finish_reason == "length"
        if row.reward is not None:
            self.rewarded += 1
            self.reward += row.reward

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None where there is nothing to take a mean of."""
        return {
            "rows": self.rows,
            "mean_length_tokens": self.tokens / self.rows if self.rows else None,
            "truncated_fraction": self.truncated / self.rows if self.rows else None,
            "mean_recorded_reward": self.reward / self.rewarded if self.rewarded else None,
        }


@dataclass(slots=True)
class Sides:
    """Who changes sides; comparing their lengths and rewards shows what a setting is biased against."""

    sides: dict[str, Side] = field(default_factory=dict)
    """trained_in_both, newly_dropped, newly_usable, dropped_in_both; newly_dropped/<reason> beside"""
    usable: list[str] = field(default_factory=list)
    """the first groups that would have been usable, in words"""
    lost: list[str] = field(default_factory=list)
    """the first groups that would have been dropped"""

    def add(self, group: JudgedGroup, version: int) -> None:
        """One group; `version`: of the step it was decided for."""
        for row in group.recorded.rows:
            if row.trajectory is None:
                continue
            trained, why = row.decision.decision is Decision.TRAINED, fate_of_row(group, row.decision)
            name = (
                ("newly_dropped" if why else "trained_in_both")
                if trained
                else ("dropped_in_both" if why else "newly_usable")
            )
            self._side(name).add(row.trajectory)
            if name == "newly_dropped":
                self._side(f"{name}/{why}").add(row.trajectory)
        recorded = group.recorded
        if group.fate is Fate.TRAINED and not recorded.was_trained and len(self.usable) < 20:
            dropped = f"{recorded.group_id}: dropped as {recorded.decision.reason}"
            self.usable.append(f"{dropped}, would have been usable at version {version}")
        if group.fate in (Fate.DROPPED, Fate.WAITING) and recorded.was_trained and len(self.lost) < 20:
            self.lost.append(f"{recorded.group_id}: trained into version {version}, would have been {group.reason}")

    def _side(self, name: str) -> Side:
        return self.sides.setdefault(name, Side())

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {name: side.to_dict() for name, side in sorted(self.sides.items())}
