"""One worker process that runs user code: started when it is needed, asked line by line, killed when it is late.

Every wait has a limit. What went wrong is told as ProcessGone with its cause, and the process is buried.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infra.config_task import EnvironmentEntry, RewardEntry
from infra.reward_wire import MAX_LINE_BYTES, message_of

T = TypeVar("T")

START_LIMIT_S = 120.0
"""user code may import heavy libraries"""
RETRY_PAUSES_S = (1.0, 5.0, 20.0, 60.0)
"""before another start, by the number of starts in a row that failed"""
CLOSE_LIMIT_S = 5.0
_NOT_PASSED_ON = ("DRIFTLOG_KAFKA", "MLFLOW_TRACKING")
"""addresses and credentials of ours: user code needs none, and what it prints is kept"""
_ROOT = Path(__file__).resolve().parents[1]
# -P: no folder of the user's before ours. Ours is appended where it is not on the path already.
_BOOT = f"import sys; sys.path.append({str(_ROOT)!r}); from infra.reward_worker import main; "


class ProcessGone(Exception):
    """The process ended, or was ended, without an answer; the message is the cause."""


class NotStarted(ProcessGone):
    """There is no process, so nothing can be scored now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardProcessSettings:
    """How user code is run: rewards, or an environment."""

    entries: tuple[RewardEntry, ...] = ()
    processes: int
    timeout_s: float
    """of one call"""
    environment: EnvironmentEntry | None = None
    """in the place of rewards"""

    @property
    def what(self) -> str:
        """In messages."""
        return "environment" if self.environment is not None else "reward"


class RewardProcess:
    """One worker process, started when it is needed. Used by one thread; `end` by any."""

    def __init__(self, settings: RewardProcessSettings, name: str = "") -> None:
        self._s = settings
        self.name = name
        """name@version of what the first process loaded; a later one must have loaded the same"""
        self.one_by_one = True
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unread = b""
        self._failed_starts = 0
        self._why = ""
        self._next_start_s = 0.0
        self._lock = threading.Lock()

    def answers(self, line: bytes, count: int, read: Callable[[Mapping[str, Any]], T]) -> Iterator[T]:
        """`count` answers to what the line asks. ProcessGone after those that were given."""
        if self._socket is None:
            self.start()
        self._ask(line)
        for _ in range(count):
            yield self._answer(read)

    def start(self) -> None:
        """ProcessGone says why it does not start, or that it is too early to try again."""
        if time.monotonic() < self._next_start_s:
            raise NotStarted(f"the {self._s.what} process does not start: {self._why}")
        try:
            self._start()
        except (ProcessGone, OSError) as error:  # OSError: the machine has no room for another process
            self.end()
            self._why = str(error)
            pause_s = RETRY_PAUSES_S[min(self._failed_starts, len(RETRY_PAUSES_S) - 1)]
            self._failed_starts += 1
            self._next_start_s = time.monotonic() + pause_s
            raise NotStarted(self._why) from error
        self._failed_starts = 0

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = self._s.environment
        served = {
            "rewards": [entry.model_dump() for entry in self._s.entries],
            "environment": None if environment is None else environment.model_dump(),
        }
        call = f"main({theirs.fileno()}, {json.dumps(served)!r}, {self._s.timeout_s!r})"
        with theirs, self._lock:
            self._unread = b""
            self._socket = ours
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT + call],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)},
            )  # fmt: skip
        message = self._message(START_LIMIT_S, f"loading the {self._s.what}")
        if "refused" in message:
            self.end()
            raise ProcessGone(str(message["refused"]))
        name = str(message.get("ready", ""))
        if self.name not in ("", name):
            self.end()
            raise ProcessGone(
                f"the {self._s.what}'s code changed while the run goes on ({self.name} -> {name}): restart the "
                "generator"
            )
        self.name, self.one_by_one = name, bool(message.get("one_by_one"))

    def _ask(self, line: bytes) -> None:
        """Send a job."""
        assert self._socket is not None
        try:
            self._socket.settimeout(self._s.timeout_s)
            self._socket.sendall(line)
        except OSError as error:
            raise ProcessGone(self._ended(f"the {self._s.what} process takes no work: {error}")) from error

    def _answer(self, read: Callable[[Mapping[str, Any]], T]) -> T:
        """The next one."""
        message = self._message(self._s.timeout_s, f"the {self._s.what}")
        try:
            return read(message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProcessGone(
                self._ended(f"the {self._s.what} process does not speak our language: {error}")
            ) from error

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def is_running(self) -> bool:
        """There is a process."""
        process = self._process
        return process is not None and process.poll() is None

    def end(self) -> None:
        """Kill it with everything it started."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._socket = self._socket, None
            if connection is not None:
                # Before the close: it wakes a thread that waits in recv.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=CLOSE_LIMIT_S)

    def _message(self, limit_s: float, what: str) -> dict[str, object]:
        """One line. ProcessGone after the limit, or when the process is gone."""
        connection, deadline_s = self._socket, time.monotonic() + limit_s
        if connection is None:
            raise ProcessGone(f"the {self._s.what} process was closed")
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ProcessGone(self._ended(f"time-out: {what} took longer than {limit_s:g} s"))
            try:
                connection.settimeout(left_s)
                received = connection.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                received = b""
            self._unread += received
            if not received or len(self._unread) > MAX_LINE_BYTES:
                raise ProcessGone(self._died(what))
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return dict(message_of(line))
        except ValueError as error:
            raise ProcessGone(
                self._ended(f"the {self._s.what} process does not speak our language: {error}")
            ) from error

    def _died(self, what: str) -> str:
        """How it ended, in words; it is buried."""
        process = self._process
        code = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1.0)
        self.end()
        if code is None:
            return f"crash: {what} closed its connection"
        if code < 0:
            return f"crash: {what} ended its process by {signal.Signals(-code).name}"
        return f"crash: {what} ended its process with exit code {code}"

    def _ended(self, words: str) -> str:
        self.end()
        return words
