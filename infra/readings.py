"""What a service shows to Prometheus: every series there is, and the numbers of this process. No I/O, no library.

Guarantees: a series that is not in the table, or has other labels, is a defect and raises; a number that is not finite
is left out and counted; no series has more than MAX_LABEL_SETS sets of labels, what is beyond is counted.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from infra.metrics import METRICS, Metric, find

PREFIX = "driftlog_"
MAX_LABEL_SETS = 64
"""of one series: tasks, reasons and workers are few; a mistake must not fill the memory of Prometheus"""
LEFT_OUT, NOT_FINITE = "driftlog_series_left_out_total", "driftlog_values_not_finite_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series; the labels of the process (run, service, worker) come on top."""

    name: str
    kind: Literal["gauge", "counter"]
    """a counter counts from the start of this process"""
    labels: tuple[str, ...] = ()
    meaning: str


def _series(kind: Literal["gauge", "counter"], *rows: tuple[str, str, str]) -> tuple[Series, ...]:
    """Rows of (name without prefix, labels, meaning)."""
    return tuple(
        Series(name=PREFIX + name, kind=kind, labels=tuple(labels.split()), meaning=meaning)
        for name, labels, meaning in rows
    )


PROCESS = (
    *_series(
        "gauge",
        ("service_info", "revision", "1; the labels say what answers here"),
        ("loop_turned_timestamp_seconds", "", "when the loop of the service turned last"),
        ("consumer_lag_records", "topic", "records between what the service took and the committed end of the topic"),
        ("broker_reachable", "", "1: the last question for the ends of the topics was answered"),
    ),
    *_series(
        "counter",
        ("log_events_total", "event level", "warnings and errors in the log of the service, by event"),
        ("values_not_finite_total", "", "numbers that were not finite and are not shown"),
        ("series_left_out_total", "", "numbers not shown because their series has too many sets of labels"),
    ),
)
TRAINER = (
    *_series(
        "gauge",
        ("trained_version", "", "the newest version that this trainer published"),
        ("trained_version_timestamp_seconds", "", "when it was"),
        ("policy_lag_limit", "", "the highest lag that this run trains on"),
        ("open_groups", "", "groups that are asked for and not decided"),
    ),
    *_series(
        "counter",
        ("versions_published_total", "", "versions this trainer published"),
        ("steps_total", "", "training steps committed"),
        ("step_phase_seconds_total", "phase", "seconds of the training steps, by phase"),
        ("prompts_requested_total", "", "groups asked for"),
        ("rows_trained_total", "", "rows used, replayed ones too"),
        ("rows_dropped_total", "reason", "rows dropped, by reason"),
        ("groups_dropped_total", "reason", "groups dropped as a whole, by reason"),
        ("metrics_not_finite_total", "", "metrics of training steps that were not finite"),
    ),
)
SWITCHES = (
    *_series(
        "gauge",
        ("published_version", "", "the newest version in the log"),
        ("published_version_timestamp_seconds", "", "when it was published, by the trainer's clock"),
        ("live_version", "", "the version that workers sample under; -1: none yet"),
        ("switch_open", "", "1: a switch is under way"),
        ("switches_failed_in_row", "", "failed switches since the last one that succeeded"),
        ("workers", "standing", "workers, by standing"),
        ("worker_heartbeat_age_seconds", "worker", "since the coordinator last heard of a worker that takes part"),
        ("void_events", "", "events of the policy topic, since its beginning, that were illegal where they stand"),
    ),
    *_series(
        "counter",
        ("switches_started_total", "", "switches the coordinator began"),
        ("switches_activated_total", "", "switches that made a version live"),
        ("switches_failed_total", "", "switches that did not"),
        ("switch_seconds_total", "", "seconds from start to activation of the switches that succeeded"),
        ("workers_admitted_total", "", "workers admitted outside a switch"),
        ("workers_expired_total", "", "workers that were given up"),
        ("versions_retired_total", "", "versions whose weights may be deleted"),
    ),
)
GENERATOR = (
    *_series(
        "gauge",
        ("groups_in_flight", "", "groups the worker has taken and not delivered"),
        ("sampled_tokens_per_second", "", "of the worker, between its last two heartbeats"),
        ("worker_idle_fraction", "", "share of that time in which its engine had nothing to do"),
        ("held_version", "", "the version of the proven weights of the worker; -1: none"),
    ),
    *_series(
        "counter",
        ("sampled_tokens_total", "", "tokens of finished completions"),
        ("groups_sampled_total", "", "groups finished"),
        ("rows_sent_total", "", "rows handed to the log"),
        ("loads_total", "", "weights loaded and proven"),
        ("loads_failed_total", "", "weights that were not"),
        ("load_phase_seconds_total", "phase", "seconds of the loads that were proven, by phase"),
    ),
)
OTHERS = _series(
    "counter",
    ("dead_letters_total", "code", "records this process put aside, by reason code"),
    ("evaluations_total", "", "versions this process evaluated"),
    ("tracker_failures_total", "", "writes to the experiment tracker that failed"),
)
BY_SERVICE: Mapping[str, tuple[Series, ...]] = {
    "trainer": TRAINER,
    "coordinator": SWITCHES,
    "generator": GENERATOR,
    "evaluator": (OTHERS[1],),
    "projector": (OTHERS[2],),
}
SERVICE_SERIES: tuple[Series, ...] = (*PROCESS, *TRAINER, *SWITCHES, *GENERATOR, *OTHERS)


