"""`reanalyse`: what other settings would have done with a run that is in the log, beside what happened.

Streams the log once. Each transaction is judged twice: by the run's own settings, which must repeat every decision and
every statistic they can (known), and by the others. Memory does not grow with the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from consumers.objective.shapes import ObjectiveError
from consumers.offline.reanalyse.counts import Counts, Sides, count_group, fate_of_row, recorded_counts
from consumers.offline.reanalyse.judge import Fate, JudgedGroup, ReanalysisRules, judged, place, rederived
from consumers.offline.reanalyse.known import Reproduction
from consumers.offline.reanalyse.maths import StepStatistics, step_statistics
from consumers.offline.reanalyse.rewards import RewardsAnew
from consumers.offline.reanalyse.scoring import Rescorer
from consumers.offline.reanalyse.step import Batch, FirstUses, batch_of, with_recorded_advantages
from consumers.offline.reanalyse.stream import RecordedTransaction, recorded_transactions
from consumers.offline.reanalyse.totals import StatisticsTotal
from consumers.offline.run_log import RunLog
from consumers.offline.wholeness import require_decisions
from consumers.trainer.step_metrics import batch_metrics, drop_metrics
from schemas.errors import ConfigError
from schemas.ledger import Decision, DecisionRow, Reason, StepCompleted, Subject
from schemas.scores_codec import ScoreRow

_CUT_OFF = "A decision about rows that are cut off cannot be judged again: restore the topic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a run under one configuration."""

    own: ReanalysisRules
    other: ReanalysisRules
    """the same object where nothing is changed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One version: what happened, and what the other settings make of it."""

    version: int
    version_in: int
    recorded: Counts
    """since the version before"""
    reanalysed: Counts
    logged: Mapping[str, float]
    """metrics of the step as logged"""
    again: Mapping[str, float]
    """the same names under the other settings, as far as the log knows them"""
    applied: Mapping[str, float]
    corrections: Mapping[str, Mapping[str, float]]
    rows_without_scores: int
    """in the batch, and in no ratio"""


@dataclass(slots=True)
class Totals:
    """The whole run. Mutable; complete when the last step was taken."""

    recorded: Counts = field(default_factory=Counts)
    reanalysed: Counts = field(default_factory=Counts)
    sides: Sides = field(default_factory=Sides)
    reproduction: Reproduction = field(default_factory=Reproduction)
    own: StatisticsTotal = field(default_factory=StatisticsTotal)
    other: StatisticsTotal = field(default_factory=StatisticsTotal)
    versions: int = 0
    trajectories: int = 0
    """looked at"""
    rows_expired: int = 0
    """that retention has removed: their groups are carried over as recorded"""
    rows_without_scores: int = 0
    rows_without_reference: int = 0
    unscored_penalties: int = 0
    replays_dropped: Counter[str] = field(default_factory=Counter)
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """function, scored, changed, failed, causes; empty where rewards are as recorded"""
    problems: list[str] = field(default_factory=list)
    """the first rows and records that are not what the ledger says"""
    problem_count: int = 0

    @property
    def failed(self) -> bool:
        """The run's own settings do not repeat it, or its log is damaged."""
        return self.reproduction.failed or self.problem_count > 0

    def problem(self, words: str) -> None:
        """Something in the log that cannot be used."""
        self.problem_count += 1
        if len(self.problems) < 20:
            self.problems.append(words)


