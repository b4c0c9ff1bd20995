"""The summary of a run: one JSON object, written beside the run when it ends.

trajectories_trained + all of dropped + undecided = trajectories_in_log, or `summarise` raises: the summary of a run
that does not add up would be worse than none.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from consumers.offline.branches import BranchStart, branch_starts
from consumers.offline.costs import CostsAssembler, RunCosts
from consumers.offline.evaluations import EvaluatedRun, evaluated_run
from consumers.offline.outcomes import Ends
from consumers.offline.run_log import RunLog, TrajectoryEntry
from consumers.offline.switch_latency import SwitchLatencies
from infra.whole_files import write_whole
from schemas import policy_events as ev
from schemas.errors import IllegalState
from schemas.ledger import AnyLedgerControl, Decision, DecisionRow, StepCompleted, Subject
from schemas.policy_fold import PolicyFold
from schemas.trajectory import Trajectory

_SHARE = 10
"""success is compared between the first and the last tenth of the groups"""
_AT_WORK = ("ready", "serving", "draining", "loading")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run came to. Counts cover the log up to RunEnded; rows behind it count for nothing."""

    run: str
    ended: bool
    versions_published: int
    """VersionPublished events that count, version 0 among them"""
    versions_trained: int
    """training steps, of all branches"""
    newest_version: int | None
    newest_step: int | None
    """training steps that led to it; less than its number where the run has branches"""
    branches: tuple[BranchStart, ...]
    """where training went on from an older version"""
    versions_live: int
    """versions that were activated"""
    switch_latency_s: dict[str, dict[str, float]]
    """phase -> p50, p95 and count over the last switches"""
    groups_issued: int
    groups_trained: int
    trajectories_in_log: int
    trajectories_trained: int
    trajectories_replayed: int
    dropped: dict[str, int]
    """reason -> trajectories"""
    dropped_groups: dict[str, int]
    """reason -> groups of which no trajectory is in the log"""
    undecided: int
    refused_records: int
    """records that could not be decoded: nobody knows how many trajectories they held"""
    after_end: int
    """trajectories behind the end of the run"""
    success_first: float | None
    """mean reward of the first tenth of the complete groups, in order of request, before any filter"""
    success_last: float | None
    complete_groups: int
    policy_lag_histogram: dict[int, int]
    """policy lag -> trained trajectories"""
    max_policy_lag_trained: int | None
    tokens_generated: int
    """sampled by the policy, trained or not"""
    tokens_trained: int
    wall_s: float
    """first RunStarted to the last RunEnded, or to the newest event while the run is under way"""
    trainer_idle_fraction: float | None
    generator_idle_fraction: float | None
    """mean over the heartbeats that compaction has left"""
    age_seconds_mean: float | None
    """sampled to consumed, trained trajectories"""
    age_seconds_max: float | None
    costs: RunCosts
    evaluation: EvaluatedRun
    """held-out prompts, where an evaluator ran"""
    audit_findings: int | None
    audit_notices: int | None
    greedy_success_before: float | None = None
    greedy_success_after: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, keys of histograms as text."""
        plain = asdict(self)
        plain["policy_lag_histogram"] = {str(lag): count for lag, count in self.policy_lag_histogram.items()}
        plain["branches"] = [{**asdict(start), "left_versions": list(start.left_versions)} for start in self.branches]
        plain["evaluation"]["words"] = list(self.evaluation.words)
        return plain

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class _Step:
    """What is kept of a StepCompleted; None: it did not say."""

    trajectories: int
    whole_s: float
    idle_fraction: float | None
    age_mean_s: float | None
    age_max_s: float | None


@dataclass(slots=True)
class _Ledger:
    """What the ledger adds up to."""

    control: AnyLedgerControl | None = None
    steps: list[_Step] = field(default_factory=list)
    trained: int = 0
    replayed: int = 0
    tokens_trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    groups_trained: int = 0
    groups_dropped: dict[str, str] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    refused: set[tuple[int | None, int | None]] = field(default_factory=set)
    """(partition, offset) of records that were decided as a whole"""

    def add(self, row: DecisionRow) -> None:
        if row.subject is Subject.RECORD:
            self.refused.add((row.partition, row.offset))
        elif row.subject is Subject.GROUP:
            if row.decision is Decision.DROPPED:
                self.groups_dropped[row.group_id or ""] = row.reason
            else:
                self.groups_trained += 1
        elif row.decision is Decision.DROPPED:
            self.dropped[row.reason] += 1
        else:
            self.trained += row.decision is Decision.TRAINED
            self.replayed += row.decision is Decision.REPLAYED
            self.tokens_trained += row.completion_tokens or 0
            if row.policy_lag is not None:
                self.lags[row.policy_lag] += 1


class _Log:
    """What the trajectories add up to."""

    def __init__(
        self, ends: Ends, positions: dict[str, int], refused: Collection[tuple[int | None, int | None]]
    ) -> None:
        self._ends = ends
        self._refused = refused
        self._positions = positions
        self._claims: dict[str, dict[str, dict[int, float | None]]] = {}
        self.success: dict[int, tuple[float, int]] = {}
        """request position -> sum and number of the rewards of its first complete claim"""
        self.rows = self.tokens = self.after_end = 0
        self.groups: set[str] = set()

    def add(self, entry: TrajectoryEntry) -> None:
        """Count one record."""
        if not self._ends.counts(entry.partition, entry.offset):
            self.after_end += len(entry.rows)
            return
        if entry.key in self._refused:
            return
        self.rows += len(entry.rows)
        for row in entry.rows:
            self.groups.add(row.group_id)
            if row.trajectory is not None:
                self.tokens += int(row.trajectory.loss_mask.sum())
                self._complete(row.trajectory)

    def _complete(self, t: Trajectory) -> None:
        position = self._positions.get(t.group_id)
        if position is None or position in self.success:
            return
        claim = self._claims.setdefault(t.group_id, {}).setdefault(t.claim_id, {})
        claim.setdefault(t.index_in_group, t.reward)
        if len(claim) == t.group_size:
            rewards = [reward for reward in claim.values() if reward is not None]
            self.success[position] = (math.fsum(rewards), len(rewards))
            del self._claims[t.group_id]


def summarise(
    run_log: RunLog,
    *,
    audit_findings: int | None = None,
    audit_notices: int | None = None,
    greedy_success_before: float | None = None,
    greedy_success_after: float | None = None,
) -> RunSummary:
    """Read the run once and add it up. IllegalState when the counts contradict each other: run the audit then."""
    costs = CostsAssembler()
    ledger = _read_ledger(run_log, costs)
    ends = Ends(None if ledger.control is None else ledger.control.position, ledger.control)
    asked = [entry.request for entry in run_log.requests() if entry.request is not None]
    positions = {str(request.group_id): request.request_position for request in asked}
    log = _Log(ends, positions, ledger.refused)
    for entry in run_log.trajectories():
        log.add(entry)
        if ends.counts(entry.partition, entry.offset):
            costs.add_trajectories(entry)
    fold = PolicyFold()
    wall_s, switches = _read_policy(run_log, fold, costs)
    undecided = log.rows - ledger.trained - ledger.dropped.total()
    if undecided < 0 or (ends.is_ended and undecided):
        raise IllegalState(
            f"run {run_log.run}: {log.rows} trajectories in the log, but {ledger.trained} trained and "
            f"{ledger.dropped.total()} dropped; `driftlog audit` says which"
        )
    first, last = _success(log.success)
    age_mean, age_max = _ages(ledger.steps)
    return RunSummary(
        run=run_log.run,
        ended=ends.is_ended,
        versions_published=len(fold.versions),
        versions_trained=len(ledger.steps),
        newest_version=fold.newest,
        newest_step=None if fold.newest is None else fold.versions[fold.newest].depth,
        branches=branch_starts(fold),
        switch_latency_s=switches.figures(),
        versions_live=sum(1 for version in fold.versions if fold.was_activated(version)),
        groups_issued=len(positions),
        groups_trained=ledger.groups_trained,
        trajectories_in_log=log.rows,
        trajectories_trained=ledger.trained,
        trajectories_replayed=ledger.replayed,
        dropped=dict(sorted(ledger.dropped.items())),
        dropped_groups=dict(
            sorted(Counter(r for g, r in ledger.groups_dropped.items() if g not in log.groups).items())
        ),
        undecided=undecided,
        refused_records=len(ledger.refused),
        after_end=log.after_end,
        success_first=first,
        success_last=last,
        complete_groups=len(log.success),
        policy_lag_histogram=dict(sorted(ledger.lags.items())),
        max_policy_lag_trained=max(ledger.lags, default=None),
        tokens_generated=log.tokens,
        tokens_trained=ledger.tokens_trained,
        wall_s=wall_s,
        trainer_idle_fraction=_trainer_idle(ledger.steps),
        generator_idle_fraction=_generator_idle(run_log),
        age_seconds_mean=age_mean,
        age_seconds_max=age_max,
        costs=costs.costs(),
        evaluation=evaluated_run(run_log),
        audit_findings=audit_findings,
        audit_notices=audit_notices,
        greedy_success_before=greedy_success_before,
        greedy_success_after=greedy_success_after,
    )


def write_summary(summary: RunSummary, path: Path) -> None:
    """Write it in one step: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, summary.to_json())


