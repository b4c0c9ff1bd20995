"""Ratios, corrections and their statistics at the start of a step, from stored log-probabilities alone.

The current policy of a step's first forward pass is its proximal policy, whose log-probabilities are in `scores`. Cuts
rows as the trainer cuts them and calls the trainer's own functions, so that every sum is made in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from consumers.objective.aggregation import Denominators
from consumers.objective.corrections import correct, mismatch_ratios
from consumers.objective.guards import worst_fresh_token
from consumers.objective.inputs import LossInputs
from consumers.objective.loss import policy_loss, step_denominators
from consumers.objective.options import CorrectionKind, Objective
from consumers.objective.settings import ObjectiveSettings
from consumers.objective.statistics import PEAKS, SUMS, Tally, percentiles
from consumers.offline.reanalyse.judge import ReanalysisRules
from consumers.offline.reanalyse.known import never_known
from consumers.trainer.batch import BatchRow
from consumers.trainer.learner_metrics import row_metrics, update_metrics
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.ranks import deal
from consumers.trainer.step_record import StepRecord
from consumers.trainer.tensors import RowTensors, pack, row_data, row_tokens, split_by_budget, split_minibatches
from schemas.scores_codec import ScoreRow

COMPARED = (
    CorrectionKind.TOKEN_TIS,
    CorrectionKind.SEQUENCE_TIS,
    CorrectionKind.ICEPOP,
    CorrectionKind.MIS,
    CorrectionKind.GEOMETRIC,
)
"""corrections that are tried on every step, with the cap and the band of the settings"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """Of one step's rows, as far as their log-probabilities are stored."""

    metrics: Mapping[str, float]
    """under the names that are logged"""
    applied: Mapping[str, float]
    """percentiles of what the loss multiplies by: the ratio after its clip, the weight of the correction"""
    corrections: Mapping[str, Mapping[str, float]]
    """correction -> what it would remove and leave"""
    tally: Tally
    log_ratio_N: Tensor
    mismatch_log_ratio_N: Tensor
    rows: int
    rows_without_scores: int
    rows_without_reference: int
    """where the divergence is asked for"""


def step_statistics(
    rows: Sequence[BatchRow], scores: Mapping[str, ScoreRow], rules: ReanalysisRules, *, training_step: int
) -> StepStatistics:
    """Statistics of the first optimizer step of a training step over these rows.

    Args: training_step: how many the learner had made, which deals rows to minibatches. Raises ObjectiveError for
    numbers the trainer would have refused."""
    kept = [row for row in rows if _usable(row, scores)]
    settings = rules.learner
    references = [scores[row.trajectory.trajectory_id].reference for row in kept]
    has_reference = bool(kept) and all(reference is not None for reference in references)
    record = StepRecord(rows=[row_data(row) for row in kept])
    for index, row in enumerate(kept):
        score = scores[row.trajectory.trajectory_id]
        record.proximal[index] = score.proximal
        if has_reference and score.reference is not None:
            record.reference[index] = score.reference
    objective = _computable(settings.objective, has_reference=has_reference)
    chosen = _first_minibatch(len(kept), settings, training_step)
    tally = _tally(record, chosen, settings, objective, rules.ranks)
    record.tally = record.last_tally = tally
    metrics: dict[str, float] = dict(row_metrics(rows))
    joined = [torch.cat(v) if v else torch.zeros(0) for v in (record.log_ratios, record.mismatch_log_ratios)]
    if kept:
        shown = replace(settings, objective=objective)
        metrics |= update_metrics(record, shown, rules.fingerprint, rows)
    metrics = {name: value for name, value in metrics.items() if not never_known(name)}
    return StepStatistics(
        metrics=metrics,
        applied=_applied(joined[0], objective),
        corrections=_corrections(record, chosen, settings),
        tally=tally,
        log_ratio_N=joined[0],
        mismatch_log_ratio_N=joined[1],
        rows=len(rows),
        rows_without_scores=len(rows) - len(kept),
        rows_without_reference=sum(r is None for r in references) if settings.objective.kl_coefficient > 0 else 0,
    )


def no_tally() -> Tally:
    """Of nothing."""
    return Tally(
        sums_K=torch.zeros(len(SUMS), dtype=torch.float64),
        peaks_K=torch.full((len(PEAKS),), -torch.inf, dtype=torch.float64),
    )


def _usable(row: BatchRow, scores: Mapping[str, ScoreRow]) -> bool:
    score = scores.get(row.trajectory.trajectory_id)
    return score is not None and len(score.proximal) == len(row.trajectory.token_ids)


def _computable(objective: ObjectiveSettings, *, has_reference: bool) -> ObjectiveSettings:
    """Without what is not stored: entropies, and the reference where the run had none."""
    objective = replace(objective, entropy_coefficient=0.0)
    return objective if has_reference else replace(objective, kl_coefficient=0.0)


def _first_minibatch(count: int, settings: LearnerSettings, training_step: int) -> Sequence[int]:
    if not count:
        return ()
    dealt = split_minibatches(count, settings.minibatches, seed=settings.seed, step=training_step, epoch=0)
    return dealt[0]


