"""What the live view shows, as a fold over records of `policy`, `ledger`, `workers`, `evaluations`. No I/O, no clock.

Bounded: a window of steps, sums, and the workers that are current.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from consumers.evaluation import VersionScores, scores_by_version
from infra.ports import Record
from schemas.errors import InvalidRecord
from schemas.evaluation_codec import decode_evaluation
from schemas.headers import is_arrow
from schemas.heartbeat import Heartbeat, decode_heartbeat
from schemas.ids import RunId
from schemas.ledger import Decision, LedgerEnded, StepCompleted, Subject, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Standing
from schemas.topics import TopicName, topic

WINDOW_STEPS = 400
_LAG_PREFIX = "policy_lag/count_"
_DROP_PREFIX = "dropped/"
_REMEMBERED_VERSIONS = 64
_MANY_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """What is kept of one training step."""

    version: int
    at_us: int
    success: float | None
    metrics: dict[str, float]


class RunState:
    """Feed it records in offset order per topic."""

    def __init__(self, run: RunId) -> None:
        self._policy = topic(run, TopicName.POLICY)
        self._ledger = topic(run, TopicName.LEDGER)
        self._workers = topic(run, TopicName.WORKERS)
        self._evaluations = topic(run, TopicName.EVALUATIONS)
        self.fold = PolicyFold()
        self.steps: deque[StepSeen] = deque(maxlen=WINDOW_STEPS)
        self.steps_total = 0
        self.trained = 0
        self.lags: Counter[int] = Counter()
        self.drops: Counter[str] = Counter()
        self.open_groups = 0
        self.heartbeats: dict[tuple[str, str], Heartbeat] = {}
        self.evaluation: VersionScores | None = None
        """the last one"""
        self.ledger_ended = False
        self.undecodable = 0
        self._decisions: Record | None = None
        """of the transaction whose control record has not come yet"""

    @property
    def newest(self) -> int | None:
        """The newest published version."""
        return self.fold.newest

    @property
    def step(self) -> int:
        """Training steps that led to the newest version: less than its number where the run has branches."""
        return 0 if self.fold.newest is None else self.fold.versions[self.fold.newest].depth

    def apply(self, record: Record) -> None:
        """Fold one record; one that does not decode is counted and left out."""
        try:
            if record.topic == self._policy:
                self.fold.apply(record.offset, decode_policy_event(record.value))
                if self.fold.newest is not None:
                    self.fold.forget_proofs_below(self.fold.newest - _REMEMBERED_VERSIONS)
            elif record.topic == self._ledger:
                self._apply_ledger(record)
            elif record.topic == self._workers:
                self._apply_heartbeat(decode_heartbeat(record.value))
            elif record.topic == self._evaluations:
                self.evaluation = [*scores_by_version(decode_evaluation(record.value, record.headers))][-1]
        except InvalidRecord:
            self.undecodable += 1

    def workers(self) -> list[tuple[str, str, Heartbeat | None]]:
        """(worker, standing, last heartbeat of its current incarnation), by name."""
        return [
            (name, state.standing.value, self.heartbeats.get((name, state.incarnation)))
            for name, state in sorted(self.fold.workers.items())
        ]

    def tokens_per_s(self) -> float:
        """Of all workers that take part."""
        current = self.fold.with_standing(Standing.ADMITTED) | self.fold.with_standing(Standing.JOINED)
        return sum(beat.tokens_per_s for key, beat in self.heartbeats.items() if key in current)

    def success(self, steps: int) -> float | None:
        """Mean reward over the last steps."""
        values = [step.success for step in list(self.steps)[-steps:] if step.success is not None]
        return sum(values) / len(values) if values else None

    def metric(self, name: str, steps: int = 10) -> float | None:
        """Mean of a metric over the last steps that have it."""
        values = [step.metrics[name] for step in list(self.steps)[-steps:] if name in step.metrics]
        return sum(values) / len(values) if values else None

    def versions_per_s(self, steps: int = 20) -> float | None:
        """Over the last steps."""
        seen = list(self.steps)[-(steps + 1) :]
        if len(seen) < 2 or seen[-1].at_us <= seen[0].at_us:
            return None
        return (len(seen) - 1) / ((seen[-1].at_us - seen[0].at_us) / 1e6)

    def _apply_ledger(self, record: Record) -> None:
        if is_arrow(record.headers):
            self._decisions = record
            return
        decisions, self._decisions = self._decisions, None
        control = decode_ledger_control(record.value)
        self.open_groups = len(control.position.open_groups)
        if isinstance(control, StepCompleted):
            self._apply_step(control)
            return
        self.ledger_ended = isinstance(control, LedgerEnded)
        if decisions is not None:  # a step's own metrics tell its drops: decoding its rows would cost more
            rows = decode_decisions(decisions.value, decisions.headers)
            self.drops.update(
                row.reason for row in rows if row.subject is Subject.TRAJECTORY and row.decision is Decision.DROPPED
            )

    def _apply_step(self, step: StepCompleted) -> None:
        self.steps_total += 1
        self.trained += step.trajectories
        for name, value in step.metrics.items():
            if name.startswith(_LAG_PREFIX):
                self.lags[int(name.removeprefix(_LAG_PREFIX))] += int(value)
            elif name.startswith(_DROP_PREFIX):
                self.drops[name.removeprefix(_DROP_PREFIX)] += int(value)
        self.steps.append(
            StepSeen(
                version=step.version_out,
                at_us=step.at_us,
                success=step.metrics.get("critic/rewards/mean"),
                metrics=dict(step.metrics),
            )
        )

    def _apply_heartbeat(self, beat: Heartbeat) -> None:
        self.heartbeats[(beat.worker, beat.incarnation)] = beat
        if len(self.heartbeats) > _MANY_WORKERS:
            current = {(name, state.incarnation) for name, state in self.fold.workers.items()}
            self.heartbeats = {key: kept for key, kept in self.heartbeats.items() if key in current}
