"""One training step as values: from ready groups to a batch, from the outcome to StepCompleted. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from consumers.trainer.batch import BatchRow, Learner, StepOutcome, TrainBatch
from consumers.trainer.replay import ReplayedGroup
from consumers.trainer.selection import ReadyGroup
from consumers.trainer.step_metrics import batch_metrics, drop_metrics
from consumers.trainer.transactions import GroupScores
from infra.ports import Clock
from schemas.ids import RunId
from schemas.ledger import DecisionRow, Position, StepCompleted
from schemas.trajectory import Trajectory

Advantages = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]
"""rewards of each group's usable members -> advantages in the same shape"""
Penalties = Callable[[Sequence[Trajectory]], Sequence[float]]
"""trajectories -> what is added to each one's reward before its group is normalised: Learner.reward_penalties"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A batch, and by group the advantage and weight of each trained member (by index in group)."""

    batch: TrainBatch
    groups: tuple[ReadyGroup, ...]
    replayed: tuple[ReplayedGroup, ...]
    advantages: Mapping[str, dict[int, float]]
    weights: Mapping[str, dict[int, float]]
    penalties: tuple[float, ...] = ()
    """added to the rewards of the groups' usable members; empty when the divergence in the reward is off"""
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

    def __init__(
        self, *, clock: Clock, advantages: Advantages, age_weights: AgeWeights, penalties: Penalties | None = None
    ) -> None:
        """`penalties`: None where the rewards are taken as they are."""
        self._clock = clock
        self._advantages = advantages
        self._age_weights = age_weights
        self._penalties = penalties
        self._last_end_s = clock.monotonic_s()
        self._train_s = 0.0
        self._waited_s = 0.0
        self._resting_since_s: float | None = None

    @property
    def age_weights(self) -> AgeWeights:
        """How a row's weight follows from its lag."""
        return self._age_weights

    def rest(self) -> None:
        """There is nothing to do: the service waits from now on, for groups or for its own publication."""
        self._resting_since_s = self._clock.monotonic_s()

    def resume(self) -> None:
        """It looks again."""
        if self._resting_since_s is not None:
            self._waited_s += self._clock.monotonic_s() - self._resting_since_s
            self._resting_since_s = None

    def prepare(
        self,
        groups: Sequence[ReadyGroup],
        replayed: Sequence[ReplayedGroup] = (),
        *,
        version_in: int,
        depth_in: int,
    ) -> PreparedStep:
        """Rows in order of the groups, then index in group, replayed groups last.

        Advantages are taken over every usable member of a group; a replayed row keeps that of its first use. With
        penalties they are taken over penalised rewards; the reward itself stays what it was."""
        started_s = self._clock.monotonic_s()
        penalties = self._penalties_of(groups)
        per_group = self._advantages(_penalised([group.baseline_rewards() for group in groups], penalties))
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
            penalties=penalties,
            batch_s=self._clock.monotonic_s() - started_s,
        )

    def _penalties_of(self, groups: Sequence[ReadyGroup]) -> tuple[float, ...]:
        if self._penalties is None:
            return ()
        usable = [m.held.trajectory for g in groups for m in g.members if m.held.trajectory.reward is not None]
        return tuple(self._penalties(usable))

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
        checkpoint_phase_s: Mapping[str, float] | None = None,
        behind_s: float | None = None,
    ) -> StepCompleted:
        """The record of this step. Non-finite metrics are named, never written as numbers.

        Args: publish_s: seconds that publishing held the compute up; checkpoint_phase_s: parts of the last save that
        was over, the publication before's where it runs behind the compute; behind_s: seconds that the publication
        before ran behind it, None where it did not."""
        now_s = self._clock.monotonic_s()
        now_us = self._clock.now_us()
        whole_s, self._last_end_s = now_s - self._last_end_s, now_s
        waited_s, self._waited_s = self._waited_s, 0.0
        measured = batch_metrics(
            prepared.batch.rows,
            prepared.groups,
            prepared.penalties,
            version_in=prepared.batch.version_in,
            depth_in=prepared.batch.depth_in,
            now_us=now_us,
        )
        metrics = {**outcome.metrics, **measured, **drop_metrics(decisions)}
        metrics["skipped_step"] = float(outcome.skipped)
        metrics["trainer/idle_fraction"] = min(1.0, waited_s / whole_s) if whole_s > 0 else 0.0
        if behind_s is not None:
            metrics["trainer/publication_behind_seconds"] = behind_s
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
                **{f"checkpoint_{name}": seconds for name, seconds in (checkpoint_phase_s or {}).items()},
                "waiting": waited_s,
                "whole": whole_s,
            },
            rng_digest=outcome.rng_digest,
            config_digest=config_digest,
            code_revision=code_revision,
        )


def _penalised(rewards: Sequence[Sequence[float]], penalties: Sequence[float]) -> list[list[float]]:
    """The rewards with what is added to each; `penalties` is flat, in the same order, or empty."""
    if not penalties:
        return [list(group) for group in rewards]
    left = iter(penalties)
    return [[reward + next(left) for reward in group] for group in rewards]
