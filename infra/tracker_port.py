"""The port to experiment trackers: where the projector mirrors the log to, and what it may rely on.

Every call is idempotent: after a crash in between, the same calls again leave the same entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

EndStatus = Literal["finished", "failed", "killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrigin:
    """Which log a run is the mirror of: a log made anew under the same name is another one."""

    run: str
    log_id: str
    """made from its first RunStarted"""
    started_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """Records of one topic that a block of training steps was decided on."""

    topic: str
    partitions: Mapping[int, tuple[int, int]]
    """partition -> [first, next): what was read newly"""
    carried: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """partition -> offsets below `first` that were still undecided when the block began"""

    @property
    def records(self) -> int:
        """How many records the ranges hold: nobody writes `trajectories` in transactions, so there are no gaps."""
        return sum(end - first for first, end in self.partitions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotions:
    """Which versions stand in the model registry now. Complete: what is not named here is to leave it."""

    aliases: Mapping[str, int] = field(default_factory=dict)
    """`live`, `best` -> version"""
    pinned: tuple[int, ...] = ()
    sources: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """version -> (manifest uri, manifest sha256), of every version named above"""

    @property
    def versions(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted({*self.aliases.values(), *self.pinned}))


class ExperimentTracker(Protocol):
    """Where the projector mirrors the log to. Every call may raise TrackerUnavailable.

    `log_step` and `log_version` may buffer; `save_bookmark` writes everything before it, then the bookmark: what a
    bookmark covers is there. After TrackerUnavailable nothing is known: call `start`, go on from its bookmark.
    """

    def start(self, origin: RunOrigin, params: Sequence[Mapping[str, str]], *, replace: bool = False) -> str | None:
        """Find or make the entry of this log and mark it running; the bookmark saved last, None when there is none
        (then everything is to be written again). ConfigError when the place was deleted by somebody.

        params: the settings the run had, in order; the last ones are in force.
        replace: make a new entry beside the one that is there; it takes its place with `take_place`, not before."""
        ...

    def log_step(self, step: int, metrics: Mapping[str, float], at_us: int) -> None:
        """Points of the run's curves."""
        ...

    def log_version(
        self, version: int, parent: int | None, tags: Mapping[str, str], metrics: Mapping[str, float], at_us: int
    ) -> None:
        """Make the version's entry, or add to it; may be called several times, in any order, with other tags."""
        ...

    def log_range(self, name: str, read: RangeRead) -> None:
        """A block of steps was trained on these records. The same name comes with the same range only."""
        ...

    def log_text(self, path: str, text: str) -> None:
        """A file of the run; written whole, replaces the one of that path."""
        ...

    def promote(self, promotions: Promotions) -> None:
        """Bring the registry to this state. Calls between `save_bookmark`s; aliases of others stay theirs."""
        ...

    def save_bookmark(self, bookmark: str) -> None:
        """Everything logged so far is written before this returns."""
        ...

    def take_place(self) -> None:
        """The entry made by `start(replace=True)` is complete: from now on it is the run's entry."""
        ...

    def end(self, status: EndStatus, at_us: int | None = None) -> None:
        """Close the run's entry; a later `start` opens it again. at_us: when the run ended, None: now."""
        ...
