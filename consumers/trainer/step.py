"""One training step as values: from ready groups to a batch, from the outcome to StepCompleted. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from consumers.trainer.batch import BatchRow, Learner, StepOutcome, TrainBatch
from consumers.trainer.replay import ReplayedGroup
from consumers.trainer.selection import ReadyGroup, is_zero_variance
from consumers.trainer.transactions import GroupScores
from infra.ports import Clock
from schemas.ids import RunId
from schemas.ledger import Decision, DecisionRow, Position, StepCompleted, Subject

Advantages = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]
"""rewards of each group's usable members -> advantages in the same shape"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A batch, and by group the advantage and weight of each trained member (by index in group)."""

    batch: TrainBatch
    groups: tuple[ReadyGroup, ...]
    replayed: tuple[ReplayedGroup, ...]
    advantages: Mapping[str, dict[int, float]]
    weights: Mapping[str, dict[int, float]]
    batch_s: float
    """seconds it took to put together"""

    def scores_by_group(self, outcome: StepOutcome) -> list[GroupScores]:
        """The outcome's scores, one record a group."""
        by_id = {scores.trajectory_id: scores for scores in outcome.scores}
        found: list[GroupScores] = []
        for group in self.groups:
            ids = [m.held.row.trajectory_id for m in group.members if m.trained]
            rows = [by_id[trajectory_id] for trajectory_id in ids if trajectory_id in by_id]
            if rows:
                found.append((group.buffer.group.group_id, rows))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeWeights:
    """Row weight from age: 1 up to max_lag, then decay ** (lag - max_lag) (stale.action = down_weight)."""

    max_lag: int
    decay: float = 1.0

    def weight(self, policy_lag: int) -> float:
        """u of the objective."""
        return float(self.decay ** max(0, policy_lag - self.max_lag))


class StepMaker:
    """Builds batches and step records; knows how advantages are computed, not by what."""

    def __init__(self, *, clock: Clock, advantages: Advantages, age_weights: AgeWeights) -> None:
        self._clock = clock
        self._advantages = advantages
        self._age_weights = age_weights
        self._last_end_s = clock.monotonic_s()
        self._train_s = 0.0

    @property
    def age_weights(self) -> AgeWeights:
        """How a row's weight follows from its lag."""
        return self._age_weights

    def prepare(
        self,
        groups: Sequence[ReadyGroup],
        replayed: Sequence[ReplayedGroup] = (),
        *,
        version_in: int,
        depth_in: int,
    ) -> PreparedStep:
        """Rows in order of the groups, then index in group, replayed groups last.

        Advantages are taken over every usable member of a group; a replayed row keeps that of its first use."""
        started_s = self._clock.monotonic_s()
        per_group = self._advantages([group.baseline_rewards() for group in groups])
        rows: list[BatchRow] = []
        advantages: dict[str, dict[int, float]] = {}
        weights: dict[str, dict[int, float]] = {}
        for group, values in zip(groups, per_group, strict=True):
            usable = [m for m in group.members if m.held.trajectory.reward is not None]
            group_id = group.buffer.group.group_id
            advantages[group_id], weights[group_id] = {}, {}
            for member, advantage in zip(usable, values, strict=True):
                if not member.trained:
                    continue
                lag = member.verdict.policy_lag
                assert lag is not None
                index = member.held.trajectory.index_in_group
                advantages[group_id][index] = advantage
                weights[group_id][index] = self._age_weights.weight(lag)
                rows.append(
                    BatchRow(
                        trajectory=member.held.trajectory,
                        row_sha256=member.held.row.row_sha256,
                        advantage=advantage,
                        weight=weights[group_id][index],
                        policy_lag=lag,
                        use_count=1,
                    )
                )
        rows.extend(
            BatchRow(
                trajectory=row.trajectory,
                row_sha256=row.row.row_sha256,
                advantage=row.advantage,
                weight=self._age_weights.weight(row.policy_lag),
                policy_lag=row.policy_lag,
                use_count=group.use_count,
            )
            for group in replayed
            for row in group.rows
        )
        return PreparedStep(
            batch=TrainBatch(rows=tuple(rows), version_in=version_in, depth_in=depth_in),
            groups=tuple(groups),
            replayed=tuple(replayed),
            advantages=advantages,
            weights=weights,
            batch_s=self._clock.monotonic_s() - started_s,
        )

    def train(self, learner: Learner, prepared: PreparedStep) -> StepOutcome:
        """The learner's step, timed."""
        started_s = self._clock.monotonic_s()
        outcome = learner.train(prepared.batch)
        self._train_s = self._clock.monotonic_s() - started_s
        return outcome

    def completed(
        self,
        prepared: PreparedStep,
        outcome: StepOutcome,
        decisions: Sequence[DecisionRow],
        *,
        run: RunId,
        position: Position,
        policy_read_up_to: int,
        config_digest: str,
        code_revision: str,
        publish_s: float,
    ) -> StepCompleted:
        """The record of this step. Non-finite metrics are named, never written as numbers."""
        now_s = self._clock.monotonic_s()
        now_us = self._clock.now_us()
        whole_s, self._last_end_s = now_s - self._last_end_s, now_s
        metrics = {**outcome.metrics, **batch_metrics(prepared, now_us), **drop_metrics(decisions)}
        metrics["skipped_step"] = float(outcome.skipped)
        busy_s = prepared.batch_s + self._train_s + publish_s
        metrics["trainer/idle_fraction"] = max(0.0, 1.0 - busy_s / whole_s) if whole_s > 0 else 0.0
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        return StepCompleted(
            run=run,
            at_us=now_us,
            position=position,
            policy_read_up_to=policy_read_up_to,
            version_in=prepared.batch.version_in,
            version_out=prepared.batch.version_in + 1,
            groups=len(prepared.groups),
            trajectories=len(prepared.batch.rows),
            batch_digest=prepared.batch.digest,
            metrics=finite,
            metrics_nonfinite=tuple(sorted(metrics.keys() - finite.keys())),
            phase_s={
                **{f"learner_{name}": seconds for name, seconds in outcome.phase_s.items()},
                "batch": prepared.batch_s,
                "train": self._train_s,
                "checkpoint": publish_s,
                "whole": whole_s,
            },
            rng_digest=outcome.rng_digest,
            config_digest=config_digest,
            code_revision=code_revision,
        )


