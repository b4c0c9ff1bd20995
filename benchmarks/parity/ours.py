"""This project's side: consumers.objective driven the way the trainer drives it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.parity.batches import Batch
from benchmarks.parity.comparison import Outcome, Side
from consumers.objective import (
    AdvantageEstimator,
    LossInputs,
    ObjectiveSettings,
    RatioLevel,
    aggregate,
    group_advantages,
    importance_ratio,
    kl_in_reward,
    kl_terms,
    policy_loss,
    step_denominators,
)
from consumers.objective.advantages import EPSILON, ZERO_VARIANCE_TOLERANCE
from consumers.objective.options import StdKind


def loss_and_gradient(batch: Batch, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Outcome:
    """Loss and its gradient by all log-probabilities and entropies, from theta and entropy as leaves."""
    theta_BT = batch.theta_BT.clone().requires_grad_()
    entropy_BT = batch.entropy_BT.clone().requires_grad_()
    loss = loss_of(theta_BT, entropy_BT)
    loss.backward()
    parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (theta_BT, entropy_BT)]
    return Outcome(value=loss.detach(), gradient=torch.cat(parts))


def loss(settings: ObjectiveSettings, *, micro_rows: int | None = None, ranks: int = 1, bypass: bool = False) -> Side:
    """policy_loss over the denominators of the whole step, in micro-batches of micro_rows rows.

    ranks: averaging_ranks. bypass: the current policy stands in for the proximal one, as in verl's bypass mode.
    """

    def side(batch: Batch) -> Outcome:
        mask_BT, behaviour_BT = batch.mask_BT, batch.for_us("behaviour_BT")
        proximal_BT = batch.for_us("theta_BT" if bypass else "proximal_BT")
        reference_BT = batch.for_us("reference_BT")
        denominators = step_denominators(proximal_BT, behaviour_BT, mask_BT, settings, averaging_ranks=ranks)

        def total(theta_BT: Tensor, entropy_BT: Tensor) -> Tensor:
            shares = []
            step = micro_rows or len(mask_BT)
            for start in range(0, len(mask_BT), step):
                at = slice(start, start + step)
                inputs = LossInputs(
                    theta_BT=torch.where(mask_BT[at], theta_BT[at], float("nan")),
                    proximal_BT=proximal_BT[at],
                    behaviour_BT=behaviour_BT[at],
                    mask_BT=mask_BT[at],
                    advantages=batch.advantages[at],
                    row_weights_B=torch.ones_like(batch.rewards_B[at]),
                    policy_lag_B=torch.zeros_like(batch.group_B[at]),
                    reference_BT=reference_BT[at] if settings.kl_coefficient > 0 else None,
                    entropy_BT=entropy_BT[at] if settings.entropy_coefficient > 0 else None,
                )
                shares.append(policy_loss(inputs, settings, denominators).loss)
            return torch.stack(shares).sum()

        return loss_and_gradient(batch, total)

    return side


def divergence_with_ratio_gradient(settings: ObjectiveSettings) -> Side:
    """The loss with k3 times theta/behaviour, the ratio NOT constant: what TRL differentiates, from our parts."""

    def side(batch: Batch) -> Outcome:
        mask_BT, behaviour_BT = batch.mask_BT, batch.for_us("behaviour_BT")
        denominators = step_denominators(behaviour_BT, behaviour_BT, mask_BT, settings)

        def weighted(theta_BT: Tensor, entropy_BT: Tensor) -> Tensor:
            ratio = importance_ratio(theta_BT, behaviour_BT, mask_BT, RatioLevel.TOKEN)
            k3_BT = kl_terms(theta_BT, batch.for_us("reference_BT"), mask_BT).k3_BT
            return aggregate(ratio.ratio_BT * k3_BT, mask_BT, settings.aggregation, denominators)

        policy = loss(settings)(batch)
        divergence = loss_and_gradient(batch, weighted)
        assert policy.gradient is not None and divergence.gradient is not None
        return Outcome(
            value=policy.value + 0.1 * divergence.value, gradient=policy.gradient + 0.1 * divergence.gradient
        )

    return side


def advantages(
    estimator: AdvantageEstimator,
    *,
    std_kind: StdKind = StdKind.SAMPLE,
    epsilon: float = EPSILON,
    tolerance: float = ZERO_VARIANCE_TOLERANCE,
    kl_coefficient: float = 0.0,
    failed_as_zero: bool = False,
) -> Side:
    """group_advantages, with the divergence in the reward if asked for."""

    def side(batch: Batch) -> Outcome:
        rewards_B = batch.rewards_B.double()
        if kl_coefficient > 0:
            proximal_BT, reference_BT = batch.for_us("proximal_BT"), batch.for_us("reference_BT")
            rewards_B = rewards_B + kl_in_reward(proximal_BT, reference_BT, batch.mask_BT, coefficient=kl_coefficient)
        found = group_advantages(
            rewards_B,
            batch.group_B,
            estimator,
            std_kind=std_kind,
            epsilon=epsilon,
            zero_variance_tolerance=tolerance,
        )
        values_B = found.advantages_N
        return Outcome(value=values_B.nan_to_num(0.0) if failed_as_zero else values_B)

    return side
