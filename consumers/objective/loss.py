"""The one composition: from the tensors of a micro-batch to its share of the loss.

    check -> clip ratio -> objective -> correction and age -> divergence, entropy -> sum

Guarantees that shares add up to the loss of the whole step (aggregation.py) and that statistics do
too (statistics.py). Call check_step (guards.py) on the sum of the tallies before the optimizer
step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.objective.aggregation import (
    Denominators,
    aggregate,
    count_denominators,
    counted_tokens,
)
from consumers.objective.corrections import Correction, Mismatch, correct, mismatch_ratios
from consumers.objective.inputs import LossInputs, check_inputs
from consumers.objective.kl import KlTerms, kl_terms
from consumers.objective.objectives import cispo_loss, ppo_clip_loss, reinforce_loss
from consumers.objective.options import KlPlacement, Objective, RatioDenominator, RatioLevel
from consumers.objective.ratios import Ratio, importance_ratio
from consumers.objective.settings import ObjectiveSettings
from consumers.objective.shapes import pick, spread_rows
from consumers.objective.statistics import Parts, Tally, tally_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    """One micro-batch's share. Add losses (backward does) and tallies; join the value lists."""

    loss: Tensor
    """scalar with a graph, also when nothing counts"""
    tally: Tally
    """statistics as sums, see statistics.py; its loss is not multiplied by averaging_ranks"""
    log_ratio_N: Tensor
    """detached log of the clip ratio at the counted tokens, for percentiles"""
    mismatch_log_ratio_N: Tensor
    """detached log prox/beh at the counted tokens, for percentiles"""


def step_denominators(
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    mask_BT: Tensor,
    settings: ObjectiveSettings,
    *,
    averaging_ranks: int = 1,
) -> Denominators:
    """What the rows of one optimizer step divide by; parts of the step are added with `+`.

    Rows may be given all at once or in parts, in any padding. The proximal log-probabilities decide
    which tokens are rejected, so they are needed before the first backward pass.

    proximal_BT, behaviour_BT: float [B,T], constant. mask_BT: bool [B,T]. Returns Denominators.
    Raises ShapeError.
    """
    correction = _correction(proximal_BT, behaviour_BT, mask_BT, settings)[1]
    return count_denominators(
        mask_BT,
        correction.keep_BT,
        settings.denominator_after_rejection,
        averaging_ranks=averaging_ranks,
    )


def policy_loss(inputs: LossInputs, settings: ObjectiveSettings, denominators: Denominators) -> LossOutputs:
    """This micro-batch's share of the loss of one optimizer step.

        l'[i,t] = where(keep, l * sg(w) * u_i + beta * k - c_H * entropy, 0)
        loss    = aggregate(l', denominators of the whole optimizer step)

    l from objectives.py, w and keep from corrections.py, k from kl.py. The divergence has the mask
    and the denominators of the policy term, but neither w nor u.

    Returns LossOutputs. Raises ShapeError, NonFinite, and what the parts raise.

    Source: docs/objectives.md, with a section for each part. Departure: rejected tokens leave by
    selection and not by a zero weight.
    """
    check_inputs(inputs, settings)
    mask_BT, dtype = inputs.mask_BT, inputs.theta_BT.dtype
    over_proximal = settings.denominator is RatioDenominator.PROXIMAL
    denominator_BT = inputs.proximal_BT if over_proximal else inputs.behaviour_BT
    ratio = importance_ratio(inputs.theta_BT, denominator_BT, mask_BT, settings.level)
    mismatch, correction = _correction(inputs.proximal_BT, inputs.behaviour_BT, mask_BT, settings)
    kl = None
    if inputs.reference_BT is not None:
        kl = kl_terms(inputs.theta_BT, inputs.reference_BT, mask_BT)

    row_weights_BT = spread_rows("row_weights", inputs.row_weights_B, mask_BT, dtype)
    policy_BT = _objective(inputs, ratio, settings) * correction.weight_BT * row_weights_BT
    loss_BT = torch.where(correction.keep_BT, policy_BT + _penalty(inputs, kl, settings), 0.0)
    counted_BT = counted_tokens(mask_BT, correction.keep_BT, settings.denominator_after_rejection)
    loss = aggregate(
        loss_BT,
        counted_BT,
        settings.aggregation,
        denominators,
        constant_length=settings.constant_length,
    )
    parts = Parts(
        loss=loss.detach() / denominators.averaging_ranks,
        counted_BT=counted_BT,
        ratio=ratio,
        mismatch=mismatch,
        correction=correction,
        kl=kl,
    )
    return LossOutputs(
        loss=loss,
        tally=tally_of(inputs, settings, parts),
        log_ratio_N=ratio.log_ratio_BT[mask_BT],
        mismatch_log_ratio_N=mismatch.log_ratio_BT[mask_BT],
    )


def _correction(
    proximal_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, settings: ObjectiveSettings
) -> tuple[Mismatch, Correction]:
    mismatch = mismatch_ratios(proximal_BT, behaviour_BT, mask_BT)
    correction = correct(
        mismatch,
        mask_BT,
        settings.correction,
        cap=settings.correction_cap,
        band_low=settings.band_low,
        band_high=settings.band_high,
    )
    return mismatch, correction


def _objective(inputs: LossInputs, ratio: Ratio, settings: ObjectiveSettings) -> Tensor:
    if settings.objective is Objective.REINFORCE:
        return reinforce_loss(inputs.theta_BT, inputs.advantages, inputs.mask_BT)
    if settings.objective is Objective.CISPO:
        return cispo_loss(
            inputs.theta_BT,
            ratio.ratio_BT,
            inputs.advantages,
            inputs.mask_BT,
            cap=settings.cispo_cap,
            floor=settings.cispo_floor,
        )
    return ppo_clip_loss(
        ratio.ratio_BT,
        inputs.advantages,
        inputs.mask_BT,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        two_sided_delta=settings.two_sided_delta,
    )


def _penalty(inputs: LossInputs, kl: KlTerms | None, settings: ObjectiveSettings) -> Tensor:
    """beta * k - c_H * entropy, [B,T], 0 outside the mask."""
    penalty_BT = torch.zeros_like(inputs.theta_BT)
    in_loss = settings.kl_coefficient > 0 and settings.kl_placement is KlPlacement.LOSS
    if in_loss and kl is not None:
        kl_BT = kl.of(settings.kl_estimator)
        if settings.kl_importance_weighted:
            # Always per token and over behaviour, whatever the clip ratio is: only that ratio makes
            # the expectation over the sampled tokens one under the current policy.
            fresh = importance_ratio(inputs.theta_BT.detach(), inputs.behaviour_BT, inputs.mask_BT, RatioLevel.TOKEN)
            kl_BT = kl_BT * fresh.ratio_BT
        penalty_BT = penalty_BT + settings.kl_coefficient * kl_BT
    if settings.entropy_coefficient > 0 and inputs.entropy_BT is not None:
        entropy_BT = pick(inputs.entropy_BT, inputs.mask_BT)
        penalty_BT = penalty_BT - settings.entropy_coefficient * entropy_BT
    return penalty_BT
