"""The projector service: mirrors a run's log into an experiment tracker, off the training path.

Guarantees: `step` never waits for the tracker (its calls run on a thread of their own, one at a time); while
the tracker is away the backlog stays in the log; what a saved bookmark covers is there, and writing anything
twice changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from consumers.projection import Projection, origin_of
from consumers.projection_rows import BlockRow, Bookmark, EndRow, Row, StepRow, decode_bookmark, merge_versions
from infra.logs import event
from infra.ports import Clock, EventReader, ExperimentTracker
from infra.tracker_port import Promotions, RunOrigin
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
    params: Sequence[Mapping[str, str]] = ()
    """the resolved configurations the run had, flat, in order"""
    best_metric: str = ""
    """which metric makes a version `best` where none was evaluated; empty: none does"""
    batch_records: int = 200
    """log records projected per write; also the bound on what is held in memory"""
    write_every_s: float = 0.0
    """less than a batch waits that long: a write costs the same for one version or ten"""
    promote_every_s: float = 0.0
    """the registry and the open ledger file follow at most that often, and at the end"""
    first_retry_s: float = 1.0
    longest_retry_s: float = 60.0
    await_evaluation_s: float = 0.0
    """an evaluator is at work: after the end of the run, how long its last result is waited for"""
    rebuild: bool = False
    """show everything from the start of the log in a new entry, which takes the place of the old one when done"""


@dataclass(slots=True, kw_only=True)
class ProjectorPorts:
    """The outside world of the projector."""

    reader: EventReader
    """of the topics in projection.READ"""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What follows from the log as a whole, and is brought up to date now and then."""

    promotions: Promotions
    open_file: tuple[str, str] | None


