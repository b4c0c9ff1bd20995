"""MLflow as the mirror of a run's log: made anew from the log, and compared with it. Both need broker and MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from driftlog.run_reading import OpenedRun
from driftlog.wiring import flat_settings, mlflow_uri
from infra.clock import SystemClock
from infra.config import Config, learning_settings
from infra.ports import EventReader, Record
from infra.wakeup import Wakeup
from schemas.errors import IllegalState, LogUnavailable, TrackerUnavailable
from schemas.topics import TOPICS, topic

if TYPE_CHECKING:
    from consumers.offline.mirror import Difference
    from infra.mirror_entries import Mirror
    from infra.mlflow_access import MlflowSettings

_STALL_S = 60.0
_IDLE_S = 0.05
_FAILURES = 3
_BATCH_RECORDS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """How MLflow compares with the log."""

    mlflow_run: str
    entries: int
    """of the log's side"""
    differences: Sequence[Difference]
    records_behind: int
    """records of the log that MLflow does not show yet"""
    is_running: bool
    """a projector is at work. Registry and open ledger file are not compared then, nor while it is behind"""


def mlflow_settings(config: Config, uri: str = "", experiment: str = "") -> MlflowSettings:
    """Where a run is shown; `uri` and `experiment` name another place."""
    from infra.mlflow_access import MlflowSettings

    return MlflowSettings(tracking_uri=uri or mlflow_uri(config), experiment=experiment or config.mlflow.experiment)


def rebuild(at: OpenedRun, settings: MlflowSettings) -> tuple[str, int]:
    """Show the whole log in a new MLflow run that takes the place of the one before; (its id, records skipped)."""
    from consumers.projector import ProjectorPorts, ProjectorService, ProjectorSettings, in_thread
    from infra.mlflow_tracker import MlflowTracker

    clock, wakeup = SystemClock(), Wakeup()
    tracker = MlflowTracker(settings, clock)
    with _reader(at, wakeup) as reader:
        service = ProjectorService(
            ProjectorSettings(
                run=at.run_id,
                params=[flat_settings(config) for config in at.configs()],
                best_metric=at.config.mlflow.best_metric,
                batch_records=_BATCH_RECORDS,
                promote_every_s=10.0,
                rebuild=True,
            ),
            ProjectorPorts(reader=reader, tracker=tracker, clock=clock, background=in_thread),
        )
        progress_s = clock.monotonic_s()
        while not service.caught_up:
            if service.step():
                progress_s = clock.monotonic_s()
                continue
            if not service.has_begun and _is_read(reader):
                raise _empty(at)
            if service.failures >= _FAILURES:
                raise TrackerUnavailable(f"given up after {service.failures} failures: {service.last_failure}")
            if clock.monotonic_s() - progress_s > _STALL_S + 60.0:
                raise TrackerUnavailable(f"MLflow at {settings.tracking_uri} has not answered for two minutes")
            wakeup.wait(_IDLE_S)
        service.close(timeout_s=_STALL_S)
        return tracker.run_id, service.invalid_records


def compare_with_mlflow(at: OpenedRun, settings: MlflowSettings) -> MirrorReport:
    """Read everything of the run back and compare it with the log, as far as MLflow has come."""
    from consumers.offline.mirror import Difference, compare, expected_mirror, while_running
    from consumers.projection import origin_of
    from consumers.projection_rows import decode_bookmark
    from infra.mlflow_reading import read_mirror

    with _reader(at, Wakeup()) as reader:
        records = _records(reader)
        first: list[Record] = []
        origin = None
        for record in records:
            first.append(record)
            origin = origin_of(at.run_id, record)
            if origin is not None:
                break
        if origin is None:
            raise _empty(at)
        there = read_mirror(settings, at.run.name, origin.log_id)
        differences: list[Difference] = []
        try:
            up_to = decode_bookmark(there.bookmark or "")
        except ValueError:
            up_to = None
            differences.append(Difference(entry="run/tag/bookmark", expected=None, actual=there.bookmark))
        expected = expected_mirror(
            origin,
            [flat_settings(config) for config in at.configs()],
            _chained(first, records),
            up_to=up_to,
            best_metric=at.config.mlflow.best_metric,
        )
    wanted, found = _lasting(expected.mirror, at.configs()), _lasting(there.entries, at.configs())
    if there.is_running or expected.records_beyond:
        wanted, found = while_running(wanted), while_running(found)
    differences += compare(wanted, found)
    return MirrorReport(
        mlflow_run=there.mlflow_run,
        entries=len(wanted),
        differences=differences,
        records_behind=expected.records_beyond,
        is_running=there.is_running,
    )


@contextmanager
def _reader(at: OpenedRun, wakeup: Wakeup) -> Iterator[EventReader]:
    from consumers.projection import READ
    from infra.kafka_reader import KafkaEventReader

    topics = {topic(at.run_id, name): TOPICS[name].partitions for name in READ}
    reader = KafkaEventReader(at.kafka, topics, "beginning", wakeup)
    try:
        yield reader
    finally:
        reader.close()


def _records(reader: EventReader) -> Iterator[Record]:
    """Everything up to the ends as they are now."""
    clock, bell = SystemClock(), Wakeup()
    ends = reader.end_offsets()
    progress_s = clock.monotonic_s()
    while True:
        polled = reader.poll(_BATCH_RECORDS)
        yield from (record for record in polled if record.offset < ends[record.topic, record.partition])
        if _is_read(reader, ends):
            return
        if polled:
            progress_s = clock.monotonic_s()
        elif clock.monotonic_s() - progress_s > _STALL_S:
            raise LogUnavailable(f"nothing was read for {_STALL_S:g} s; is the broker up?")
        else:
            bell.wait(_IDLE_S)


def _is_read(reader: EventReader, ends: Mapping[tuple[str, int], int] | None = None) -> bool:
    positions = reader.positions()
    return all(positions[place] >= end for place, end in (ends or reader.end_offsets()).items())


def _lasting(mirror: Mirror, configs: Sequence[Config]) -> Mirror:
    """Without operational settings: a change of one is not kept with the run, so nothing is known of its history."""
    known = {f"param/{key}" for config in configs for key in flat_settings(config)}
    learning = [learning_settings(config) for config in configs]
    lasting = {f"param/{name}.{key}" for sections in learning for name, keys in sections.items() for key in keys}
    return {
        entry: value
        for entry, value in mirror.items()
        if (base := entry.partition("/segment-")[0]) not in known or base in lasting
    }


def _chained(first: Sequence[Record], rest: Iterator[Record]) -> Iterator[Record]:
    yield from first
    yield from rest


def _empty(at: OpenedRun) -> IllegalState:
    return IllegalState(f"the log of run {at.run.name!r} has no RunStarted: there is nothing to show")
