"""The projector service: mirrors `policy` and `ledger` into an experiment tracker, off the training path.

Guarantees: `step` never waits for the tracker (its calls run on a thread of their own, one at a time); while
the tracker is away the backlog stays in the log; what a saved bookmark covers is there, and writing anything
twice changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from consumers.projection import Bookmark, EndRow, Projection, Row, StepRow, decode_bookmark, merge_versions
from infra.logs import event
from infra.ports import Clock, EventReader, ExperimentTracker
from schemas.errors import ConfigError, DriftlogError, InvalidRecord, LogUnavailable, TrackerUnavailable
from schemas.ids import RunId
from schemas.topics import TopicName, topic

log = logging.getLogger(__name__)

Work = Callable[[], str | None]
Background = Callable[[Work], "Future[str | None]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSettings:
    """Everything the service decides by."""

    run: RunId
    params: Mapping[str, str] = field(default_factory=dict)
    """the resolved configuration, flat"""
    batch_records: int = 200
    """log records projected per write; also the bound on what is held in memory"""
    first_retry_s: float = 1.0
    longest_retry_s: float = 60.0
    rebuild: bool = False
    """show everything again from the start of the log, whatever the bookmark says"""


@dataclass(slots=True, kw_only=True)
class ProjectorPorts:
    """The outside world of the projector."""

    reader: EventReader
    """of `policy` and `ledger`"""
    tracker: ExperimentTracker
    clock: Clock
    background: Background


def in_thread(work: Work) -> Future[str | None]:
    """Run on a daemon thread: a call that hangs must not keep the process from ending."""
    future: Future[str | None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)  # raised again where the result is taken
            if not isinstance(error, Exception):
                raise

    threading.Thread(target=run, name="projector-tracker", daemon=True).start()
    return future


class ProjectorService:
    """Call `step` until `finished`, then `close`."""

    def __init__(self, settings: ProjectorSettings, ports: ProjectorPorts) -> None:
        self._s = settings
        self._p = ports
        self._policy = (topic(settings.run, TopicName.POLICY), 0)
        self._ledger = (topic(settings.run, TopicName.LEDGER), 0)
        self._projection: Projection | None = None
        """None: the tracker is not open (yet, or again)"""
        self._task: Future[str | None] | None = None
        self._retry_at_s = float("-inf")
        self._failures_in_row = 0
        self._started_once = False
        self._rebuild = settings.rebuild
        self._ends: Mapping[tuple[str, int], int] = {}
        self._closed = False
        self.failures = 0
        self.invalid_records = 0

    @property
    def finished(self) -> bool:
        """The log says the run ended, and all of it is shown."""
        projection = self._projection
        if projection is None or self._task is not None or not projection.complete:
            return False
        positions = self._p.reader.positions()
        return all(positions[place] >= end for place, end in self._ends.items())

    def step(self) -> bool:
        """Do one bounded piece of work; False when there was nothing to do.

        Raises ConfigError when the tracker refuses from the start (a deleted experiment); later failures are retried.
        """
        if self._task is not None:
            if not self._task.done():
                return False
            self._take_result()
            return True
        if self._projection is None:
            if self._p.clock.monotonic_s() < self._retry_at_s:
                return False
            self._task = self._p.background(lambda: self._p.tracker.start(self._s.run, self._s.params))
            return True
        return self._project(self._projection)

    def close(self, timeout_s: float = 10.0) -> None:
        """Say how it ended, waiting at most that long. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._task is not None:
                self._task.result(timeout=timeout_s)
            if self._projection is not None:
                status = self._projection.ended or "killed"
                self._p.background(lambda: self._p.tracker.end(status)).result(timeout=timeout_s)
        except (TimeoutError, DriftlogError) as error:
            event(log, "tracker_not_closed", level=logging.WARNING, reason=str(error) or "no answer")

    def _project(self, projection: Projection) -> bool:
        records = self._p.reader.poll(self._s.batch_records)
        rows: list[Row] = []
        for record in records:
            try:
                rows += projection.apply(record)
            except InvalidRecord as error:
                self.invalid_records += 1
                where = f"{record.topic}[{record.partition}]@{record.offset}"
                event(log, "projection_skips_record", level=logging.WARNING, record=where, reason=str(error))
        if rows:
            bookmark = projection.bookmark()
            self._task = self._p.background(lambda: self._write(rows, bookmark))
        return bool(records)

    def _write(self, rows: Sequence[Row], bookmark: Bookmark) -> None:
        """On the tracker's thread: the rows, then the bookmark that covers them."""
        tracker = self._p.tracker
        for row in merge_versions(rows):
            if isinstance(row, StepRow):
                tracker.log_step(row.step, row.metrics, row.at_us)
            elif isinstance(row, EndRow):
                tracker.end(row.status)
            else:
                tracker.log_version(row.version, row.parent, row.tags, row.metrics, row.at_us)
        tracker.save_bookmark(bookmark.encode())

    def _take_result(self) -> None:
        task, self._task = self._task, None
        assert task is not None
        try:
            result = task.result()
            if self._projection is None:
                self._open(result)
        except (TrackerUnavailable, LogUnavailable) as error:
            self._failed(error)
        except ConfigError as error:
            # A place that somebody deleted: at the start the user must hear it, later it must not end the service.
            if not self._started_once:
                raise
            self._failed(error)
        else:
            if self._failures_in_row:
                event(log, "tracker_is_back", failures=self._failures_in_row)
            self._failures_in_row = 0

    def _open(self, text: str | None) -> None:
        """Go to where the tracker's bookmark says."""
        ends = self._p.reader.end_offsets()
        bookmark = self._believable(text, ends) or Bookmark()
        self._rebuild = False
        # The policy fold needs every event; what was shown already is not shown again.
        self._p.reader.seek(*self._policy, 0)
        self._p.reader.seek(*self._ledger, bookmark.ledger)
        self._ends = ends
        self._projection = Projection(self._s.run, bookmark)
        self._started_once = True
        event(log, "projection_starts", policy=bookmark.policy, ledger=bookmark.ledger)

    def _believable(self, text: str | None, ends: Mapping[tuple[str, int], int]) -> Bookmark | None:
        """The bookmark, unless it is none, or of a longer log than this one (the run's log was made anew)."""
        if text is None or self._rebuild:
            return None
        try:
            bookmark = decode_bookmark(text)
        except ValueError as error:
            event(log, "bookmark_ignored", level=logging.WARNING, reason=str(error))
            return None
        if bookmark.policy > ends[self._policy] or bookmark.ledger > ends[self._ledger]:
            event(log, "bookmark_ignored", level=logging.WARNING, reason="it lies beyond the end of the log")
            return None
        return bookmark

    def _failed(self, error: Exception) -> None:
        """Nothing is known about what was written: forget, and go on from the bookmark once the tracker answers."""
        self._projection = None
        self.failures += 1
        self._failures_in_row += 1
        wait_s = min(self._s.longest_retry_s, self._s.first_retry_s * 2 ** min(self._failures_in_row - 1, 16))
        self._retry_at_s = self._p.clock.monotonic_s() + wait_s
        if self._failures_in_row == 1:
            event(log, "tracker_unavailable", level=logging.WARNING, retry_in_s=wait_s, reason=str(error))
