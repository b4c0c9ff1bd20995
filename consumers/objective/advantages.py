"""From rewards to advantages, group by group.

Guarantees that a failed reward is never a zero: it makes its member unusable, and an unusable
member has advantage NaN, which the loss refuses. Group and member order, and the split of a group
over records or ranks, change nothing: sums are rounded once, whatever the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from consumers.objective.options import AdvantageEstimator, StdKind
from consumers.objective.shapes import GroupingError, InvalidSetting, ShapeError

EPSILON = 1e-4
"""Added to the standard deviation, in units of the reward; the value of most public systems."""

ZERO_VARIANCE_TOLERANCE = 1e-6
"""Relative to max(1, max|r|): rewards that differ by rounding only must not be blown up to +-1."""

REWARD_NULL, REWARD_NAN, REWARD_INFINITE = "reward_null", "reward_nan", "reward_infinite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages of the members and what was found out about their groups.

    A group is usable if at least min_group of its members have a finite reward. Rows of `*_G` are
    in the order of the sorted group numbers.
    """

    advantages_N: Tensor
    """float32 [N]; NaN for a member that may not be trained"""
    usable_N: Tensor
    """bool [N]: finite reward, in a usable group"""
    groups_G: Tensor
    """int64 [G], the group numbers, sorted"""
    usable_count_G: Tensor
    """int64 [G], members with a finite reward"""
    mean_G: Tensor
    """float64 [G], of the usable rewards; NaN for a dropped group"""
    std_G: Tensor
    """float64 [G], of the kind asked for; NaN for a dropped group"""
    zero_variance_G: Tensor
    """bool [G]: all usable rewards equal within the tolerance, all advantages exactly 0"""
    dropped_G: Tensor
    """bool [G]: fewer than min_group usable rewards"""


def rewards_from(values: Sequence[float | None]) -> tuple[Tensor, tuple[str | None, ...]]:
    """Rewards as float64 [N] with NaN where there is none, and why each unusable one is unusable.

    values: None for a reward function that failed. Returns (rewards_N, reasons): a reason is
    "reward_null", "reward_nan", "reward_infinite" or None.
    """
    reasons = tuple(_reason(value) for value in values)
    usable = [
        math.nan if value is None or reason else float(value) for value, reason in zip(values, reasons, strict=True)
    ]
    return torch.tensor(usable, dtype=torch.float64), reasons


def group_advantages(
    rewards_N: Tensor,
    group_N: Tensor,
    estimator: AdvantageEstimator,
    *,
    std_kind: StdKind = StdKind.SAMPLE,
    min_group: int = 2,
    declared_group_size: int | None = None,
    epsilon: float = EPSILON,
    zero_variance_tolerance: float = ZERO_VARIANCE_TOLERANCE,
) -> Advantages:
    """Advantages of every member of every group, over the usable members only.

        group_mean_std  A_i = (r_i - mu) / (s + eps)
        leave_one_out   A_i = r_i - mean of the others = (r_i - mu) * n / (n - 1)
        mean_only       A_i = r_i - mu
        batch_std       A_i = (r_i - mu) / (s_batch + eps)    s_batch over all usable members
        max(r) - min(r) <= tolerance * max(1, max|r|)         all A exactly 0

    rewards_N: float [N], non-finite = unusable. group_N: int64 [N], one number a prompt group;
    never derived from text or arrival. std_kind: divisor n - 1 (sample) or n (population).
    min_group: >= 2 usable members. declared_group_size: members a group should have; only used to
    refuse a batch that was keyed by member. epsilon, zero_variance_tolerance: >= 0. A member whose
    row is not trained (overlong, stale) still belongs here: its reward stays in the baseline.

    Returns Advantages (computed in float64, advantages in float32). Raises ShapeError,
    InvalidSetting, GroupingError.

    Source: group_mean_std Shao et al. 2024 (GRPO, 2402.03300), section 4.1.2; leave_one_out
    Ahmadian et al. 2024 (RLOO, 2402.14740), section 3; mean_only Liu et al. 2025 (Dr. GRPO,
    2503.20783); batch_std Hu et al. 2025 (REINFORCE++, 2501.03262), with a group baseline.
    Departures: the zero-variance rule, and groups with failed rewards go on with the survivors.
    """
    estimator, std_kind = AdvantageEstimator(estimator), StdKind(std_kind)
    _check(rewards_N, group_N, min_group, epsilon, zero_variance_tolerance)
    groups_G, index_N, members_G = torch.unique(group_N, return_inverse=True, return_counts=True)
    _check_grouping(members_G, declared_group_size)
    # Plain numbers from here on: for a few hundred rewards every tensor operation costs more than all of them.
    rewards, index = rewards_N.double().tolist(), index_N.tolist()
    members: list[list[float]] = [[] for _ in range(len(groups_G))]
    for reward, group in zip(rewards, index, strict=True):
        if math.isfinite(reward):
            members[group].append(reward)
    dropped = [len(finite) < min_group for finite in members]
    usable = [math.isfinite(reward) and not dropped[group] for reward, group in zip(rewards, index, strict=True)]
    spread = [
        _spread([] if is_dropped else finite, std_kind, zero_variance_tolerance)
        for finite, is_dropped in zip(members, dropped, strict=True)
    ]
    batch_std = math.nan
    if estimator is AdvantageEstimator.BATCH_STD:
        in_batch = [reward for reward, is_usable in zip(rewards, usable, strict=True) if is_usable]
        batch_std = _spread(in_batch, std_kind, zero_variance_tolerance)[1]

    def advantage(reward: float, group: int) -> float:
        mean, std, is_zero = spread[group]
        scale = (batch_std if estimator is AdvantageEstimator.BATCH_STD else std) + epsilon
        return 0.0 if is_zero else _advantage(estimator, reward - mean, scale, len(members[group]))

    advantages = [
        advantage(reward, group) if is_usable else math.nan
        for reward, group, is_usable in zip(rewards, index, usable, strict=True)
    ]
    means, stds, zeros = zip(*spread, strict=True) if spread else ((), (), ())
    tensor = partial(torch.tensor, device=rewards_N.device)
    return Advantages(
        advantages_N=tensor(advantages, dtype=torch.float64).float(),
        usable_N=tensor(usable, dtype=torch.bool),
        groups_G=groups_G,
        usable_count_G=tensor([len(finite) for finite in members], dtype=torch.int64),
        mean_G=tensor(means, dtype=torch.float64),
        std_G=tensor(stds, dtype=torch.float64),
        zero_variance_G=tensor(zeros, dtype=torch.bool),
        dropped_G=tensor(dropped, dtype=torch.bool),
    )