def _read_ledger(run_log: RunLog, costs: CostsAssembler) -> _Ledger:
    ledger = _Ledger()
    for transaction in run_log.transactions():
        for row in transaction.decisions:
            ledger.add(row)
        if transaction.control is not None:
            ledger.control = transaction.control
        if isinstance(transaction.control, StepCompleted):
            ledger.steps.append(_figures(transaction.control))
            costs.add_step(transaction.control)
    return ledger


def _read_policy(run_log: RunLog, fold: PolicyFold, costs: CostsAssembler) -> tuple[float, SwitchLatencies]:
    """Wall time of the run, and its switches."""
    started_us: int | None = None
    newest_us = ended_us = 0
    switches = SwitchLatencies()
    for entry in run_log.policy(fold):
        switches.add(entry)
        if not entry.is_legal or entry.event is None:
            continue
        costs.add_event(entry.event)
        newest_us = max(newest_us, entry.event.at_us)
        if isinstance(entry.event, ev.RunStarted) and started_us is None:
            started_us = entry.event.at_us
        elif isinstance(entry.event, ev.RunEnded):
            ended_us = entry.event.at_us
    end_us = ended_us if fold.ended else newest_us
    return 0.0 if started_us is None else max(0.0, (end_us - started_us) / 1e6), switches


