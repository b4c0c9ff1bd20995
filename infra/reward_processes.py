"""Rewards in processes of their own: user code can crash, hang or print there, and costs at most its own reward.

A call that is too long, or that ends its process, is a failed reward with that cause; the process is started again
for what is left of the group. After CUT_OFF_LIMIT such calls in one group the rest of it fails unscored, so a group
takes at most CUT_OFF_LIMIT time-outs. A function that cannot be started again fails what it is asked, and is tried
again with growing pauses. One thread a process; `submit` never waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path

from infra.config_task import RewardEntry
from infra.logs import event
from infra.ports import Completion, Reward
from infra.reward_wire import MAX_LINE_BYTES, job_line, message_of, reward_from
from infra.rewards import ABORTED, failed
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest

log = logging.getLogger(__name__)

CUT_OFF_LIMIT = 2
"""calls of one group that may crash or time out before the rest of it is given up"""
START_LIMIT_S = 120.0
"""user code may import heavy libraries"""
RETRY_PAUSES_S = (1.0, 5.0, 20.0, 60.0)
"""before another start, by the number of starts in a row that failed"""
CLOSE_LIMIT_S = 5.0
_ROOT = Path(__file__).resolve().parents[1]
# -P: no folder of the user's before ours. Ours is appended where it is not on the path already.
_BOOT = f"import sys; sys.path.append({str(_ROOT)!r}); from infra.reward_worker import main; "


class ProcessGone(Exception):
    """The process ended, or was ended, without an answer; the message is the cause."""


class NotStarted(ProcessGone):
    """There is no process, so nothing can be scored now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardProcessSettings:
    """How rewards are run."""

    entries: tuple[RewardEntry, ...]
    processes: int
    timeout_s: float
    """of one call"""


@dataclass(slots=True, kw_only=True)
class _Job:
    request: PromptRequest
    completions: Sequence[Completion]
    future: Future[Sequence[Reward]] = field(default_factory=Future)


class ProcessScorer:
    """RewardScorer over worker processes."""

    def __init__(self, settings: RewardProcessSettings, on_done: Callable[[], None] = lambda: None) -> None:
        """Starts the first process and waits for it. ConfigError when the rewards cannot be loaded."""
        self._on_done = on_done
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        first = RewardProcess(settings)
        try:
            first.start()
        except ProcessGone as error:
            first.end()
            raise ConfigError(f"task.reward: {error}") from error
        self.name = first.name
        self.processes = [first, *(RewardProcess(settings, first.name) for _ in range(settings.processes - 1))]
        self._threads = [
            threading.Thread(target=self._work, args=(process,), name=f"reward-{number}", daemon=True)
            for number, process in enumerate(self.processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: PromptRequest, completions: Sequence[Completion]) -> Future[Sequence[Reward]]:
        """Queue a group."""
        job = _Job(request=request, completions=tuple(completions))
        job.future.add_done_callback(lambda _: self._on_done())
        self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """End the processes, whatever they are at."""
        self._closed.set()
        for process in self.processes:
            self._jobs.put(None)
            process.end()
        for thread in self._threads:
            thread.join(CLOSE_LIMIT_S)
        for process in self.processes:
            process.end()  # one may have been starting

    def _work(self, process: RewardProcess) -> None:
        while not self._closed.is_set():
            job = self._jobs.get()
            if job is None:
                break
            try:
                rewards = self._score(process, job)
            # Whatever went wrong here is a defect of ours; ending this thread would leave every later group unscored.
            except Exception as error:
                log.exception("reward_not_scored")
                process.end()
                rewards = [failed(f"not scored: {type(error).__name__}: {error}")] * len(job.completions)
            with contextlib.suppress(InvalidStateError):  # cancelled by nobody of ours
                job.future.set_result(rewards)
        process.end()

    def _score(self, process: RewardProcess, job: _Job) -> list[Reward]:
        """One reward per completion, whatever becomes of the process."""
        rewards: list[Reward] = [ABORTED] * len(job.completions)
        left = [place for place, one in enumerate(job.completions) if one.finish_reason != "abort"]
        cut_off = 0
        while left and not self._closed.is_set():
            answered = 0
            try:
                for reward in process.scores(job.request, [job.completions[place] for place in left]):
                    rewards[left[answered]] = reward
                    answered += 1
                return rewards
            except ProcessGone as error:
                cause, alone = failed(str(error)), process.one_by_one and not isinstance(error, NotStarted)
                event(log, "reward_cut_off", level=logging.WARNING, group=job.request.group_id, cause=str(error))
            cut_off += 1
            lost = left[answered : answered + 1] if alone else left[answered:]
            for place in lost:
                rewards[place] = cause
            left = left[answered + len(lost) :]
            if cut_off >= CUT_OFF_LIMIT:
                for place in left:
                    rewards[place] = failed(f"not scored: the reward was cut off {cut_off} times in this group")
                break
        return rewards


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

    def scores(self, request: PromptRequest, completions: Sequence[Completion]) -> Iterator[Reward]:
        """One reward per completion. ProcessGone after those that were answered."""
        if self._socket is None:
            self.start()
        self._ask(request, completions)
        for _ in completions:
            yield self._answer()

    def start(self) -> None:
        """ProcessGone says why it does not start, or that it is too early to try again."""
        if time.monotonic() < self._next_start_s:
            raise NotStarted(f"the reward process does not start: {self._why}")
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
        entries = json.dumps([entry.model_dump() for entry in self._s.entries])
        call = f"main({theirs.fileno()}, {entries!r}, {self._s.timeout_s!r})"
        with theirs, self._lock:
            self._unread = b""
            self._socket = ours
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT + call],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        message = self._message(START_LIMIT_S, "loading the reward")
        if "refused" in message:
            self.end()
            raise ProcessGone(str(message["refused"]))
        name = str(message.get("ready", ""))
        if self.name not in ("", name):
            self.end()
            raise ProcessGone(
                f"the reward's code changed while the run goes on ({self.name} -> {name}): restart the generator"
            )
        self.name, self.one_by_one = name, bool(message.get("one_by_one"))

    def _ask(self, request: PromptRequest, completions: Sequence[Completion]) -> None:
        """Send a job."""
        assert self._socket is not None
        try:
            self._socket.settimeout(self._s.timeout_s)
            self._socket.sendall(job_line(request, completions))
        except OSError as error:
            raise ProcessGone(self._ended(f"the reward process takes no work: {error}")) from error

    def _answer(self) -> Reward:
        """The next reward."""
        message = self._message(self._s.timeout_s, "the reward")
        try:
            return reward_from(message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProcessGone(self._ended(f"the reward process does not speak our language: {error}")) from error

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
            raise ProcessGone("the reward process was closed")
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
            raise ProcessGone(self._ended(f"the reward process does not speak our language: {error}")) from error

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