class Reanalysis:
    """`steps` goes through the run once; `totals` is complete after it."""

    def __init__(
        self,
        run_log: RunLog,
        segments: Mapping[str, Segment],
        *,
        rewards: RewardsAnew | None = None,
        rescorer: Rescorer | None = None,
    ) -> None:
        """`segments`: by config digest, in the order of the run."""
        self._run_log = run_log
        self._segments = segments
        self._current = next(iter(segments))
        self._rewards = rewards
        self._rescorer = rescorer
        self._first_uses = FirstUses()
        self._since = (Counts(), Counts())
        """recorded and reanalysed, since the last version"""
        self.totals = Totals()

    def steps(self) -> Generator[StepComparison, None, None]:
        """Each version that was made, in order.

        RangeMissing or IllegalState at the call, before any step, where the log cannot answer: policy or ledger are not
        whole, a topic is cut off, a newer build wrote the ledger; later at a row or score of a newer build."""
        require_decisions(self._run_log, _CUT_OFF)
        return self._steps()

    def _steps(self) -> Generator[StepComparison, None, None]:
        lag = max(max(s.own.largest_lag, s.other.largest_lag) for s in self._segments.values())
        for at in recorded_transactions(self._run_log, keep_proofs_of_last=lag + 1):
            self.totals.rows_expired += at.expired
            for problem in at.problems:
                self.totals.problem(problem)
            compared = self._transaction(at)
            self._first_uses.forget(at.control.position)
            if self._rewards is not None:
                self._rewards.forget(at.control.position)
            if compared is not None:
                yield compared
        self._add_up()  # what was decided behind the last version
        self.totals.rewards = {} if self._rewards is None else self._rewards.summary()

    # ------------------------------------------------------------------ one transaction

    def _transaction(self, at: RecordedTransaction) -> StepComparison | None:
        segment = self._segment(at)
        own = [judged(group, at, segment.own) for group in at.groups]
        changed = segment.other is not segment.own or self._rewards is not None
        reward = None if self._rewards is None else self._rewards.of
        other = [judged(group, at, segment.other, reward=reward) for group in at.groups] if changed else own
        self._check_decisions(at, own)
        self._count(at, other)
        step = at.step
        if step is None:
            return None
        first = self._own_step(at, step, segment, own)
        second = first if not changed and self._rescorer is None else self._other_step(at, segment, other, first)
        return self._compared(at, step, segment, other, second)

    def _segment(self, at: RecordedTransaction) -> Segment:
        """The configuration in force: a step names it; before the first step of a new one, the one that fits."""
        step = at.step
        if step is not None:
            if step.config_digest not in self._segments:
                raise ConfigError(
                    f"version {step.version_out} was trained under configuration {step.config_digest[:12]}, which is "
                    "not stored with the run: reanalyse cannot know its settings"
                )
            self._current = step.config_digest
            return self._segments[step.config_digest]
        current = self._segments[self._current]
        if len(self._segments) > 1 and _differences(at, current.own):
            digests = list(self._segments)
            for digest in digests[digests.index(self._current) + 1 :]:
                if not _differences(at, self._segments[digest].own):
                    return self._segments[digest]
        return current

    def _check_decisions(self, at: RecordedTransaction, own: Sequence[JudgedGroup]) -> None:
        found = self.totals.reproduction
        for group in own:
            found_different = rederived(group.recorded, group)
            if found_different:
                found.differs(found_different)
            if group.fate is Fate.CARRIED_OVER:
                found.carried_over[_carried(group.recorded.decision)] += 1
            else:
                found.decisions += 1
            for row in group.recorded.rows:
                if place(row.decision) in group.row_fates:
                    found.decisions += 1
                else:
                    found.carried_over[_carried(row.decision)] += 1
        for decision in at.loose:
            found.carried_over[_carried(decision)] += 1

    def _count(self, at: RecordedTransaction, other: Sequence[JudgedGroup]) -> None:
        recorded, again = self._since
        recorded.add(recorded_counts(at.transaction.decisions))
        again.add(recorded_counts(at.loose))
        version = at.step.version_out if at.step is not None else at.base + 1
        for group in other:
            count_group(again, group)
            self.totals.sides.add(group, version)
            self.totals.trajectories += len(group.recorded.rows)

    # ------------------------------------------------------------------ one step

    def _own_step(
        self, at: RecordedTransaction, step: StepCompleted, segment: Segment, own: Sequence[JudgedGroup]
    ) -> tuple[Batch, StepStatistics | None, dict[str, float]]:
        rules = segment.own
        batch = batch_of(at, own, rules, FirstUses())
        if rules.learner.kl_in_reward:
            batch = with_recorded_advantages(batch, at)
        self._check_numbers(at, batch, rules)
        statistics, metrics = self._statistics(at, step, batch, rules, at.transaction.decisions)
        if statistics is not None:
            self.totals.own.add(statistics, rules.learner.objective)
            whole = all(group.fate is not Fate.CARRIED_OVER for group in own if group.recorded.was_trained)
            if whole and not batch.replays_dropped:
                self.totals.reproduction.compare(
                    step.version_out,
                    step.metrics,
                    metrics,
                    rules.learner,
                    ranks=rules.ranks,
                    scores_are_whole=not statistics.rows_without_scores,
                )
        return batch, statistics, metrics

    def _other_step(
        self,
        at: RecordedTransaction,
        segment: Segment,
        other: Sequence[JudgedGroup],
        first: tuple[Batch, StepStatistics | None, dict[str, float]],
    ) -> tuple[Batch, StepStatistics | None, dict[str, float]]:
        step, rules = at.step, segment.other
        assert step is not None
        batch = batch_of(at, other, rules, self._first_uses, self._rewards)
        if self._rescorer is not None:
            rows = [row.trajectory for row in batch.rows]
            at = replace(at, scores=_with_references(self._rescorer.scores(rows, at.base), at.scores))
        elif first[1] is not None and _same_rows(batch, first[0]) and _same_maths(segment):
            return batch, first[1], {**first[1].metrics, **self._batch_metrics(at, step, batch, _dropped(at, other))}
        return batch, *self._statistics(at, step, batch, rules, _dropped(at, other))

    def _statistics(
        self,
        at: RecordedTransaction,
        step: StepCompleted,
        batch: Batch,
        rules: ReanalysisRules,
        decisions: Sequence[DecisionRow],
    ) -> tuple[StepStatistics | None, dict[str, float]]:
        """None where the stored numbers are none the maths would take."""
        depth = at.fold.versions[at.base].depth
        metrics = self._batch_metrics(at, step, batch, decisions)
        try:
            found = step_statistics(batch.rows, at.scores, rules, training_step=depth)
        except ObjectiveError as error:
            self.totals.problem(f"version {step.version_out}: {error}")
            return None, metrics
        return found, {**found.metrics, **metrics}

    def _batch_metrics(
        self, at: RecordedTransaction, step: StepCompleted, batch: Batch, decisions: Sequence[DecisionRow]
    ) -> dict[str, float]:
        depth = at.fold.versions[at.base].depth
        measured = batch_metrics(batch.rows, batch.groups, (), version_in=at.base, depth_in=depth, now_us=step.at_us)
        return {**measured, **drop_metrics(decisions)}

    def _check_numbers(self, at: RecordedTransaction, batch: Batch, rules: ReanalysisRules) -> None:
        """Weights and advantages of the batch, and its order, against the ledger."""
        used = [r for r in at.transaction.decisions if r.subject is Subject.TRAJECTORY and r.use_count > 0]
        told = [(r.trajectory_id, r.policy_lag, r.weight, r.use_count, r.advantage) for r in used]
        again = [
            (row.trajectory.trajectory_id, row.policy_lag, row.weight, row.use_count, row.advantage)
            for row in batch.rows
        ]
        if len(told) != len(again):
            return  # named already: a group or a replay that is not derived again
        for said, found in zip(told, again, strict=True):
            if said != found:
                words = f"the ledger says (lag, weight, use, advantage) {said[1:]}, its own rules say {found[1:]}"
                self.totals.reproduction.differs(f"{said[0]}: {words}")

    def _compared(
        self,
        at: RecordedTransaction,
        step: StepCompleted,
        segment: Segment,
        other: Sequence[JudgedGroup],
        second: tuple[Batch, StepStatistics | None, dict[str, float]],
    ) -> StepComparison:
        batch, statistics, metrics = second
        totals = self.totals
        self._since[1].rows_replayed += sum(row.use_count > 1 for row in batch.rows)
        totals.replays_dropped.update(batch.replays_dropped.values())
        totals.unscored_penalties += batch.unscored_penalties
        if statistics is not None:
            totals.other.add(statistics, segment.other.learner.objective)
            totals.rows_without_scores += statistics.rows_without_scores
            totals.rows_without_reference += statistics.rows_without_reference
        totals.versions += 1
        recorded, again = self._since
        self._add_up()
        return StepComparison(
            version=step.version_out,
            version_in=step.version_in,
            recorded=recorded,
            reanalysed=again,
            logged=step.metrics,
            again=metrics,
            applied={} if statistics is None else statistics.applied,
            corrections={} if statistics is None else statistics.corrections,
            rows_without_scores=len(batch.rows) if statistics is None else statistics.rows_without_scores,
        )

    def _add_up(self) -> None:
        self.totals.recorded.add(self._since[0])
        self.totals.reanalysed.add(self._since[1])
        self._since = (Counts(), Counts())


