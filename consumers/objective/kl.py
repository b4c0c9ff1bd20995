"""Divergence from the reference policy: three estimators, in the loss or in the reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.objective.options import KlEstimator
from consumers.objective.shapes import (
    Checked,
    NegativeDivergence,
    check_constants,
    check_finite,
    check_tokens,
    row_sums,
    sel,
)

KL_EXPONENT_LIMIT = 10.0
"""Tighter than the ratio's 20: k3 holds exp(-x), and e^20 = 4.9e8 from one token swamps a step."""

NEGATIVE_TOLERANCE = 1e-7
"""Rounding of float32 near x = 0; anything below it means a wrong formula or a swapped sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerms:
    """All three estimators per token; 0 outside the mask; each carries its gradient."""

    k1_BT: Tensor
    k2_BT: Tensor
    k3_BT: Tensor
    clamped_BT: Tensor
    """bool: tokens outside +-KL_EXPONENT_LIMIT; they have no gradient"""

    def of(self, estimator: KlEstimator) -> Tensor:
        """The estimator by name, [B,T]."""
        terms = {
            KlEstimator.K1: self.k1_BT,
            KlEstimator.K2: self.k2_BT,
            KlEstimator.K3: self.k3_BT,
        }
        return terms[KlEstimator(estimator)]


def kl_terms(theta_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> KlTerms:
    """Estimates of the divergence of the policy from the reference, at the sampled tokens.

        x  = clamp(sel(theta, reference), -10, 10)         clamped before exp: a finite gradient
        k1 = x                  dk1/dtheta = 1             expected gradient 0: never in the loss
        k2 = x^2 / 2            dk2/dtheta = x             gradient of KL(policy || reference)
        k3 = exp(-x) - 1 + x    dk3/dtheta = 1 - exp(-x)   value of that KL, low variance;
                                                           gradient of KL(reference || policy)

    theta_BT, reference_BT: float [B,T], natural log. mask_BT: bool [B,T]. Returns KlTerms. Raises
    ShapeError.

    Source: Schulman 2020, "Approximating KL divergence"; the gradients are those of Tang and Munos
    2025 ("On a few pitfalls in KL divergence gradient estimation for RL"). Departure: the clamp.
    """
    check_tokens(mask_BT, theta=theta_BT, reference=reference_BT)
    difference_BT = sel(theta_BT, reference_BT, mask_BT)
    x_BT = difference_BT.clamp(-KL_EXPONENT_LIMIT, KL_EXPONENT_LIMIT)
    return KlTerms(
        k1_BT=x_BT,
        k2_BT=x_BT.square() / 2,
        k3_BT=torch.expm1(-x_BT) + x_BT,
        clamped_BT=mask_BT & (difference_BT.detach().abs() > KL_EXPONENT_LIMIT),
    )


def kl_in_reward(proximal_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, *, coefficient: float) -> Tensor:
    """What to add to each reward, before groups are normalised: -beta * sum_t sel(prox, ref)[i,t].

    proximal_BT, reference_BT: float [B,T], constant. coefficient: beta >= 0, reward per nat.
    Returns float64 [B], 0 for a row without counted tokens. Raises ShapeError, NonFinite.

    Source: Ziegler et al. 2019, eq. 2, with k1, whose expectation is the divergence. k2 and k3 are
    biased there (IllegalCombination at start-up). Departure: one sum a row, not a reward a token.
    """
    check_tokens(mask_BT, proximal=proximal_BT, reference=reference_BT)
    check_constants(proximal=proximal_BT, reference=reference_BT)
    check_finite((Checked("proximal", proximal_BT, mask_BT), Checked("reference", reference_BT, mask_BT)))
    difference_BT = sel(proximal_BT.double(), reference_BT.double(), mask_BT)
    return -coefficient * row_sums(difference_BT)[:, 0]


def refuse_negative(name: str, value: float) -> None:
    """Raise NegativeDivergence where a k2 or k3 is below zero by more than rounding.

    k1 is not judged: a batch may well have a negative k1.
    """
    if value < -NEGATIVE_TOLERANCE:
        raise NegativeDivergence(
            f"{name} is {value}, cannot be negative: the sign of theta - reference is swapped or the sums were damaged"
        )