def _advantage(estimator: AdvantageEstimator, deviation: float, scale: float, count: int) -> float:
    """Of a member that is so far from the mean of its group of `count`."""
    if estimator is AdvantageEstimator.LEAVE_ONE_OUT:
        return deviation * count / (count - 1)
    return deviation if estimator is AdvantageEstimator.MEAN_ONLY else _divided(deviation, scale)


def _spread(rewards: Sequence[float], std_kind: StdKind, tolerance: float) -> tuple[float, float, bool]:
    """Mean, standard deviation, and whether all are equal; NaN without two members."""
    count = len(rewards)
    if count < 2:
        return math.nan, math.nan, False
    mean = _sum(rewards) / count
    divisor = count - 1 if std_kind is StdKind.SAMPLE else count
    # (a power raises where a product is infinite)
    std = math.sqrt(_sum([(reward - mean) * (reward - mean) for reward in rewards]) / divisor)
    least, most = min(rewards), max(rewards)
    return mean, std, most - least <= tolerance * max(1.0, abs(least), abs(most))


def _sum(values: Sequence[float]) -> float:
    """Rounded once; infinite where it is too large for a float: what comes of that the loss refuses by name."""
    ordered = sorted(values)  # whether a sum runs over on its way depends on the order
    try:
        return math.fsum(ordered)
    except OverflowError:
        return sum(ordered)


def _divided(numerator: float, denominator: float) -> float:
    """As tensors divide: by zero, infinite or not a number."""
    if denominator == 0:
        return math.copysign(math.inf, numerator) if numerator else math.nan
    return numerator / denominator


def _reason(value: float | None) -> str | None:
    if value is None:
        return REWARD_NULL
    if math.isnan(value):
        return REWARD_NAN
    return REWARD_INFINITE if math.isinf(value) else None


def _check(rewards_N: Tensor, group_N: Tensor, min_group: int, epsilon: float, tolerance: float) -> None:
    if rewards_N.dim() != 1 or not rewards_N.is_floating_point():
        raise ShapeError(f"rewards must be float [N], is {rewards_N.dtype} {list(rewards_N.shape)}")
    if group_N.dtype != torch.int64 or group_N.shape != rewards_N.shape:
        raise ShapeError(f"group must be int64 [{len(rewards_N)}], is {group_N.dtype} {list(group_N.shape)}")
    if min_group < 2:
        raise InvalidSetting(f"min_group must be >= 2, is {min_group}: one member has no baseline")
    for name, value in (("epsilon", epsilon), ("zero_variance_tolerance", tolerance)):
        if not (math.isfinite(value) and value >= 0):
            raise InvalidSetting(f"{name} must be finite and >= 0, is {value}")


def _check_grouping(members_G: Tensor, declared_group_size: int | None) -> None:
    """Keyed by trajectory, every member is its own baseline, and no signal is left."""
    if declared_group_size is None or len(members_G) == 0:
        return
    largest = int(members_G.max())
    if declared_group_size > 1 and largest == 1:
        raise GroupingError(
            f"all {len(members_G)} groups have one member, declared size is "
            f"{declared_group_size}: the members were keyed by trajectory, not by group"
        )
    if largest > declared_group_size:
        raise GroupingError(
            f"a group has {largest} members, declared size is {declared_group_size}: two groups share one number"
        )
