"""What the projection hands to a tracker: rows, the bookmark that covers them, and how rows are merged.

Plain values; a row says what it is about, so rows of different versions may come in any order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from infra.tracker_port import RangeRead

EndStatus = Literal["finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Points of the run's curves."""

    step: int
    """policy version"""
    metrics: Mapping[str, float]
    """finite"""
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """Something to show at one version: its first row makes the entry, later ones add to it."""

    version: int
    parent: int | None
    """None: version 0, or not known to this row"""
    tags: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """A block of training steps is complete: what it read, and its excerpt of the ledger."""

    name: str
    read: RangeRead
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRow:
    """The run is complete."""

    status: EndStatus
    at_us: int


Row = StepRow | VersionRow | BlockRow | EndRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """How far the topics are projected, and the running totals there.

    >>> decode_bookmark(Bookmark(policy=3, ledger=5, totals={"a": 1}).encode()).ledger
    5
    """

    policy: int = 0
    """events below were shown; all topics are always read from the start, for what they mean to later records"""
    ledger: int = 0
    """records below were shown; stands behind a StepCompleted or RunEnded"""
    evaluations: int = 0
    block: int = 0
    """ledger offset where the block of steps that is not complete begins"""
    totals: Mapping[str, int] = field(default_factory=dict)
    ended: EndStatus | None = None

    def encode(self) -> str:
        """As text, for a tag."""
        content = {
            "policy": self.policy, "ledger": self.ledger, "evaluations": self.evaluations, "block": self.block,
            "totals": dict(self.totals), "ended": self.ended,
        }  # fmt: skip
        return json.dumps(content, sort_keys=True, separators=(",", ":"))


def decode_bookmark(text: str) -> Bookmark:
    """Read a bookmark; ValueError when it is none (somebody edited the tag)."""
    try:
        content: Any = json.loads(text)
        totals = {str(key): int(value) for key, value in content["totals"].items()}
        ended = content["ended"]
        if ended not in (None, "finished", "failed"):
            raise ValueError(f"ended is {ended!r}")
        offsets = {name: int(content[name]) for name in ("policy", "ledger", "evaluations", "block")}
        if min(offsets.values()) < 0 or offsets["block"] > offsets["ledger"]:
            raise ValueError("offsets that no projection writes")
        return Bookmark(totals=totals, ended=ended, **offsets)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a bookmark: {text[:200]!r}") from error


def merge_versions(rows: Sequence[Row]) -> list[Row]:
    """The same with one row a version where possible: a tracker's entry costs several writes, whatever is in it.

    Later tags replace earlier ones. Rows that both have metrics stay apart: each has its own time. Versions come in
    order, so that a parent's entry is there before its child names it.
    """
    merged: list[Row] = []
    places: dict[int, int] = {}
    for row in rows:
        if not isinstance(row, VersionRow):
            merged.append(row)
            continue
        place = places.get(row.version)
        earlier = merged[place] if place is not None else None
        if place is None or not isinstance(earlier, VersionRow) or (earlier.metrics and row.metrics):
            places[row.version] = len(merged)
            merged.append(row)
            continue
        merged[place] = VersionRow(
            version=row.version,
            parent=row.parent if row.parent is not None else earlier.parent,
            tags={**earlier.tags, **row.tags},
            metrics=row.metrics or earlier.metrics,
            at_us=row.at_us if row.metrics else earlier.at_us,
        )
    others = [row for row in merged if not isinstance(row, VersionRow)]
    return [*sorted((row for row in merged if isinstance(row, VersionRow)), key=lambda row: row.version), *others]
