"""A file that a service touches while its loop turns, and the question whether it did lately.

`python -m driftlog.life_sign FILE SECONDS` is a health check for containers: exit 0 when the file was touched within
so many seconds, 1 otherwise. It loads nothing but the standard library, because it is asked every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

BEAT_S = 1.0
"""a touch costs microseconds, a loop turns thousands of times a second"""


class LifeSign:
    """The sign of one service; None as path: nobody asks. State: when it was last touched."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._beaten_s = float("-inf")
        if path is not None:
            path.unlink(missing_ok=True)  # what an earlier process left says nothing of this one

    def beat(self, now_s: float) -> None:
        """Touch it, at most once in BEAT_S. `now_s`: monotonic seconds."""
        if self._path is not None and now_s - self._beaten_s >= BEAT_S:
            self._beaten_s = now_s
            self._path.touch()


def age_s(path: Path, now_s: float) -> float | None:
    """Seconds since the last touch; None when there was none. `now_s`: wall clock, as of the file system."""
    try:
        return max(0.0, now_s - path.stat().st_mtime)
    except FileNotFoundError:
        return None


def main(arguments: Sequence[str], now_s: float) -> int:
    """0 alive, 1 not, 2 usage."""
    if len(arguments) != 2 or not arguments[1].isdecimal():
        sys.stderr.write("usage: python -m driftlog.life_sign FILE SECONDS\n")
        return 2
    path, limit_s = Path(arguments[0]), int(arguments[1])
    age = age_s(path, now_s)
    if age is None:
        sys.stderr.write(f"{path}: not there: the service does not run its loop yet\n")
        return 1
    if age > limit_s:
        sys.stderr.write(f"{path}: last touched {age:.0f} s ago, at most {limit_s} are allowed\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], time.time()))
