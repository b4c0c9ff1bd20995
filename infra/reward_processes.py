"""Rewards and environments in processes of their own: user code can crash, hang or print there, and costs at most its
own reward.

A call that is too long, or that ends its process, is a failed reward with that cause; the process is started again
for what is left of the group. After CUT_OFF_LIMIT such calls in one job the rest of it fails unasked, so a group that
is scored takes at most CUT_OFF_LIMIT time-outs. A function that cannot be started again fails what it is asked, and
is tried again with growing pauses. One thread a process; nothing here waits on its caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from infra.environment import Ask, Outcome, broken
from infra.logs import event
from infra.ports import Completion, Reward
from infra.reward_process import CLOSE_LIMIT_S, NotStarted, ProcessGone, RewardProcess
from infra.reward_process import RewardProcessSettings as RewardProcessSettings
from infra.reward_wire import asks_line, job_line, outcome_from, reward_from
from infra.rewards import ABORTED, failed
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest

log = logging.getLogger(__name__)
T = TypeVar("T")
"""an answer: Reward or Outcome"""

CUT_OFF_LIMIT = 2
"""calls of one job that may crash or time out before the rest of it is given up"""


@dataclass(slots=True, kw_only=True)
class _Job(Generic[T]):
    """Questions that are sent together and answered one by one."""

    group: str
    answers: list[T]
    """[questions] what stands where nothing was asked, or nothing answered yet"""
    left: list[int]
    """places that are asked"""
    line: Callable[[Sequence[int]], bytes]
    """places -> the questions as they travel"""
    read: Callable[[Mapping[str, Any]], T]
    lost: Callable[[str], T]
    """the answer where there is none, by cause"""
    future: Future[Sequence[T]] = field(default_factory=Future)


class _Pool(Generic[T]):
    """Worker processes and one thread for each."""

    def __init__(self, settings: RewardProcessSettings, on_done: Callable[[], None] = lambda: None) -> None:
        """Starts the first process and waits for it. ConfigError when the user's code cannot be loaded."""
        self._on_done = on_done
        self._what = settings.what
        self._jobs: queue.SimpleQueue[_Job[T] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        first = RewardProcess(settings)
        try:
            first.start()
        except ProcessGone as error:
            first.end()
            raise ConfigError(f"task.{self._what}: {error}") from error
        self.name = first.name
        self.processes = [first, *(RewardProcess(settings, first.name) for _ in range(settings.processes - 1))]
        self._threads = [
            threading.Thread(target=self._work, args=(process,), name=f"{self._what}-{number}", daemon=True)
            for number, process in enumerate(self.processes)
        ]
        for thread in self._threads:
            thread.start()

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

    def _put(self, job: _Job[T]) -> Future[Sequence[T]]:
        job.future.add_done_callback(lambda _: self._on_done())
        self._jobs.put(job)
        return job.future

    def _work(self, process: RewardProcess) -> None:
        while not self._closed.is_set():
            job = self._jobs.get()
            if job is None:
                break
            try:
                self._answer(process, job)
            # Whatever went wrong here is a defect of ours; ending this thread would leave every later group unscored.
            except Exception as error:  # noqa: BLE001
                event(log, "reward_not_scored", level=logging.ERROR, exc_info=True, group=job.group)
                process.end()
                job.answers = [job.lost(f"not scored: {type(error).__name__}: {error}")] * len(job.answers)
            with contextlib.suppress(InvalidStateError):  # cancelled by nobody of ours
                job.future.set_result(job.answers)
        process.end()

    def _answer(self, process: RewardProcess, job: _Job[T]) -> None:
        """Something for every question, whatever becomes of the process."""
        left, cut_off = job.left, 0
        while left and not self._closed.is_set():
            answered = 0
            try:
                for answer in process.answers(job.line(left), len(left), job.read):
                    job.answers[left[answered]] = answer
                    answered += 1
                return
            except ProcessGone as error:
                cause, alone = job.lost(str(error)), process.one_by_one and not isinstance(error, NotStarted)
                event(log, "reward_cut_off", level=logging.WARNING, group=job.group, cause=str(error))
            cut_off += 1
            lost = left[answered : answered + 1] if alone else left[answered:]
            for place in lost:
                job.answers[place] = cause
            left = left[answered + len(lost) :]
            if cut_off >= CUT_OFF_LIMIT:
                why = f"not scored: the {self._what} was cut off {cut_off} times in this group"
                for place in left:
                    job.answers[place] = job.lost(why)
                break


class ProcessScorer(_Pool[Reward]):
    """RewardScorer over worker processes."""

    def submit(self, request: PromptRequest, completions: Sequence[Completion]) -> Future[Sequence[Reward]]:
        """Queue a group."""
        asked = tuple(completions)
        return self._put(
            _Job(
                group=str(request.group_id),
                answers=[ABORTED] * len(asked),
                left=[place for place, one in enumerate(asked) if one.finish_reason != "abort"],
                line=lambda places: job_line(request, [asked[place] for place in places]),
                read=reward_from,
                lost=failed,
            )
        )


class ProcessEnvironment(_Pool[Outcome]):
    """EnvironmentPort over worker processes: any of them can answer any question, each holds nothing."""

    def ask(self, asks: Sequence[Ask]) -> Future[Sequence[Outcome]]:
        """Queue questions of one group."""
        asked = tuple(asks)
        return self._put(
            _Job(
                group=str(asked[0].request.group_id),
                answers=[broken("not asked: the environment was closed")] * len(asked),
                left=list(range(len(asked))),
                line=lambda places: asks_line([asked[place] for place in places]),
                read=outcome_from,
                lost=broken,
            )
        )
