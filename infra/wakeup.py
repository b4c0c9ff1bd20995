"""A bell shared by a service's readers: it rings when something arrived, so that a runner need not poll.

Guarantees: a ring between two waits is never lost, and no wait is longer than its limit.
"""

from __future__ import annotations

import threading


class Wakeup:
    """One bell, any number of ringers, one listener."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        """Something arrived. Callable from any thread."""
        self._event.set()

    def wait(self, limit_s: float) -> bool:
        """Wait for a ring at most limit_s seconds; True when there was one since the last wait."""
        rung = self._event.wait(limit_s)
        self._event.clear()
        return rung
