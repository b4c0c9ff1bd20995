"""What an experiment tracker shall show, as a pure fold of the `policy` and `ledger` topics.

The two topics have no order between them: every row says what it is about, and rows of one version may come
in any order. Folding again from a bookmark, or from the start, gives the same rows. No I/O, no clock.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infra.ports import Record
from schemas import policy_events as ev
from schemas.errors import InvalidRecord
from schemas.headers import is_arrow, rfc3339
from schemas.ids import RunId
from schemas.ledger import Decision, DecisionRow, LedgerEnded, StepCompleted, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus
from schemas.topics import TopicName, topic

# Shown at the version itself as well, so that a list of versions can be sorted by them.
HEADLINE_METRICS = (
    "critic/rewards/mean",
    "critic/score/mean",
    "policy_lag/mean",
    "policy_lag/max",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/entropy",
    "response_length/mean",
)
# Versions further back than this keep the state they were shown in (bounded memory).
_REMEMBERED_VERSIONS = 4_096
# Reason codes come from rows of the log: more than this many different ones are counted together.
_MAX_COUNTERS = 200
EndStatus = Literal["finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Points of the run's curves."""

    step: int
    """policy version"""
    metrics: Mapping[str, float]
    """finite"""
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """Something to show at one version: its first row makes the entry, later ones add to it."""

    version: int
    parent: int | None
    """None: version 0, or not known to this row"""
    tags: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRow:
    """The run is complete."""

    status: EndStatus


Row = StepRow | VersionRow | EndRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """How far both topics are projected, and the running totals there.

    >>> decode_bookmark(Bookmark(policy=3, ledger=5, totals={"a": 1}).encode()).ledger
    5
    """

    policy: int = 0
    """policy events below were shown; the fold itself is always read again from the start"""
    ledger: int = 0
    """ledger records below were shown; stands behind a StepCompleted or RunEnded"""
    totals: Mapping[str, int] = field(default_factory=dict)
    ended: EndStatus | None = None

    def encode(self) -> str:
        """As text, for a tag."""
        content = {"policy": self.policy, "ledger": self.ledger, "totals": dict(self.totals), "ended": self.ended}
        return json.dumps(content, sort_keys=True, separators=(",", ":"))


def decode_bookmark(text: str) -> Bookmark:
    """Read a bookmark; ValueError when it is none (somebody edited the tag)."""
    try:
        content = json.loads(text)
        totals = {str(key): int(value) for key, value in content["totals"].items()}
        ended = content["ended"]
        if ended not in (None, "finished", "failed"):
            raise ValueError(f"ended is {ended!r}")
        return Bookmark(policy=int(content["policy"]), ledger=int(content["ledger"]), totals=totals, ended=ended)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a bookmark: {text[:200]!r}") from error


def merge_versions(rows: Sequence[Row]) -> list[Row]:
    """The same with one row a version where possible: a tracker's entry costs several writes, whatever is in it.

    Later tags replace earlier ones. Rows that both have metrics stay apart: each has its own time.
    """
    merged: list[Row] = []
    places: dict[int, int] = {}
    for row in rows:
        if not isinstance(row, VersionRow):
            merged.append(row)
            continue
        place = places.get(row.version)
        earlier = merged[place] if place is not None else None
        if place is None or not isinstance(earlier, VersionRow) or (earlier.metrics and row.metrics):
            places[row.version] = len(merged)
            merged.append(row)
            continue
        merged[place] = VersionRow(
            version=row.version,
            parent=row.parent if row.parent is not None else earlier.parent,
            tags={**earlier.tags, **row.tags},
            metrics=row.metrics or earlier.metrics,
            at_us=row.at_us if row.metrics else earlier.at_us,
        )
    return merged