def exposed(metric: Metric) -> Series:
    """The series of a registered metric. One rule: `/` and every other sign become `_`, a part in braces a label.

    >>> from infra.metrics import find
    >>> exposed(find("policy_lag/mean")).name, exposed(find("dropped_length/stale")).labels
    ('driftlog_policy_lag_mean', ('reason',))
    """
    parts = re.split(r"\{(\w+)\}", metric.name)
    plain = "_".join(part.strip("/_") for part in parts[::2] if part.strip("/_"))
    name = PREFIX + re.sub(r"[^a-zA-Z0-9]+", "_", plain)
    meaning = f"{metric.name} ({metric.unit}) of the last step or evaluation: {metric.meaning}"
    kind: Literal["gauge", "counter"] = "counter" if metric.kind == "total" else "gauge"
    return Series(name=name, kind=kind, labels=tuple(parts[1::2]), meaning=meaning)


@lru_cache(maxsize=4096)  # asked for the same hundred names at every step
def exposed_metric(name: str) -> tuple[Series, tuple[str, ...]] | None:
    """The series of a metric by its full name, with the values of its labels; None when it is not registered.

    >>> exposed_metric("policy_lag/count_3")[1]
    ('3',)
    """
    metric = find(name)
    if metric is None:
        return None
    parts = re.split(r"\{\w+\}", metric.name)
    found = re.fullmatch("(.+)".join(re.escape(part) for part in parts), name)
    return (exposed(metric), found.groups()) if found is not None else None


@cache
def all_series() -> Mapping[str, Series]:
    """Every series by name."""
    return {series.name: series for series in (*SERVICE_SERIES, *map(exposed, METRICS))}


class Readings:
    """The numbers of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {LEFT_OUT: {(): 0.0}, NOT_FINITE: {(): 0.0}}

    def begin(self, service: str) -> None:
        """Counters of a service start at 0: Prometheus sees no increase in a series whose first number is 1."""
        with self._lock:
            for series in BY_SERVICE[service]:
                if series.kind == "counter" and not series.labels:
                    self._values[series.name] = {(): 0.0}

    def put(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge, or a counter that somebody else counts."""
        with self._lock:
            self._set(name, value, _key(name, labels))

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Count."""
        key = _key(name, labels)
        with self._lock:
            self._set(name, self._values.get(name, {}).get(key, 0.0) + amount, key)

    def put_metrics(self, metrics: Mapping[str, float]) -> None:
        """Metrics of a step or an evaluation; what of their series is not among them is no longer shown."""
        with self._lock:
            renewed: set[str] = set()
            for name, value in metrics.items():
                found = exposed_metric(name)
                if found is None:
                    self._values[LEFT_OUT][()] += 1
                    continue
                series, key = found
                if series.name not in renewed:
                    renewed.add(series.name)
                    self._values.pop(series.name, None)
                self._set(series.name, value, key)

    def put_all(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set a gauge for every value of its label; other values are no longer shown."""
        with self._lock:
            self._values.pop(name, None)
            for value, number in values.items():
                self._set(name, number, _key(name, {label: value}))

    def snapshot(self) -> Iterator[tuple[Series, Mapping[tuple[str, ...], float]]]:
        """Every series that has a number, by name."""
        with self._lock:
            copied = {name: dict(values) for name, values in self._values.items() if values}
        series = all_series()
        return ((series[name], copied[name]) for name in sorted(copied))

    def _set(self, name: str, value: float, key: tuple[str, ...]) -> None:
        if not math.isfinite(value):
            self._values[NOT_FINITE][()] += 1
            return
        values = self._values.setdefault(name, {})
        if key not in values and len(values) >= MAX_LABEL_SETS:
            self._values[LEFT_OUT][()] += 1
            return
        values[key] = value


def _key(name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
    series = all_series()[name]
    assert tuple(sorted(labels)) == tuple(sorted(series.labels)), f"{name} has the labels {series.labels}"
    return tuple(labels[label] for label in series.labels)
