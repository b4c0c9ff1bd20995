"""Counts what a service writes to the log, and looks at what it reads and knows: the numbers of /metrics.

Guarantees: a number of something written counts what the log has taken (a transaction: what was committed); nothing
here can stop a service: a record that cannot be counted is said in the log and left out. With metrics off nothing of
this exists.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from consumers.evaluation import scores_by_version
from infra.logs import event
from infra.ports import Clock, Message
from infra.readings import Readings
from schemas.errors import DriftlogError
from schemas.evaluation_codec import decode_evaluation
from schemas.headers import DEAD_CODE, ROW_COUNT, header_text, is_arrow
from schemas.heartbeat import decode_heartbeat
from schemas.ids import RunId
from schemas.ledger import INVALID_PREFIX, Decision, StepCompleted, Subject, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import (
    LoadFailed,
    SwitchStarted,
    VersionActivated,
    VersionFailed,
    VersionLoaded,
    VersionPublished,
    VersionRetired,
    WorkerAdmitted,
    WorkerExpired,
    decode_policy_event,
)
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Standing
from schemas.topics import TopicName

log = logging.getLogger(__name__)

MAX_WORKERS = 64
"""shown by name: those that were silent longest"""
_US = 1e6


class Watched(Protocol):
    """A reader, as far as its position goes."""

    @property
    def is_closed(self) -> bool:
        """It reads no more."""
        ...

    def positions(self) -> Mapping[tuple[str, int], int]:
        """Next offset by place."""
        ...


class Meter:
    """The numbers of one service."""

    def __init__(self, run: RunId, readings: Readings, clock: Clock) -> None:
        self._run = run
        self._readings = readings
        self._clock = clock
        self._switch_began_us: dict[str, int] = {}
        self._lock = threading.Lock()
        self._readers: list[Watched] = []
        self._by_topic: dict[str, Callable[[Message], None]] = {
            TopicName.PROMPTS: lambda _: readings.add("driftlog_prompts_requested_total"),
            TopicName.TRAJECTORIES: self._trajectories,
            TopicName.POLICY: self._policy,
            TopicName.WORKERS: self._heartbeat,
            TopicName.LEDGER: self._ledger,
            TopicName.EVALUATIONS: self._evaluation,
            TopicName.DEADLETTERS: self._dead_letter,
        }

    # ------------------------------------------------------------------ what is written

    def written(self, messages: Sequence[Message]) -> None:
        """Count records that the log has taken."""
        for message in messages:
            count = self._by_topic.get(message.topic.removeprefix(f"{self._run}."))
            if count is None:
                continue
            try:
                count(message)
            except DriftlogError as error:
                event(log, "record_not_counted", level=logging.WARNING, topic=message.topic, reason=str(error))

    def _trajectories(self, message: Message) -> None:
        self._readings.add("driftlog_rows_sent_total", float(header_text(message.headers, ROW_COUNT) or 0))

    def _policy(self, message: Message) -> None:
        put, add = self._readings.put, self._readings.add
        match decode_policy_event(message.value):
            case VersionPublished() as published:
                add("driftlog_versions_published_total")
                put("driftlog_trained_version", published.version)
                put("driftlog_trained_version_timestamp_seconds", published.at_us / _US)
            case SwitchStarted() as started:
                add("driftlog_switches_started_total")
                self._switch_began_us = {started.switch: started.at_us}
            case VersionActivated() as activated:
                add("driftlog_switches_activated_total")
                began_us = self._switch_began_us.pop(activated.switch, None)
                if began_us is not None:
                    add("driftlog_switch_seconds_total", max(0, activated.at_us - began_us) / _US)
            case VersionFailed():
                add("driftlog_switches_failed_total")
            case WorkerAdmitted():
                add("driftlog_workers_admitted_total")
            case WorkerExpired():
                add("driftlog_workers_expired_total")
            case VersionRetired():
                add("driftlog_versions_retired_total")
            case VersionLoaded() as loaded:
                add("driftlog_loads_total")
                for phase, seconds in loaded.phase_s.items():
                    add("driftlog_load_phase_seconds_total", seconds, phase=phase)
            case LoadFailed():
                add("driftlog_loads_failed_total")

    def _heartbeat(self, message: Message) -> None:
        beat, put = decode_heartbeat(message.value), self._readings.put
        put("driftlog_groups_in_flight", len(beat.claims))
        put("driftlog_sampled_tokens_per_second", beat.tokens_per_s)
        put("driftlog_worker_idle_fraction", beat.idle_fraction)
        put("driftlog_held_version", -1 if beat.version is None else beat.version)
        put("driftlog_sampled_tokens_total", beat.tokens_total)
        put("driftlog_groups_sampled_total", beat.groups_total)

    def _ledger(self, message: Message) -> None:
        add = self._readings.add
        if is_arrow(message.headers):
            for row in decode_decisions(message.value, message.headers):
                if row.decision is Decision.DROPPED and row.subject is Subject.TRAJECTORY:
                    add("driftlog_rows_dropped_total", reason=row.reason)
                elif row.decision is Decision.DROPPED and row.subject is Subject.GROUP:
                    add("driftlog_groups_dropped_total", reason=row.reason)
            return
        control = decode_ledger_control(message.value)
        self._readings.put("driftlog_open_groups", len(control.position.open_groups))
        if isinstance(control, StepCompleted):
            add("driftlog_steps_total")
            add("driftlog_rows_trained_total", control.trajectories)
            add("driftlog_metrics_not_finite_total", len(control.metrics_nonfinite))
            for phase, seconds in control.phase_s.items():
                add("driftlog_step_phase_seconds_total", seconds, phase=phase)
            self._readings.put_metrics(control.metrics)

    def _evaluation(self, message: Message) -> None:
        for scores in scores_by_version(decode_evaluation(message.value, message.headers)):
            self._readings.add("driftlog_evaluations_total")
            self._readings.put_metrics(scores.metrics())

    def _dead_letter(self, message: Message) -> None:
        code = (header_text(message.headers, DEAD_CODE) or "unknown").removeprefix(INVALID_PREFIX)
        self._readings.add("driftlog_dead_letters_total", code=code)

    # ------------------------------------------------------------------ what is known and read

    def watch(self, reader: Watched) -> None:
        """Its distance to the end of its topics is the consumer lag; until it is closed."""
        with self._lock:
            self._readers.append(reader)

    def positions(self) -> dict[tuple[str, int], int]:
        """Where the open readers are; of two at one place, the later opened."""
        with self._lock:
            self._readers = readers = [reader for reader in self._readers if not reader.is_closed]
        return {place: offset for reader in readers for place, offset in reader.positions().items()}

    def lag(self, ends: Mapping[tuple[str, int], int] | None) -> None:
        """Ends of the topics that were asked for; None: no answer."""
        self._readings.put("driftlog_broker_reachable", ends is not None)
        if ends is None:
            return
        behind: dict[str, float] = {}
        for (name, partition), position in self.positions().items():
            short = name.removeprefix(f"{self._run}.")
            behind[short] = behind.get(short, 0.0) + max(0, ends.get((name, partition), position) - position)
        self._readings.put_all("driftlog_consumer_lag_records", "topic", behind)

    def turned(self) -> None:
        """The loop turned."""
        self._readings.put("driftlog_loop_turned_timestamp_seconds", self._clock.now_us() / _US)

    def tracker_failures(self, failures: int) -> None:
        """Of the projector, since its start."""
        self._readings.put("driftlog_tracker_failures_total", failures)

    def fold(self, fold: PolicyFold, heard_s: Mapping[str, float]) -> None:
        """The coordinator's view. `heard_s`: seconds since the last heartbeat, by worker that takes part."""
        put = self._readings.put
        if fold.newest is not None:
            put("driftlog_published_version", fold.newest)
            put("driftlog_published_version_timestamp_seconds", fold.versions[fold.newest].event.at_us / _US)
        put("driftlog_live_version", -1 if fold.live is None else fold.live)
        put("driftlog_switch_open", fold.switch is not None)
        put("driftlog_switches_failed_in_row", fold.failed_switches_in_row)
        put("driftlog_void_events", fold.void_count)
        standings = {standing.value: 0.0 for standing in Standing}
        for worker in fold.workers.values():
            standings[worker.standing.value] += 1
        self._readings.put_all("driftlog_workers", "standing", standings)
        silent = dict(sorted(heard_s.items(), key=lambda item: -item[1])[:MAX_WORKERS])
        self._readings.put_all("driftlog_worker_heartbeat_age_seconds", "worker", silent)


class CountingHandler(logging.Handler):
    """Counts warnings and errors that are events of this project; what libraries say is counted as `other`."""

    def __init__(self, readings: Readings) -> None:
        super().__init__(logging.WARNING)
        self._readings = readings

    def emit(self, record: logging.LogRecord) -> None:
        """Never logs itself."""
        name = record.msg if hasattr(record, "driftlog_fields") else "other"
        self._readings.add("driftlog_log_events_total", event=str(name), level=record.levelname.lower())