def batch_metrics(prepared: PreparedStep, now_us: int) -> dict[str, float]:
    """Lag, age, reward and group statistics of one batch; names are in the metric registry."""
    rows = prepared.batch.rows
    metrics: dict[str, float] = {}
    lags = [row.policy_lag for row in rows]
    if lags:
        metrics["policy_lag/mean"] = sum(lags) / len(lags)
        metrics["policy_lag/max"] = float(max(lags))
        for lag, count in sorted(Counter(lags).items()):
            metrics[f"policy_lag/count_{lag}"] = float(count)
        ages = sorted((now_us - row.trajectory.finished_at_us) / 1e6 for row in rows)
        metrics["age_seconds/mean"] = sum(ages) / len(ages)
        metrics["age_seconds/max"] = ages[-1]
        from_issue = [(now_us - row.trajectory.requested_at_us) / 1e6 for row in rows]
        metrics["age_seconds/from_issue_mean"] = sum(from_issue) / len(from_issue)
        metrics["replay/rows"] = float(sum(row.use_count > 1 for row in rows))
        lengths = [len(row.trajectory.token_ids) for row in rows]
        metrics["response_length/mean"] = sum(lengths) / len(lengths)
        metrics["response_length/max"] = float(max(lengths))
        truncated = sum(row.trajectory.finish_reason == "length" for row in rows)
        metrics["response_length/clip_ratio"] = truncated / len(rows)
        for version, count in sorted(Counter(s.version for row in rows for s in row.trajectory.segments).items()):
            metrics[f"samples_per_version/back_{prepared.batch.version_in - version}"] = float(count)
    rewards = [group.baseline_rewards() for group in prepared.groups]
    flat = [reward for group in rewards for reward in group]
    if flat:
        metrics["critic/rewards/mean"] = sum(flat) / len(flat)
        metrics["critic/rewards/max"] = max(flat)
        metrics["critic/rewards/min"] = min(flat)
        metrics["group/zero_variance"] = sum(is_zero_variance(group) for group in rewards) / len(rewards)
        metrics["group/all_right"] = sum(min(group) >= 1.0 for group in rewards) / len(rewards)
        metrics["group/all_wrong"] = sum(max(group) <= 0.0 for group in rewards) / len(rewards)
    for task in sorted({row.trajectory.task for row in rows}):
        values = [row.trajectory.reward for row in rows if row.trajectory.task == task]
        usable = [value for value in values if value is not None]
        metrics[f"reward_by_task/{task}"] = sum(usable) / len(usable)
    return metrics


def drop_metrics(decisions: Sequence[DecisionRow]) -> dict[str, float]:
    """Trajectories dropped in this transaction, by reason."""
    reasons = Counter(
        row.reason for row in decisions if row.subject is Subject.TRAJECTORY and row.decision is Decision.DROPPED
    )
    return {f"dropped/{reason}": float(count) for reason, count in sorted(reasons.items())}
