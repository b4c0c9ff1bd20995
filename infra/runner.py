"""Runs one service in one process: loops its `step`, waits for its bell when idle, obeys signals, ends cleanly.

Guarantees: no busy polling (an idle service sleeps until something arrives or its limit passes); the first
signal lets a service that can drain finish its work in bounded time, the second ends it at once; a process
whose supervisor is gone ends itself; errors become the project's exit codes, in one place.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

from infra.logs import event
from infra.ports import Clock
from infra.wakeup import Wakeup
from schemas.errors import DriftlogError, Fenced, UsageError

log = logging.getLogger(__name__)
T = TypeVar("T")

# How long a process may go on after its supervisor vanished: the log is the truth, so cutting it off is safe.
ORPHAN_GRACE_S = 10.0


class ExitCode(IntEnum):
    """What every command and service ends with."""

    OK = 0
    FAILED = 1
    """a finding, or a run that failed"""
    USAGE = 2
    """configuration or environment: starting again does not help"""
    FENCED = 3
    """a newer process owns the identity: never restart"""


class Service(Protocol):
    """What all services have in common."""

    @property
    def finished(self) -> bool:
        """Nothing is left to do, for good."""
        ...

    def step(self) -> bool:
        """One bounded piece of work; False when there was nothing to do."""
        ...

    def close(self) -> None:
        """Let go of what the service holds."""
        ...


@runtime_checkable
class Drains(Protocol):
    """A service that can end its work in good order."""

    def request_stop(self, reason: str) -> None:
        """Take no more work; `finished` when the rest is done."""
        ...


@dataclass(slots=True)
class StopSignals:
    """`stop`: end in good order. `halt`: end now. Both ring the service's bell."""

    wakeup: Wakeup
    stop: threading.Event = field(default_factory=threading.Event)
    halt: threading.Event = field(default_factory=threading.Event)

    def request(self) -> None:
        """The first call stops, the second halts."""
        if self.stop.is_set():
            self.halt.set()
        self.stop.set()
        self.wakeup.ring()

    def install(self) -> None:
        """SIGTERM and SIGINT call `request`; SIGUSR1 writes the stack of every thread to stderr. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.request())
        faulthandler.register(signal.SIGUSR1, file=sys.stderr.fileno())


@dataclass(slots=True, kw_only=True)
class Assembly:
    """A service with everything it was built from; `close` releases it in the reverse order of building."""

    service: Service
    wakeup: Wakeup
    resources: ExitStack

    def close(self) -> None:
        """Safe to call twice."""
        self.resources.close()


def run_service(
    service: Service,
    *,
    wakeup: Wakeup,
    stop: threading.Event,
    idle_wait_s: float,
    clock: Clock,
    halt: threading.Event | None = None,
    drain_limit_s: float = 30.0,
    say: Callable[[str], None] | None = None,
    beat: Callable[[float], None] | None = None,
) -> ExitCode:
    """Step until finished or told to stop; errors of our own tree are said in one line and become an exit code.

    `beat` is called with the monotonic time before every step: the loop turns.
    Anything else is a defect and passes through with its traceback. The service is closed in every case.
    """
    try:
        halted = halt or threading.Event()
        if not _loop(service, wakeup, stop, halted, idle_wait_s, drain_limit_s, clock, beat or (lambda _: None)):
            (say or say_on_stderr)("stopped before its work was finished; what is not in the log will be done again")
            return ExitCode.FAILED
    except DriftlogError as error:
        event(log, "service_failed", level=logging.ERROR, kind=type(error).__name__, reason=str(error))
        (say or say_on_stderr)(str(error))
        return exit_code(error)
    finally:
        service.close()
    return ExitCode.OK


def exit_code(error: DriftlogError) -> ExitCode:
    """The exit code of an error."""
    if isinstance(error, Fenced):
        return ExitCode.FENCED
    return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED


def say_on_stderr(message: str) -> None:
    """One message for a person."""
    sys.stderr.write(f"driftlog: {message}\n")
    sys.stderr.flush()


def watch_parent(stop: StopSignals, grace_s: float = ORPHAN_GRACE_S) -> str:
    """For a supervised process: stdin is its life line. Waits for the first line and returns it ("" when the
    supervisor went before); from then on the end of stdin stops the service at once, by force after grace_s."""
    line = sys.stdin.readline()
    threading.Thread(target=_until_orphaned, args=(stop, grace_s), name="life-line", daemon=True).start()
    return line.strip()


def _until_orphaned(stop: StopSignals, grace_s: float) -> None:
    while sys.stdin.read(4096):
        pass
    event(log, "supervisor_gone", level=logging.WARNING)
    stop.halt.set()
    stop.request()
    threading.Event().wait(grace_s)
    os._exit(ExitCode.FAILED)


class RingingExecutor(ThreadPoolExecutor):
    """Rings the bell when a piece of work is done, so that the service need not poll for it."""

    def __init__(self, max_workers: int, wakeup: Wakeup) -> None:
        super().__init__(max_workers=max_workers, thread_name_prefix="work")
        self._wakeup = wakeup

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As ThreadPoolExecutor.submit."""
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._wakeup.ring())
        return future


def _loop(
    service: Service,
    wakeup: Wakeup,
    stop: threading.Event,
    halt: threading.Event,
    idle_wait_s: float,
    drain_limit_s: float,
    clock: Clock,
    beat: Callable[[float], None],
) -> bool:
    """True when it ended in good order, False when it was cut off."""
    drained_by_s: float | None = None
    while not service.finished:
        beat(clock.monotonic_s())
        if stop.is_set() and drained_by_s is None:
            if not isinstance(service, Drains):
                event(log, "stopped")
                return True
            service.request_stop("stopped by a signal")
            drained_by_s = clock.monotonic_s() + drain_limit_s
        if halt.is_set() or (drained_by_s is not None and clock.monotonic_s() >= drained_by_s):
            event(log, "halted", level=logging.WARNING, drained=False)
            return False
        if not service.step():
            wakeup.wait(idle_wait_s)
    event(log, "finished")
    return True
