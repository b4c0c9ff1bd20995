"""The one retry layer: builds clients and asks idempotent questions again until a limit passes.

Only errors of our own tree whose class says `retriable` are tried again. Sends and anything inside a begun
transaction never come here: the client retries those itself, and a second layer would multiply or duplicate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from infra.logs import event
from schemas.errors import DriftlogError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


def retrying(
    operation: Callable[[], T],
    *,
    what: str,
    limit_s: float,
    stop: threading.Event | None = None,
    first_wait_s: float = 0.2,
    longest_wait_s: float = 5.0,
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Run `operation` until it succeeds, fails for good, or limit_s has passed; then raise its last error.

    `stop` (a shutdown signal) ends the waiting at once, with the last error.
    """
    stop = stop or threading.Event()
    waiter = sleep or tenacity.nap.sleep_using_event(stop)
    retry = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_worth_another_try),
        wait=tenacity.wait_random_exponential(multiplier=first_wait_s, max=longest_wait_s, min=first_wait_s / 2),
        stop=tenacity.stop_any(tenacity.stop_after_delay(limit_s), tenacity.stop_when_event_set(stop)),
        sleep=waiter,
        before_sleep=lambda state: _report(what, state),
        reraise=True,
    )
    return retry(operation)


def _worth_another_try(error: BaseException) -> bool:
    return isinstance(error, DriftlogError) and error.retriable


def _report(what: str, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    wait_s = state.next_action.sleep if state.next_action is not None else 0.0
    level = logging.WARNING if state.attempt_number == 1 else logging.DEBUG  # an outage is one line, not a page
    event(_LOG, "retry", level=level, what=what, attempt=state.attempt_number, wait_s=wait_s, reason=str(error))