class ProjectorService:
    """Call `step` until `finished`, then `close`."""

    def __init__(self, settings: ProjectorSettings, ports: ProjectorPorts) -> None:
        self._s = settings
        self._p = ports
        self._origin: RunOrigin | None = None
        """None: the run has not begun"""
        self._projection: Projection | None = None
        """None: the tracker is not open (yet, or again)"""
        self._task: Future[str | None] | None = None
        self._held: list[Row] = []
        self._held_records = 0
        self._written_at_s = float("-inf")
        self._saved = Bookmark()
        """the bookmark that the tracker holds"""
        self._standing: Standing | None = None
        """what was promoted last; None: nothing by this service"""
        self._stood_at_s = float("-inf")
        self._retry_at_s = float("-inf")
        self._failures_in_row = 0
        self._started_once = False
        self._ends: Mapping[tuple[str, int], int] = {}
        self._closed = False
        self._complete_at_s: float | None = None
        self.failures = 0
        self.last_failure: Exception | None = None
        self.invalid_records = 0

    @property
    def finished(self) -> bool:
        """The log says the run ended, and all of it is shown."""
        projection = self._projection
        if projection is None or not projection.complete:
            return False
        return self.caught_up and projection.bookmark() == self._saved and not self._awaits_evaluation(projection)

    @property
    def has_begun(self) -> bool:
        """The run has a log to mirror."""
        return self._origin is not None

    @property
    def caught_up(self) -> bool:
        """Everything that was in the log when the tracker was opened is shown."""
        if self._projection is None or self._task is not None or self._held:
            return False
        if self._standing != self._standing_now(self._projection):
            return False
        return self._has_read_all()

    def step(self) -> bool:
        """Do one bounded piece of work; False when there was nothing to do.

        Raises ConfigError when the tracker refuses from the start (a deleted experiment); later failures are retried.
        """
        if self._task is not None:
            if not self._task.done():
                return False
            self._take_result()
            return True
        if self._projection is not None:
            return self._project(self._projection)
        if self._origin is None:
            return self._look_for_origin()
        if self._p.clock.monotonic_s() < self._retry_at_s:
            return False
        origin = self._origin
        self._task = self._p.background(lambda: self._p.tracker.start(origin, self._s.params, replace=self._s.rebuild))
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is held and say how it ended, waiting at most that long. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._task is not None:
                self._task.result(timeout=timeout_s)
                if self._projection is None:
                    return
            if self._projection is not None:
                self._close(self._projection, timeout_s)
        except (TimeoutError, DriftlogError) as error:
            event(log, "tracker_not_closed", level=logging.WARNING, reason=str(error) or "no answer")

    def _close(self, projection: Projection, timeout_s: float) -> None:
        rows, bookmark = self._held, projection.bookmark()
        standing = self._standing_now(projection) if self._has_read_all() else None
        tracker, self._held = self._p.tracker, []
        complete = self._s.rebuild and not rows and self.caught_up

        def work() -> None:
            if rows or bookmark != self._saved or standing not in (None, self._standing):
                self._write(rows, bookmark, standing)
            if projection.ended is None:
                tracker.end("killed")
            if complete:
                tracker.take_place()

        self._p.background(work).result(timeout=timeout_s)

    # ------------------------------------------------------------------ the log

    def _look_for_origin(self) -> bool:
        records = self._p.reader.poll(self._s.batch_records)
        found = (origin_of(self._s.run, record) for record in records)
        self._origin = next((origin for origin in found if origin is not None), None)
        return bool(records)

    def _project(self, projection: Projection) -> bool:
        records = self._p.reader.poll(self._s.batch_records)
        self._held_records += len(records)
        for record in records:
            try:
                self._held += projection.apply(record)
            except InvalidRecord as error:
                self.invalid_records += 1
                where = f"{record.topic}[{record.partition}]@{record.offset}"
                event(log, "projection_skips_record", level=logging.WARNING, record=where, reason=str(error))
        now_s = self._p.clock.monotonic_s()
        due = now_s - self._written_at_s >= self._s.write_every_s or self._held_records >= self._s.batch_records
        rows: list[Row] = []
        if self._held and (due or projection.complete):
            rows, self._held, self._held_records = self._held, [], 0
            self._written_at_s = now_s
        standing: Standing | None = None
        due = now_s - self._stood_at_s >= self._s.promote_every_s
        if not self._held and (due or projection.complete) and self._has_read_all():
            # Nothing is held: the registry never names a version that is not there. All is read: after a restart the
            # aliases do not go back to where the fold begins.
            self._stood_at_s = now_s
            now = self._standing_now(projection)
            standing = now if now != self._standing else None
        bookmark = projection.bookmark()
        # The last events of a run show nothing themselves: that they were read is told all the same.
        at_end = projection.complete and not self._held and bookmark != self._saved
        if rows or standing is not None or at_end:
            self._task = self._p.background(lambda: self._write(rows, bookmark, standing))
        return bool(records) or self._task is not None

    def _awaits_evaluation(self, projection: Projection) -> bool:
        now_s = self._p.clock.monotonic_s()
        if self._complete_at_s is None:
            self._complete_at_s = now_s
        return not projection.newest_is_evaluated and now_s - self._complete_at_s < self._s.await_evaluation_s

    def _has_read_all(self) -> bool:
        positions = self._p.reader.positions()
        return all(positions[place] >= end for place, end in self._ends.items())

    def _standing_now(self, projection: Projection) -> Standing:
        return Standing(promotions=projection.promotions(), open_file=projection.open_file())

    # ------------------------------------------------------------------ the tracker

    def _write(self, rows: Sequence[Row], bookmark: Bookmark, standing: Standing | None) -> None:
        """On the tracker's thread: the rows, then the bookmark that covers them, then what stands on them."""
        tracker = self._p.tracker
        ends: list[EndRow] = []
        for row in merge_versions(rows):
            if isinstance(row, StepRow):
                tracker.log_step(row.step, row.metrics, row.at_us)
            elif isinstance(row, BlockRow):
                tracker.log_range(row.name, row.read)
                tracker.log_text(row.path, row.text)
            elif isinstance(row, EndRow):
                ends.append(row)
            else:
                tracker.log_version(row.version, row.parent, row.tags, row.metrics, row.at_us)
        if ends:
            tracker.end(ends[-1].status, ends[-1].at_us)
        if rows or bookmark != self._saved:
            tracker.save_bookmark(bookmark.encode())
            self._saved = bookmark
        if standing is not None:
            if standing.open_file is not None:
                tracker.log_text(*standing.open_file)
            tracker.promote(standing.promotions)
            self._standing = standing

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
        """Read from the start; what the tracker's bookmark covers is not shown again."""
        ends = self._p.reader.end_offsets()
        bookmark = self._believable(text, ends) or Bookmark()
        for place in ends:
            self._p.reader.seek(*place, 0)
        self._ends = ends
        self._saved = bookmark
        self._held, self._held_records = [], 0
        self._standing = None
        self._stood_at_s = float("-inf")
        self._projection = Projection(self._s.run, bookmark, best_metric=self._s.best_metric)
        self._started_once = True
        event(log, "projection_starts", policy=bookmark.policy, ledger=bookmark.ledger)

    def _believable(self, text: str | None, ends: Mapping[tuple[str, int], int]) -> Bookmark | None:
        """The bookmark, unless it is none, or of a longer log than this one."""
        if text is None:
            return None
        try:
            bookmark = decode_bookmark(text)
        except ValueError as error:
            event(log, "bookmark_ignored", level=logging.WARNING, reason=str(error))
            return None
        there = {TopicName.POLICY: bookmark.policy, TopicName.LEDGER: bookmark.ledger}
        there[TopicName.EVALUATIONS] = bookmark.evaluations
        if any(offset > ends[topic(self._s.run, name), 0] for name, offset in there.items()):
            event(log, "bookmark_ignored", level=logging.WARNING, reason="it lies beyond the end of the log")
            return None
        return bookmark

    def _failed(self, error: Exception) -> None:
        """Nothing is known about what was written: forget, and go on from the bookmark once the tracker answers."""
        self._projection = None
        self.failures += 1
        self.last_failure = error
        self._failures_in_row += 1
        wait_s = min(self._s.longest_retry_s, self._s.first_retry_s * 2 ** min(self._failures_in_row - 1, 16))
        self._retry_at_s = self._p.clock.monotonic_s() + wait_s
        if self._failures_in_row == 1:
            event(log, "tracker_unavailable", level=logging.WARNING, retry_in_s=wait_s, reason=str(error))
