"""What is done about generator and trainer disagreeing, and about data beyond the lag limit.

The mismatch ratio is proximal over behaviour: both are constants, so everything here is computed
once a training step and has no gradient. Guarantees that a rejected token is removed by selection:
an infinite weight in a rejected row cannot reach the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.objective.options import CorrectionKind
from consumers.objective.ratios import EXPONENT_LIMIT
from consumers.objective.shapes import (
    InvalidSetting,
    ShapeError,
    check_constants,
    check_tokens,
    row_counts,
    row_sums,
    sel,
)

_TOKEN, _GEOMETRIC, _PRODUCT = "token", "geometric", "product"

_WEIGHT = {
    CorrectionKind.TOKEN_TIS: _TOKEN,
    CorrectionKind.GEOMETRIC_TOKEN_TIS: _TOKEN,
    CorrectionKind.ICEPOP: _TOKEN,
    CorrectionKind.SEQUENCE_TIS: _PRODUCT,
    CorrectionKind.MIS: _PRODUCT,
}
_CAPPED = frozenset({CorrectionKind.TOKEN_TIS, CorrectionKind.GEOMETRIC_TOKEN_TIS, CorrectionKind.SEQUENCE_TIS})
_BAND = {
    CorrectionKind.ICEPOP: _TOKEN,
    CorrectionKind.TOKEN_MASK: _TOKEN,
    CorrectionKind.GEOMETRIC: _GEOMETRIC,
    CorrectionKind.GEOMETRIC_TOKEN_TIS: _GEOMETRIC,
    CorrectionKind.MIS: _PRODUCT,
    CorrectionKind.SEQUENCE_MASK: _PRODUCT,
}


def has_weight(kind: CorrectionKind) -> bool:
    """Whether the correction multiplies by prox/beh, which a ratio over behaviour holds too."""
    return CorrectionKind(kind) in _WEIGHT


def has_mask(kind: CorrectionKind) -> bool:
    """Whether the correction rejects tokens or rows outside a band."""
    return CorrectionKind(kind) in _BAND


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Trainer over generator, before any cap or mask; 1 (log 0) outside the mask."""

    log_ratio_BT: Tensor
    """m = sel(prox, beh), not clamped"""
    token_BT: Tensor
    """exp(clamp(m))"""
    geometric_BT: Tensor
    """exp(clamp(sum_t m / n_i)), spread over the row"""
    product_BT: Tensor
    """exp(clamp(sum_t m)), spread over the row"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What the loss uses, and what it was made from. All constant, all [B,T]."""

    weight_BT: Tensor
    """the APPLIED weight, after the cap; 1 where the correction has none"""
    keep_BT: Tensor
    """bool: mask without the rejected tokens"""
    raw_BT: Tensor
    """the RAW weight, before cap and mask; the token ratio where the correction has none"""
    outside_BT: Tensor
    """bool: RAW quantity outside the band, also where the band only reports"""
    capped_BT: Tensor
    """bool: tokens whose weight the cap cut"""


