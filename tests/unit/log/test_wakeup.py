"""The bell."""

from __future__ import annotations

import threading

from infra.wakeup import Wakeup


def test_a_ring_before_the_wait_is_not_lost_and_counts_once() -> None:
    bell = Wakeup()
    bell.ring()
    bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_a_ring_from_another_thread_ends_the_wait() -> None:
    bell = Wakeup()
    thread = threading.Thread(target=bell.ring)
    thread.start()
    assert bell.wait(10)
    thread.join(10)
