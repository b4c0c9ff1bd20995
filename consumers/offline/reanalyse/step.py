"""One training step put together again from judged groups: the batch that these rules make of what was recorded.

The trainer's own StepMaker puts it together. A replayed group keeps the advantages of its first use under these rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from consumers.objective.kl import kl_in_reward
from consumers.offline.reanalyse.judge import Fate, JudgedGroup, ReanalysisRules, place
from consumers.offline.reanalyse.rewards import RewardsAnew
from consumers.offline.reanalyse.stream import RecordedTransaction
from consumers.offline.trained_steps import StepRow
from consumers.trainer.admission import Admission, judge
from consumers.trainer.batch import BatchRow
from consumers.trainer.replay import ReplayedGroup, ReplayedRow
from consumers.trainer.selection import ReadyGroup
from consumers.trainer.step import Penalties, StepMaker
from schemas.ledger import Position
from schemas.scores_codec import ScoreRow
from schemas.trajectory import DecodedRow, Trajectory


class _NoTime:
    """Nothing here takes time that anybody asks about."""

    def now_us(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step would have been trained on."""

    rows: tuple[BatchRow, ...]
    groups: tuple[ReadyGroup, ...]
    """used for the first time"""
    replays_dropped: Mapping[str, str]
    """trajectory id of a recorded replay that these rules do not make -> why"""
    unscored_penalties: int = 0
    """members whose divergence in the reward is not known: nothing was taken off"""


@dataclass(slots=True)
class FirstUses:
    """Groups that a replay may use again, as these rules trained them first. Bounded by the replay window."""

    advantages: dict[str, dict[int, float]] = field(default_factory=dict)
    """group -> index -> advantage"""
    fallen: dict[str, str] = field(default_factory=dict)
    """group -> why these rules did not train it"""

    def forget(self, position: Position) -> None:
        """What no replay can use any more."""
        kept = {group.group_id for group in position.replay}
        self.advantages = {group: found for group, found in self.advantages.items() if group in kept}
        self.fallen = {group: why for group, why in self.fallen.items() if group in kept}


def batch_of(
    at: RecordedTransaction,
    judged: Sequence[JudgedGroup],
    rules: ReanalysisRules,
    first_uses: FirstUses,
    rewards: RewardsAnew | None = None,
) -> Batch:
    """The recorded step under these rules: its groups that they keep, in the recorded order, then its replays."""
    taken = [group for group in judged if group.recorded.was_trained]
    ready = [group.ready for group in taken if group.ready is not None]
    replayed, dropped = _replays(at, rules, first_uses, rewards)
    unscored = [0]
    maker = StepMaker(
        clock=_NoTime(),
        advantages=rules.advantages,
        age_weights=rules.age_weights,
        penalties=_penalties(at.scores, rules, unscored) if rules.learner.kl_in_reward else None,
    )
    depth = at.fold.versions[at.base].depth
    prepared = maker.prepare(ready, replayed, version_in=at.base, depth_in=depth)
    for group in taken:
        if group.fate is Fate.TRAINED:
            first_uses.advantages[group.recorded.group_id] = prepared.advantages[group.recorded.group_id]
        elif group.fate is not Fate.CARRIED_OVER:
            first_uses.fallen[group.recorded.group_id] = group.reason
    return Batch(rows=prepared.batch.rows, groups=tuple(ready), replays_dropped=dropped, unscored_penalties=unscored[0])


def with_recorded_advantages(batch: Batch, at: RecordedTransaction) -> Batch:
    """The same with the ledger's advantages, where they cannot be computed again to the last bit."""
    by_id = {
        row.decision.trajectory_id: row.decision.advantage
        for group in at.groups
        for row in group.rows
        if row.decision.advantage is not None
    }
    rows = tuple(
        row if row.use_count > 1 else replace(row, advantage=by_id.get(row.trajectory.trajectory_id, row.advantage))
        for row in batch.rows
    )
    return replace(batch, rows=rows)


def _replays(
    at: RecordedTransaction, rules: ReanalysisRules, first_uses: FirstUses, rewards: RewardsAnew | None
) -> tuple[list[ReplayedGroup], dict[str, str]]:
    by_group: dict[str, list[StepRow]] = {}
    for row in at.replayed:
        by_group.setdefault(str(row.decision.group_id), []).append(row)
    made: list[ReplayedGroup] = []
    dropped: dict[str, str] = {}
    for group_id, rows in by_group.items():
        why = first_uses.fallen.get(group_id, "")
        found: list[ReplayedRow] = []
        for row in rows if not why else ():
            one, why = _replayed_row(at, row, rules, first_uses.advantages.get(group_id, {}), rewards)
            if one is None:
                break
            found.append(one)
        if len(found) == len(rows):
            made.append(ReplayedGroup(group_id=group_id, use_count=rows[0].decision.use_count, rows=tuple(found)))
        else:
            dropped |= {str(row.decision.trajectory_id): why for row in rows}
    return made, dropped


def _replayed_row(
    at: RecordedTransaction,
    row: StepRow,
    rules: ReanalysisRules,
    advantages: Mapping[int, float],
    rewards: RewardsAnew | None,
) -> tuple[ReplayedRow | None, str]:
    decoded, trajectory = row.row, row.trajectory
    if decoded is None or trajectory is None:
        return None, "its row is not in the log"
    verdict = judge(trajectory, at.fold, at.base, rules.selection.admission)
    if verdict.admission is not Admission.ADMIT or verdict.policy_lag is None:
        return None, verdict.reason.value or verdict.admission.value
    partition, offset, _ = place(row.decision)
    recorded = 0.0 if row.decision.advantage is None else row.decision.advantage
    return (
        ReplayedRow(
            key=(partition, offset),
            row=_rewarded(decoded, trajectory, rewards),
            advantage=advantages.get(trajectory.index_in_group, recorded),
            policy_lag=verdict.policy_lag,
        ),
        "",
    )


def _rewarded(row: DecodedRow, trajectory: Trajectory, rewards: RewardsAnew | None) -> DecodedRow:
    if rewards is None:
        return row
    return replace(row, trajectory=replace(trajectory, reward=rewards.known(trajectory)))


def _penalties(scores: Mapping[str, ScoreRow], rules: ReanalysisRules, unscored: list[int]) -> Penalties:
    """The divergence in the reward, from stored scores; `unscored[0]` counts rows that have none."""
    learner = rules.learner

    def of(rows: Sequence[Trajectory]) -> list[float]:
        found = []
        for row in rows:
            score = scores.get(row.trajectory_id)
            if score is None or score.reference is None:
                unscored[0] += 1
                found.append(0.0)
                continue
            cut = learner.mask_truncated and row.finish_reason == "length"
            mask = np.zeros_like(row.loss_mask) if cut else row.loss_mask
            proximal_BT, reference_BT, mask_BT = (
                torch.from_numpy(values.copy())[None] for values in (score.proximal, score.reference, mask)
            )
            beta = learner.objective.kl_coefficient
            found.append(float(kl_in_reward(proximal_BT, reference_BT, mask_BT, coefficient=beta)[0]))
        return found

    return of
