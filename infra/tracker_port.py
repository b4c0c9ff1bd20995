"""The port to experiment trackers: where the projector mirrors the log to, and what it may rely on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol


class ExperimentTracker(Protocol):
    """Where the projector mirrors the log to. Every call is idempotent and may raise TrackerUnavailable.

    `log_*` may buffer; `save_bookmark` writes everything before it, then the bookmark: what a bookmark covers
    is there. After TrackerUnavailable nothing is known: call `start` and go on from the bookmark it returns.
    """

    def start(self, run: str, params: Mapping[str, str]) -> str | None:
        """Find or open the entry of this run and mark it running; the bookmark saved last, None when there is none
        (then everything is to be written again). ConfigError when the place was deleted by somebody."""
        ...

    def log_step(self, step: int, metrics: Mapping[str, float], at_us: int) -> None:
        """Points of the run's curves."""
        ...

    def log_version(
        self, version: int, parent: int | None, tags: Mapping[str, str], metrics: Mapping[str, float], at_us: int
    ) -> None:
        """Make the version's entry, or add to it; may be called several times, in any order, with other tags."""
        ...

    def save_bookmark(self, bookmark: str) -> None:
        """Everything logged so far is written before this returns."""
        ...

    def end(self, status: Literal["finished", "failed", "killed"]) -> None:
        """Close the run's entry; a later `start` opens it again."""
        ...