class Projection:
    """The fold. Feed it policy from offset 0 and ledger from the bookmark, each in offset order."""

    def __init__(self, run: RunId, bookmark: Bookmark | None = None) -> None:
        self._bookmark = bookmark or Bookmark()
        self._policy_topic = topic(run, TopicName.POLICY)
        self._ledger_topic = topic(run, TopicName.LEDGER)
        self._fold = PolicyFold()
        self._policy_shown = self._bookmark.policy
        self._published_at_us: dict[int, int] = {}
        self._switch_started_at_us = 0
        self._pending: Counter[str] = Counter()
        """counts since the last StepCompleted"""
        self._lags: list[int] = []
        self._totals = Counter(self._bookmark.totals)
        self.invalid_records = 0
        self.ended = self._bookmark.ended

    @property
    def complete(self) -> bool:
        """Both topics have shown their RunEnded."""
        return self.ended is not None and self._fold.ended

    def bookmark(self) -> Bookmark:
        """What is covered by the rows given out so far."""
        return Bookmark(
            policy=self._policy_shown, ledger=self._bookmark.ledger, totals=self._bookmark.totals, ended=self.ended
        )

    def apply(self, record: Record) -> Sequence[Row]:
        """Rows of one record. InvalidRecord when it cannot be read; it counts as read then."""
        try:
            if record.topic == self._policy_topic:
                return self._policy(record)
            if record.topic == self._ledger_topic:
                return self._ledger(record)
        except InvalidRecord:
            self.invalid_records += 1
            raise
        raise ValueError(f"the projection does not read {record.topic}")

    # ------------------------------------------------------------------ policy

    def _policy(self, record: Record) -> Sequence[Row]:
        self._fold.skip_to(record.offset)
        try:
            event = decode_policy_event(record.value)
        except InvalidRecord:
            self._fold.skip_to(record.offset + 1)
            raise
        live_before = self._fold.live
        void = self._fold.apply(record.offset, event)
        rows = [] if void is not None else list(self._policy_rows(event, live_before))
        if self._fold.newest is not None:
            self._fold.forget_proofs_below(self._fold.newest - _REMEMBERED_VERSIONS)
        if record.offset < self._policy_shown:
            return []  # folded for what it means to later events; shown before
        self._policy_shown = record.offset + 1
        if isinstance(event, ev.RunStarted) and void is None:
            self.ended = None
        return rows

    def _policy_rows(self, event: ev.AnyPolicyEvent, live_before: int | None) -> Iterator[Row]:
        if isinstance(event, ev.VersionPublished):
            self._published_at_us[event.version] = event.at_us
            self._published_at_us.pop(event.version - _REMEMBERED_VERSIONS, None)
            yield VersionRow(version=event.version, parent=event.parent, tags=_published_tags(event), at_us=event.at_us)
        elif isinstance(event, ev.SwitchStarted):
            self._switch_started_at_us = event.at_us
        elif isinstance(event, ev.VersionActivated):
            yield from self._activated(event, live_before)
        elif isinstance(event, ev.VersionFailed):
            yield self._state_row(event.version, event.at_us, failure=event.reason)
        elif isinstance(event, ev.VersionRetired):
            yield self._state_row(event.version, event.at_us, retired_at=rfc3339(event.at_us), retired_by=event.rule)

    def _activated(self, event: ev.VersionActivated, live_before: int | None) -> Iterator[Row]:
        yield self._state_row(event.version, event.at_us, live_at=rfc3339(event.at_us))
        first = min(self._fold.versions) if live_before is None else live_before
        for version in range(first, event.version):
            if version in self._fold.versions:
                yield self._state_row(version, event.at_us)
        metrics = {
            "switch/acks": float(len(event.acks)),
            "switch/seconds": max(0, event.at_us - self._switch_started_at_us) / 1e6,
            "policy/void_events_total": float(self._fold.void_count),
        }
        if event.version in self._published_at_us:
            # Stamps of two processes: shown, never decided by.
            metrics["switch/publish_to_live_seconds"] = (event.at_us - self._published_at_us[event.version]) / 1e6
        yield StepRow(step=event.version, metrics=metrics, at_us=event.at_us)

    def _state_row(self, version: int, at_us: int, **tags: str) -> VersionRow:
        state = self._fold.versions[version]
        shown = {"state": state.status.value, **tags}
        return VersionRow(version=version, parent=state.event.parent, tags=shown, at_us=at_us)

    # ------------------------------------------------------------------ ledger

    def _ledger(self, record: Record) -> Sequence[Row]:
        if is_arrow(record.headers):
            self._count(decode_decisions(record.value, record.headers))
            return []
        control = decode_ledger_control(record.value)
        if isinstance(control, StepCompleted):
            rows: list[Row] = list(self._step(control))
        elif isinstance(control, LedgerEnded):
            self.ended = "failed" if control.reason.startswith("failed") else "finished"
            rows = [
                StepRow(step=control.last_version, metrics=self._counts(), at_us=control.at_us),
                EndRow(status=self.ended),
            ]
        else:
            return []
        self._pending.clear()
        self._lags.clear()
        # Only here nothing is counted and not shown yet: the one place to start again from.
        self._bookmark = Bookmark(ledger=record.offset + 1, totals=dict(self._totals))
        return rows

    def _count(self, decisions: Sequence[DecisionRow]) -> None:
        for row in decisions:
            name = f"{row.subject.value}/{row.decision.value}" + (f"/{row.reason}" if row.reason else "")
            if name not in self._totals and len(self._totals) >= _MAX_COUNTERS:
                name = f"{row.subject.value}/{row.decision.value}/other"
            self._pending[name] += 1
            self._totals[name] += 1
            if row.decision is not Decision.DROPPED and row.policy_lag is not None:
                self._lags.append(row.policy_lag)

    def _counts(self) -> dict[str, float]:
        counts = {f"ledger/{name}": float(count) for name, count in sorted(self._pending.items())}
        return counts | {f"ledger_total/{name}": float(count) for name, count in sorted(self._totals.items())}

    def _step(self, control: StepCompleted) -> Iterator[Row]:
        metrics, broken = _finite(control.metrics)
        broken = tuple(sorted({*broken, *control.metrics_nonfinite}))
        metrics |= {f"time/{phase}_seconds": seconds for phase, seconds in _finite(control.phase_s)[0].items()}
        metrics |= self._counts()
        metrics["batch/groups"] = float(control.groups)
        metrics["batch/trajectories"] = float(control.trajectories)
        metrics["nonfinite_metrics"] = float(len(broken))
        if self._lags:
            metrics["ledger/policy_lag_mean"] = sum(self._lags) / len(self._lags)
            metrics["ledger/policy_lag_max"] = float(max(self._lags))
        headline = {name: metrics.pop(name) for name in HEADLINE_METRICS if name in metrics}
        tags = {
            "batch_digest": control.batch_digest,
            "config_digest": control.config_digest,
            "code_revision": control.code_revision,
        }
        if broken:
            tags["nonfinite"] = ",".join(broken)
        version = control.version_out
        yield StepRow(step=version, metrics=metrics, at_us=control.at_us)
        yield VersionRow(version=version, parent=control.version_in, tags=tags, metrics=headline, at_us=control.at_us)


def _published_tags(event: ev.VersionPublished) -> dict[str, str]:
    return {
        "state": VersionStatus.PUBLISHED.value,
        "depth": str(event.depth),
        "checkpoint_uri": event.manifest_uri,
        "manifest_sha256": event.manifest_sha256,
        "bytes": str(event.bytes),
        "optimizer_step": str(event.optimizer_step),
        "published_at": rfc3339(event.at_us),
    }


def _finite(values: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
    """(finite values, names of the others): a curve with an infinity in it cannot be read any more."""
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return finite, tuple(name for name in values if name not in finite)
