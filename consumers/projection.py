"""What an experiment tracker shall show, as a pure fold of the `policy`, `ledger` and `evaluations` topics.

The topics have no order between them: every row says what it is about, and rows of one version may come
in any order. Folding again from a bookmark, or from the start, gives the same rows. No I/O, no clock.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from consumers.evaluation import scores_of
from consumers.projection_blocks import Blocks, range_text
from consumers.projection_rows import BlockRow, Bookmark, EndRow, EndStatus, Row, StepRow, VersionRow
from consumers.projection_standing import Scores, promotions
from infra.ports import Record
from infra.tracker_port import Promotions, RunOrigin
from schemas import policy_events as ev
from schemas.errors import InvalidRecord
from schemas.evaluation_codec import decode_evaluation
from schemas.headers import is_arrow, rfc3339
from schemas.ids import RunId
from schemas.ledger import Decision, DecisionRow, LedgerEnded, Settled, StepCompleted, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus
from schemas.topics import TopicName, topic

READ = (TopicName.POLICY, TopicName.LEDGER, TopicName.EVALUATIONS)
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
MAIN_BRANCH = "main"
# Versions further back than this keep the state they were shown in (bounded memory).
_REMEMBERED_VERSIONS = 4_096
# Reason codes come from rows of the log: more than this many different ones are counted together. All of them
# stand in the bookmark, which has room for 5,000 characters.
_MAX_COUNTERS = 80
_COUNTER_CHARS = 48


class Projection:
    """The fold. Feed it every topic from offset 0, each in offset order; what the bookmark covers gives no rows."""

    def __init__(self, run: RunId, bookmark: Bookmark | None = None, *, best_metric: str = "") -> None:
        self._bookmark = bookmark or Bookmark()
        self._resumed = self._bookmark
        self._topics = {topic(run, name): name for name in READ}
        self._fold = PolicyFold()
        self._policy_shown = self._bookmark.policy
        self._evaluations_shown = self._bookmark.evaluations
        self._branch = MAIN_BRANCH
        self._published_at_us: dict[int, int] = {}
        self._switch_started_at_us = 0
        self._pending: Counter[str] = Counter()
        """counts since the last StepCompleted"""
        self._lags: list[int] = []
        self._totals = Counter(self._bookmark.totals)
        self._blocks = Blocks(topic(run, TopicName.TRAJECTORIES))
        self._scores = Scores(best_metric)
        self.invalid_records = 0
        self.ended = self._bookmark.ended

    @property
    def complete(self) -> bool:
        """Both topics have shown their RunEnded."""
        return self.ended is not None and self._fold.ended

    @property
    def newest_is_evaluated(self) -> bool:
        """The evaluation of the newest version was read: no other will follow after the end of the run."""
        return self._fold.newest is not None and self._scores.was_evaluated(self._fold.newest)

    def bookmark(self) -> Bookmark:
        """What is covered by the rows given out so far."""
        shown = self._bookmark
        return Bookmark(
            policy=self._policy_shown, ledger=shown.ledger, evaluations=self._evaluations_shown, block=shown.block,
            totals=shown.totals, ended=self.ended,
        )  # fmt: skip

    def promotions(self) -> Promotions:
        """What the registry shall hold now."""
        return promotions(self._fold, self._scores)

    def open_file(self) -> tuple[str, str] | None:
        """(path, text): the ledger excerpt of the block of steps that is not complete."""
        return self._blocks.open_file()

    def apply(self, record: Record) -> Sequence[Row]:
        """Rows of one record. InvalidRecord when it cannot be read; it counts as read then."""
        name = self._topics.get(record.topic)
        try:
            if name is TopicName.POLICY:
                return self._policy(record)
            if name is TopicName.LEDGER:
                return self._ledger(record)
            if name is TopicName.EVALUATIONS:
                return self._evaluation(record)
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
        live_before, branch_from = self._fold.live, self._fold.branch_from
        void = self._fold.apply(record.offset, event)
        if void is None and isinstance(event, ev.VersionPublished) and branch_from is not None:
            self._branch = f"v{event.version} from v{branch_from}"
        rows = [] if void is not None else list(self._policy_rows(event, live_before))
        if self._fold.newest is not None:
            self._fold.forget_proofs_below(self._fold.newest - _REMEMBERED_VERSIONS)
        if record.offset < self._policy_shown:
            return []  # folded for what it means to later events; shown before
        self._policy_shown = record.offset + 1
        return rows

    def _policy_rows(self, event: ev.AnyPolicyEvent, live_before: int | None) -> Iterator[Row]:
        at_us = event.at_us
        if isinstance(event, ev.VersionPublished):
            self._published_at_us[event.version] = at_us
            self._published_at_us.pop(event.version - _REMEMBERED_VERSIONS, None)
            tags = _published_tags(event) | {"branch": self._branch}
            yield VersionRow(version=event.version, parent=event.parent, tags=tags, at_us=at_us)
        elif isinstance(event, ev.SwitchStarted):
            self._switch_started_at_us = at_us
        elif isinstance(event, ev.VersionActivated):
            yield from self._activated(event, live_before)
        elif isinstance(event, ev.VersionFailed):
            yield self._state_row(event.version, at_us, failure=event.reason)
        elif isinstance(event, ev.VersionRetired):
            yield self._state_row(event.version, at_us, retired_at=rfc3339(at_us), retired_by=event.rule)
        elif isinstance(event, ev.VersionPinned):
            yield self._state_row(event.version, at_us, pinned="yes", pinned_because=event.reason)
        elif isinstance(event, ev.VersionUnpinned):
            yield self._state_row(event.version, at_us, pinned="no")

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

    # ------------------------------------------------------------------ evaluations

    def _evaluation(self, record: Record) -> Sequence[Row]:
        answers = decode_evaluation(record.value, record.headers)
        self._scores.evaluated(answers)
        if record.offset < self._evaluations_shown:
            return []
        self._evaluations_shown = record.offset + 1
        rows: list[Row] = []
        for version in sorted({answer.version for answer in answers}):
            own = [answer for answer in answers if answer.version == version]
            failed = sum(answer.reward is None for answer in own)
            metrics = {"evaluation/answers": float(len(own)), "evaluation/rewards_failed": float(failed)}
            metrics |= scores_of(own).metrics()
            mean = self._scores.mean_evaluation(version)
            if mean is not None:
                metrics["evaluation/reward_mean"] = mean
            rows.append(StepRow(step=version, metrics=metrics, at_us=max(answer.evaluated_at_us for answer in own)))
        return rows

    # ------------------------------------------------------------------ ledger

    def _ledger(self, record: Record) -> Sequence[Row]:
        shown, in_block = record.offset < self._resumed.ledger, record.offset >= self._resumed.block
        if is_arrow(record.headers):
            if in_block:  # what lies before is in the totals, and in files that are written
                self._count(decode_decisions(record.value, record.headers), shown=shown)
            return []
        control = decode_ledger_control(record.value)
        if isinstance(control, StepCompleted):
            self._scores.step(control.version_out, control.metrics)
        if not in_block:
            self._blocks.passed(control.position, record.offset + 1)
            return []
        if not shown:
            self.ended = None  # a run that is extended goes on behind its end
        if isinstance(control, Settled):
            self._blocks.settled(control.position)
            return []
        rows = list(self._step(control, record.offset) if isinstance(control, StepCompleted) else self._end(control))
        block = self._block(control, record.offset)
        if shown:
            return []
        rows += [block] if block is not None else []
        self._pending.clear()
        self._lags.clear()
        # Only here nothing is counted and not shown yet: the one place to start again from.
        self._bookmark = Bookmark(
            ledger=record.offset + 1,
            block=self._bookmark.block if block is None else record.offset + 1,
            totals=dict(self._totals),
        )
        if isinstance(control, LedgerEnded):
            self.ended = _end_status(control)
        return rows

    def _block(self, control: StepCompleted | LedgerEnded, offset: int) -> BlockRow | None:
        if isinstance(control, StepCompleted):
            return self._blocks.step(control, offset)
        return self._blocks.end(control, offset)

    def _count(self, decisions: Sequence[DecisionRow], *, shown: bool) -> None:
        self._blocks.decisions(decisions)
        if shown:
            return
        for row in decisions:
            name = f"{row.subject.value}/{row.decision.value}" + (f"/{row.reason}" if row.reason else "")
            name = name[:_COUNTER_CHARS]
            if name not in self._totals and len(self._totals) >= _MAX_COUNTERS:
                name = f"{row.subject.value}/{row.decision.value}/other"
            self._pending[name] += 1
            self._totals[name] += 1
            if row.decision is not Decision.DROPPED and row.policy_lag is not None:
                self._lags.append(row.policy_lag)

    def _counts(self) -> dict[str, float]:
        counts = {f"ledger/{name}": float(count) for name, count in sorted(self._pending.items())}
        return counts | {f"ledger_total/{name}": float(count) for name, count in sorted(self._totals.items())}

    def _end(self, control: LedgerEnded) -> Iterator[Row]:
        yield StepRow(step=control.last_version, metrics=self._counts(), at_us=control.at_us)
        yield EndRow(status=_end_status(control), at_us=control.at_us)

    def _step(self, control: StepCompleted, offset: int) -> Iterator[Row]:
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
        read = self._blocks.range_of_step(control.position)
        tags = {
            "batch_digest": control.batch_digest,
            "config_digest": control.config_digest,
            "code_revision": control.code_revision,
            "ledger_offset": str(offset),
            "trajectories_read": range_text(read),
            "trajectory_records_read": str(read.records),
        }
        if broken:
            tags["nonfinite"] = ",".join(broken)
        version = control.version_out
        yield StepRow(step=version, metrics=metrics, at_us=control.at_us)
        yield VersionRow(version=version, parent=control.version_in, tags=tags, metrics=headline, at_us=control.at_us)


def origin_of(run: RunId, record: Record) -> RunOrigin | None:
    """Which log this is, by its first RunStarted, which has the time and the configuration's digest; None: not that.

    Not by the first record: workers may join before the trainer begins."""
    if record.topic != topic(run, TopicName.POLICY):
        return None
    try:
        started = decode_policy_event(record.value)
    except InvalidRecord:
        return None
    if not isinstance(started, ev.RunStarted):
        return None
    log_id = hashlib.sha256(record.value or b"").hexdigest()[:16]
    return RunOrigin(run=run, log_id=log_id, started_at_us=started.at_us)


def _end_status(control: LedgerEnded) -> EndStatus:
    return "failed" if control.reason.startswith("failed") else "finished"


def _published_tags(event: ev.VersionPublished) -> dict[str, str]:
    return {
        "state": VersionStatus.PUBLISHED.value,
        "depth": str(event.depth),
        "checkpoint_uri": event.manifest_uri,
        "manifest_sha256": event.manifest_sha256,
        "bytes": str(event.bytes),
        "optimizer_step": str(event.optimizer_step),
        "has_state": "yes" if event.has_state else "no",
        "published_at": rfc3339(event.at_us),
    }


def _finite(values: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
    """(finite values, names of the others): a curve with an infinity in it cannot be read any more."""
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return finite, tuple(name for name in values if name not in finite)
