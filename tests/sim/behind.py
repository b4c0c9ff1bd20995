"""The trainer's thread for publications behind the compute, in virtual time and without a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from tests.fakes.virtual_clock import VirtualClock


@dataclass(slots=True)
class _Job:
    work: Callable[[], Any]
    future: Future[Any]
    due_s: float
    told_s: float
    outcome: Callable[[], None] | None = None
    """tells the future what became of it"""


class BehindExecutor(Executor):
    """Runs each call when its time has come, one after the other, whether or not anybody still looks at its future.

    The caller learns of it later still: the log may show what a call did before its future is done. A Crash in a call
    passes through `advance`: it is the process that dies."""

    def __init__(self, clock: VirtualClock, delay_s: Callable[[], float]) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self._jobs: deque[_Job] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """It begins when the calls before are over."""
        future: Future[Any] = Future()
        due_s = self._clock.monotonic_s() + self._delay_s()
        self._jobs.append(_Job(lambda: fn(*args, **kwargs), future, due_s, due_s + self._delay_s() / 4))
        return future

    def advance(self) -> None:
        """A moment of the thread."""
        now_s = self._clock.monotonic_s()
        while self._jobs and now_s >= self._jobs[0].due_s:
            job = self._jobs[0]
            if job.outcome is None:
                job.outcome = _outcome(job)
            if now_s < job.told_s:
                return
            self._jobs.popleft()
            job.outcome()


def _outcome(job: _Job) -> Callable[[], None]:
    try:
        value = job.work()
    except Exception as error:  # noqa: BLE001 - as a pool does: the caller sees it at result()
        failure = error
        return lambda: job.future.set_exception(failure)
    return lambda: job.future.set_result(value)
