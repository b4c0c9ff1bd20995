"""The real clock. Everything that needs time is handed a Clock; this one is made in `main` only."""

from __future__ import annotations

import time


class SystemClock:
    """The Clock port on the operating system's clocks."""

    def now_us(self) -> int:
        """Wall clock, microseconds since 1970 UTC. May jump: for stamps only."""
        return time.time_ns() // 1_000

    def monotonic_s(self) -> float:
        """Seconds that never go back; the zero point means nothing."""
        return time.monotonic()
