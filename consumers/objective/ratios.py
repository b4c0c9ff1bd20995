"""The clip ratio: current policy over a chosen denominator, at token or sequence level.

Guarantees that exp never overflows and that padding never enters a row's mean. Must not know of the
engine-mismatch ratio (corrections.py): they are two different ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.objective.options import RatioLevel
from consumers.objective.shapes import check_constants, check_tokens, row_counts, row_sums, sel

EXPONENT_LIMIT = 20.0
"""e^20 = 4.9e8. Far outside any useful ratio, and far below 88.7 where float32 exp becomes inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio spread over the tokens; 1 outside the mask."""

    ratio_BT: Tensor
    """exp of the clamped exponent; carries the gradient"""
    exponent_BT: Tensor
    """detached, after the clamp: log of ratio_BT"""
    log_ratio_BT: Tensor
    """detached, before the clamp, at the level of the ratio"""
    token_log_ratio_BT: Tensor
    """detached, per token whatever the level"""
    clamped_BT: Tensor
    """bool: tokens whose exponent was outside +-EXPONENT_LIMIT; they have no gradient"""


def importance_ratio(theta_BT: Tensor, denominator_BT: Tensor, mask_BT: Tensor, level: RatioLevel) -> Ratio:
    """Ratio of the policy being differentiated to the one in the denominator.

        d = sel(theta, denominator)
        token         r[i,t] = exp(clamp(d[i,t], -20, 20))
        sequence      r[i,:] = exp(clamp(sum_t d[i,t] / n_i, -20, 20))
        sequence_sum  r[i,:] = exp(clamp(sum_t d[i,t], -20, 20))

    n_i counts the row's masked tokens: neither the width T nor tool output divides. A sequence
    ratio keeps its gradient through every token of the row.

    theta_BT, denominator_BT: float32 or float64 [B,T], natural log. mask_BT: bool [B,T]; content
    outside is arbitrary. Returns Ratio. Raises ShapeError.

    Source: token level Schulman et al. 2017 (PPO, 1707.06347), eq. 6; sequence level Zheng et al.
    2025 (GSPO, 2507.18071), eq. 7. Departure: the exponent is clamped before exp, so a runaway log
    ratio gives a finite loss and no gradient; both papers let it overflow.
    """
    check_tokens(mask_BT, theta=theta_BT, denominator=denominator_BT)
    check_constants(denominator=denominator_BT)
    level = RatioLevel(level)
    token_log_ratio_BT = sel(theta_BT, denominator_BT, mask_BT)
    if level is RatioLevel.TOKEN:
        log_ratio_BT = token_log_ratio_BT
    else:
        log_ratio_BT = _per_row(token_log_ratio_BT, mask_BT, level)
    exponent_BT = log_ratio_BT.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return Ratio(
        ratio_BT=exponent_BT.exp(),
        exponent_BT=exponent_BT.detach(),
        log_ratio_BT=log_ratio_BT.detach(),
        token_log_ratio_BT=token_log_ratio_BT.detach(),
        clamped_BT=mask_BT & (log_ratio_BT.detach().abs() > EXPONENT_LIMIT),
    )


def _per_row(token_log_ratio_BT: Tensor, mask_BT: Tensor, level: RatioLevel) -> Tensor:
    total_B1 = row_sums(token_log_ratio_BT)
    if level is RatioLevel.SEQUENCE:
        total_B1 = total_B1 / row_counts(mask_BT).clamp(min=1)
    return torch.where(mask_BT, total_B1.expand(mask_BT.shape), 0.0)