def _passes(record: StepRecord, chosen: Sequence[int], settings: LearnerSettings, ranks: int) -> list[list[RowTensors]]:
    """Rank -> its forward passes, cut as the learner cuts them."""
    lengths = [row_tokens(record.rows[row]) for row in chosen]
    passes = []
    for places in deal(lengths, ranks):
        parts = split_by_budget([lengths[p] for p in places], settings.micro_batch_tokens)
        passes.append(
            [
                pack(record.rows, [chosen[places[p]] for p in part], "cpu", mask_truncated=settings.mask_truncated)
                for part in parts
            ]
        )
    return passes


@torch.no_grad()
def _tally(
    record: StepRecord, chosen: Sequence[int], settings: LearnerSettings, objective: ObjectiveSettings, ranks: int
) -> Tally:
    if not chosen:
        return no_tally()
    passes = _passes(record, chosen, settings, ranks)
    counts = Denominators(tokens=0, rows=0, kept_tokens=0)
    for tensors in (part for own in passes for part in own):
        counts = counts + step_denominators(
            record.proximal_of(tensors), tensors.behaviour_BT, tensors.mask_BT, objective
        )
    total: Tally | None = None
    for own in passes:
        tally = no_tally()
        for tensors in own:
            inputs = _inputs(record, tensors)
            outputs = policy_loss(inputs, objective, counts)
            tally = tally + outputs.tally
            record.add_ratios(outputs.log_ratio_N, outputs.mismatch_log_ratio_N, worst_fresh_token(inputs))
        total = tally if total is None else total + tally
    assert total is not None
    return total


def _inputs(record: StepRecord, tensors: RowTensors) -> LossInputs:
    proximal_BT = record.proximal_of(tensors)
    return LossInputs(
        theta_BT=proximal_BT,
        proximal_BT=proximal_BT,
        behaviour_BT=tensors.behaviour_BT,
        mask_BT=tensors.mask_BT,
        advantages=tensors.advantages_B,
        row_weights_B=tensors.weights_B,
        policy_lag_B=tensors.lags_B,
        reference_BT=record.reference_of(tensors) if record.reference else None,
        row_ids=tensors.row_ids,
    )


# ---------------------------------------------------------------------- what the loss multiplies by


def _applied(log_ratio_N: Tensor, objective: ObjectiveSettings) -> dict[str, float]:
    """The ratio as the objective takes it: inside its clip, or under its cap."""
    if objective.objective is Objective.REINFORCE:
        return {}
    ratio_N = log_ratio_N.clamp(-20, 20).exp()
    if objective.objective is Objective.CISPO:
        ratio_N = ratio_N.clamp(objective.cispo_floor, objective.cispo_cap)
    else:
        ratio_N = ratio_N.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return {f"ratio_applied_{name}": value for name, value in percentiles(ratio_N).items()}


@torch.no_grad()
def _corrections(record: StepRecord, chosen: Sequence[int], settings: LearnerSettings) -> dict[str, dict[str, float]]:
    """What each correction would reject and cap, and what it would leave of the sample."""
    objective = settings.objective
    kinds = [*COMPARED, *([objective.correction] if objective.correction not in COMPARED else [])]
    sums = {kind: torch.zeros(5, dtype=torch.float64) for kind in kinds if kind is not CorrectionKind.NONE}
    weights: dict[CorrectionKind, list[Tensor]] = {kind: [] for kind in sums}
    for tensors in (part for own in _passes(record, chosen, settings, 1) for part in own):
        mismatch = mismatch_ratios(record.proximal_of(tensors), tensors.behaviour_BT, tensors.mask_BT)
        for kind, total in sums.items():
            found = correct(
                mismatch, tensors.mask_BT, kind,
                cap=objective.correction_cap, band_low=objective.band_low, band_high=objective.band_high,
            )  # fmt: skip
            kept_N = found.weight_BT[found.keep_BT]
            weight_N = kept_N.double()
            total += torch.tensor(
                [
                    tensors.mask_BT.sum(), found.keep_BT.sum(), found.capped_BT.sum(), weight_N.sum(),
                    weight_N.square().sum(),
                ],
                dtype=torch.float64,
            )  # fmt: skip
            weights[kind].append(kept_N)
    return {
        kind.value: _left(*total.tolist()) | _weight_percentiles(weights[kind])
        for kind, total in sums.items()
        if total[0] > 0
    }


def _left(tokens: float, kept: float, capped: float, total: float, squared: float) -> dict[str, float]:
    found = {"rejected_fraction": (tokens - kept) / tokens, "capped_fraction": capped / tokens}
    if kept > 0 and squared > 0:
        found |= {"applied_mean": total / kept, "applied_ess": total**2 / (kept * squared)}
    return found


def _weight_percentiles(parts: Sequence[Tensor]) -> dict[str, float]:
    joined = torch.cat(list(parts)) if parts else torch.zeros(0)
    return {f"applied_{name}": value for name, value in percentiles(joined).items()}
