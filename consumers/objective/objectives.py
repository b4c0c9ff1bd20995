"""The three objectives, as a loss for each token. Weights and sums happen elsewhere.

Every function takes the mask and returns exactly 0 outside it. Tensors are [B,T]; the advantage may
also be [B]. A positive advantage asks for a higher probability, and a loss is to be minimised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from consumers.objective.shapes import check_tokens, pick, spread_rows


def reinforce_loss(theta_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Tensor:
    """Policy gradient without a ratio: l = -A * theta.

    theta_BT: float [B,T], log-probability under the policy being differentiated. advantages: float
    [B] or [B,T], constant. mask_BT: bool [B,T]. Returns float [B,T]. Raises ShapeError.

    Source: Williams 1992 (REINFORCE), theorem 1. Departure: none; for data of older versions the
    weight comes from corrections.py, as in Espeholt et al. 2018 (IMPALA, 1802.01561), section 4.2.
    """
    check_tokens(mask_BT, theta=theta_BT)
    advantages_BT = spread_rows("advantages", advantages, mask_BT, theta_BT.dtype)
    return -advantages_BT * pick(theta_BT, mask_BT)


def ppo_clip_loss(
    ratio_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    two_sided_delta: float | None = None,
) -> Tensor:
    """Clipped surrogate with separate bounds, and two optional bounds for A < 0.

        o = min(r * A, clip(r, 1 - lo, 1 + hi) * A)    first r is min(r, delta) if delta is set
        o = max(o, c * A)  where A < 0                 if dual_clip c is set
        l = -o

    ratio_BT: float [B,T], see ratios.py, carries the gradient. advantages: float [B] or [B,T],
    constant. clip_low in [0,1), clip_high >= 0, dual_clip > 1, two_sided_delta > 1 + clip_high:
    ratios, no unit. Returns float [B,T]. Raises ShapeError.

    Source: Schulman et al. 2017 (PPO, 1707.06347), eq. 7; separate bounds Yu et al. 2025 (DAPO,
    2503.14476), eq. 8; dual clip Ye et al. 2020 (1912.09729), "Dual-clip PPO"; delta Prime
    Intellect 2025 (INTELLECT-2, 2505.07291), "Two-sided GRPO clipping". Departure: at an exact tie
    with c * A the surrogate keeps its gradient.
    """
    check_tokens(mask_BT, ratio=ratio_BT)
    advantages_BT = spread_rows("advantages", advantages, mask_BT, ratio_BT.dtype)
    ratio_BT = pick(ratio_BT, mask_BT)
    free_BT = ratio_BT if two_sided_delta is None else ratio_BT.clamp(max=two_sided_delta)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate_BT = torch.minimum(free_BT * advantages_BT, clipped_BT * advantages_BT)
    if dual_clip is not None:
        floor_BT = dual_clip * advantages_BT
        below_BT = (advantages_BT < 0) & (surrogate_BT < floor_BT)
        surrogate_BT = torch.where(below_BT, floor_BT, surrogate_BT)
    return pick(-surrogate_BT, mask_BT)


def cispo_loss(
    theta_BT: Tensor,
    ratio_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Policy gradient with a constant, clipped weight: l = -sg(clip(r, floor, cap)) * A * theta.

    Unlike ppo_clip a token outside the bounds keeps its gradient; only its weight stops growing.

    theta_BT: float [B,T], carries the gradient. ratio_BT: float [B,T], its gradient is not used.
    advantages: float [B] or [B,T]. cap > floor >= 0: absolute ratios, so cap 5.0 means five times.
    Returns float [B,T]. Raises ShapeError.

    Source: MiniMax 2025 (MiniMax-M1, 2506.13585), the CISPO objective of its section 3.1.
    Departure: bounds are absolute ratios, the paper's are distances from 1; like the paper we
    leave the floor off (0) by default.
    """
    check_tokens(mask_BT, theta=theta_BT, ratio=ratio_BT)
    advantages_BT = spread_rows("advantages", advantages, mask_BT, theta_BT.dtype)
    weight_BT = pick(ratio_BT.detach(), mask_BT).clamp(floor, cap)
    return -weight_BT * advantages_BT * pick(theta_BT, mask_BT)