def mismatch_ratios(proximal_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Mismatch:
    """The ratio prox/beh at token level and over rows; never inverted, never from a later theta.

        m = sel(prox, beh)    e = exp(clamp(m))    g_i = exp(clamp(sum_t m / n_i))
                                                   p_i = exp(clamp(sum_t m))         clamp to +-20

    proximal_BT, behaviour_BT: float [B,T], natural log, constant. mask_BT: bool [B,T]. Returns
    Mismatch. Raises ShapeError.

    Source: Hilton et al. 2021 (2110.00641), section 3 for the three policies; Liu, Li et al. 2025
    ("When speed kills stability") for the row forms. Departure: clamp before exp.
    """
    check_tokens(mask_BT, proximal=proximal_BT, behaviour=behaviour_BT)
    check_constants(proximal=proximal_BT, behaviour=behaviour_BT)
    log_ratio_BT = sel(proximal_BT, behaviour_BT, mask_BT)
    total_B1 = row_sums(log_ratio_BT)
    mean_B1 = total_B1 / row_counts(mask_BT).clamp(min=1)
    return Mismatch(
        log_ratio_BT=log_ratio_BT,
        token_BT=_exp(log_ratio_BT),
        geometric_BT=torch.where(mask_BT, _exp(mean_B1), 1.0),
        product_BT=torch.where(mask_BT, _exp(total_B1), 1.0),
    )


def correct(
    mismatch: Mismatch,
    mask_BT: Tensor,
    kind: CorrectionKind,
    *,
    cap: float,
    band_low: float,
    band_high: float,
) -> Correction:
    """Weight and acceptance of every token under one correction.

        none                 w = 1            keep = mask
        token_tis            w = min(e, C)    keep = mask
        sequence_tis         w = min(p_i, C)  keep = mask
        icepop               w = e            keep = mask and lo <= e <= hi
        mis                  w = p_i          keep = mask and lo <= p_i <= hi     whole rows
        geometric            w = 1            keep = mask and lo <= g_i <= hi     whole rows
        geometric_token_tis  w = min(e, C)    keep as geometric
        token_mask, sequence_mask             keep as icepop, mis with w = 1

    cap C, band_low, band_high: bounds on the ratio itself (not on its log), both ends inclusive.
    The cap is applied after acceptance. Returns Correction. Raises ShapeError.

    Source: TIS Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL
    training"); IcePop Ling team 2025 ("Small leak can sink a great ship"); MIS and the geometric
    mask Liu, Li et al. 2025 ("When speed kills stability"). All are articles without numbered
    equations. Departure: the two masks without weight are ours, for the behaviour denominator.
    """
    check_tokens(mask_BT, token=mismatch.token_BT)
    kind = CorrectionKind(kind)
    ratios = {
        _TOKEN: mismatch.token_BT,
        _GEOMETRIC: mismatch.geometric_BT,
        _PRODUCT: mismatch.product_BT,
    }
    raw_BT = ratios[_WEIGHT.get(kind, _TOKEN)]
    banded_BT = ratios[_BAND.get(kind, _WEIGHT.get(kind, _TOKEN))]
    outside_BT = mask_BT & ~((banded_BT >= band_low) & (banded_BT <= band_high))
    keep_BT = mask_BT & ~outside_BT if has_mask(kind) else mask_BT
    weight_BT = raw_BT if has_weight(kind) else torch.ones_like(raw_BT)
    capped_BT = torch.zeros_like(mask_BT)
    if kind in _CAPPED:
        capped_BT = keep_BT & (weight_BT > cap)
        weight_BT = weight_BT.clamp(max=cap)
    return Correction(
        weight_BT=torch.where(keep_BT, weight_BT, 1.0),
        keep_BT=keep_BT,
        raw_BT=raw_BT,
        outside_BT=outside_BT,
        capped_BT=capped_BT,
    )


def staleness_weights(
    policy_lag_B: Tensor, *, max_lag: int, decay: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Row weight u from age: decay ** max(0, policy lag - max_lag), so 1 inside the limit.

    policy_lag_B: int64 [B], training steps. max_lag >= 0: training steps. decay in (0,1]. Returns
    float [B]. Raises ShapeError, InvalidSetting (also for a negative lag: a version from the
    future is never trained).

    Source: ours; the exponential form follows the stale-data weights of asynchronous SGD.
    """
    if policy_lag_B.dim() != 1 or policy_lag_B.dtype != torch.int64:
        raise ShapeError(f"policy_lag must be int64 [B], is {policy_lag_B.dtype} {list(policy_lag_B.shape)}")
    if not 0.0 < decay <= 1.0:
        raise InvalidSetting(f"decay must be in (0,1], is {decay}")
    if max_lag < 0 or bool((policy_lag_B < 0).any()):
        raise InvalidSetting(f"lags must be >= 0: max_lag {max_lag}, rows {policy_lag_B.tolist()}")
    excess_B = (policy_lag_B - max_lag).clamp(min=0)
    return torch.pow(torch.tensor(decay, dtype=dtype, device=policy_lag_B.device), excess_B)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
