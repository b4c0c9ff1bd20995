"""The retry layer."""

from __future__ import annotations

import threading

import pytest

from infra.retry import retrying
from schemas.errors import EnvironmentMissing, LogUnavailable


class Flaky:
    """Fails with each of the given errors, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "answer"


def test_a_retriable_error_is_tried_again_until_it_works() -> None:
    waits: list[float] = []
    operation = Flaky(LogUnavailable("a"), LogUnavailable("b"))
    assert retrying(operation, what="x", limit_s=60, sleep=waits.append) == "answer"
    assert operation.calls == 3
    assert len(waits) == 2
    assert all(0.1 <= wait <= 5 for wait in waits)


def test_an_error_that_no_retry_can_help_is_raised_at_once() -> None:
    operation = Flaky(EnvironmentMissing("no java"))
    with pytest.raises(EnvironmentMissing, match="no java"):
        retrying(operation, what="x", limit_s=60, sleep=lambda _: None)
    assert operation.calls == 1


def test_a_foreign_error_is_not_retried() -> None:
    operation = Flaky(KeyError("bug"))
    with pytest.raises(KeyError):
        retrying(operation, what="x", limit_s=60, sleep=lambda _: None)
    assert operation.calls == 1


def test_the_last_error_is_raised_when_the_limit_has_passed() -> None:
    operation = Flaky(LogUnavailable("first"), LogUnavailable("second"))
    with pytest.raises(LogUnavailable, match="first"):
        retrying(operation, what="x", limit_s=0, sleep=lambda _: None)
    assert operation.calls == 1


def test_a_shutdown_ends_the_waiting_with_the_last_error() -> None:
    stop = threading.Event()
    operation = Flaky(*(LogUnavailable(str(i)) for i in range(9)))

    def sleep(_: float) -> None:
        if operation.calls == 3:
            stop.set()

    with pytest.raises(LogUnavailable, match="3"):
        retrying(operation, what="x", limit_s=60, stop=stop, sleep=sleep)
    assert operation.calls == 4
