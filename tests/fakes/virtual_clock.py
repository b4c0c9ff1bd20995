"""A clock that moves only when it is told to."""

from __future__ import annotations

START_US = 1_800_000_000_000_000
"""Some day in 2027: an absolute time that no test depends on."""


class VirtualClock:
    """The Clock port, owned by the test."""

    def __init__(self, start_us: int = START_US) -> None:
        self._now_us = start_us
        self._start_us = start_us

    def now_us(self) -> int:
        """Wall clock in microseconds."""
        return self._now_us

    def monotonic_s(self) -> float:
        """Seconds since the clock was made."""
        return (self._now_us - self._start_us) / 1e6

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        self._now_us += round(seconds * 1e6)