def _success(by_position: dict[int, tuple[float, int]]) -> tuple[float | None, float | None]:
    """(first, last) tenth, at least one group each."""
    groups = [by_position[position] for position in sorted(by_position)]
    count = max(1, len(groups) // _SHARE)
    return _mean(groups[:count]), _mean(groups[-count:])


def _mean(groups: Sequence[tuple[float, int]]) -> float | None:
    number = sum(n for _, n in groups)
    return math.fsum(total for total, _ in groups) / number if number else None


def _figures(step: StepCompleted) -> _Step:
    get = step.metrics.get
    return _Step(
        trajectories=step.trajectories,
        whole_s=step.phase_s.get("whole", 1.0),
        idle_fraction=get("trainer/idle_fraction"),
        age_mean_s=get("age_seconds/mean"),
        age_max_s=get("age_seconds/max"),
    )


def _trainer_idle(steps: Sequence[_Step]) -> float | None:
    """Mean of the steps, weighted by how long each took."""
    return _weighted([(step.idle_fraction, step.whole_s) for step in steps])


def _generator_idle(run_log: RunLog) -> float | None:
    """Mean of the heartbeats of workers that could have generated."""
    beats = [beat.idle_fraction for beat in run_log.heartbeats() if beat.state in _AT_WORK]
    return math.fsum(beats) / len(beats) if beats else None


def _ages(steps: Sequence[_Step]) -> tuple[float | None, float | None]:
    mean = _weighted([(step.age_mean_s, step.trajectories) for step in steps])
    return mean, max((step.age_max_s for step in steps if step.age_max_s is not None), default=None)


def _weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    found = [(value, weight) for value, weight in values if value is not None]
    total = math.fsum(weight for _, weight in found)
    return math.fsum(value * weight for value, weight in found) / total if total else None
