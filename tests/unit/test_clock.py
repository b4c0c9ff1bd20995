"""The system clock counts in the units it says."""

from __future__ import annotations

import time

from infra.clock import SystemClock


def test_wall_clock_is_in_microseconds_since_1970() -> None:
    before = time.time_ns()
    now_us = SystemClock().now_us()
    after = time.time_ns()

    assert before // 1_000 <= now_us <= after // 1_000


def test_monotonic_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_s() for _ in range(100)]

    assert readings == sorted(readings)