def _differences(at: RecordedTransaction, rules: ReanalysisRules) -> bool:
    return any(rederived(group, judged(group, at, rules)) for group in at.groups)


def _carried(row: DecisionRow) -> str:
    """What decided it, where no rule can: the reason, or that it is not all in the log."""
    return row.reason if row.reason != Reason.NONE else "trained, but not whole in the log"


def _dropped(at: RecordedTransaction, other: Sequence[JudgedGroup]) -> list[DecisionRow]:
    """The decisions of the transaction as the other rules would have written them: what is dropped."""
    rows = [row for row in at.loose if row.subject is Subject.TRAJECTORY]
    for group in other:
        for row in group.recorded.rows:
            why = fate_of_row(group, row.decision)
            if why:
                rows.append(replace(row.decision, decision=Decision.DROPPED, reason=why))
    return rows


def _with_references(scores: Mapping[str, ScoreRow], stored: Mapping[str, ScoreRow]) -> dict[str, ScoreRow]:
    """Other weights, the stored reference."""
    references = {name: row.reference for name, row in stored.items()}
    return {name: replace(row, reference=references.get(name)) for name, row in scores.items()}


def _same_rows(a: Batch, b: Batch) -> bool:
    """The maths would see no difference."""

    def seen(batch: Batch) -> list[tuple[object, ...]]:
        return [
            (row.trajectory.trajectory_id, row.trajectory.reward, row.advantage, row.weight, row.policy_lag)
            for row in batch.rows
        ]

    return seen(a) == seen(b)


def _same_maths(segment: Segment) -> bool:
    own, other = segment.own, segment.other
    return replace(own.learner, max_lag=0) == replace(other.learner, max_lag=0)
