"""Rewards to advantages: rows V1 to V7, and the cases about groups."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from consumers.objective import (
    AdvantageEstimator,
    Advantages,
    GroupingError,
    InvalidSetting,
    NonFinite,
    ObjectiveSettings,
    ShapeError,
    StdKind,
    group_advantages,
    rewards_from,
)
from tests.unit.objective import slow_oracle
from tests.unit.objective.fixture_f import fixture_f, run_step

V_REWARDS = [2.0, 0.0, 0.0, 1.0, 1.0]
GROUP_MEAN_STD = AdvantageEstimator.GROUP_MEAN_STD


def of_groups(
    *groups: list[float | None], estimator: AdvantageEstimator = GROUP_MEAN_STD, **options: object
) -> Advantages:
    rewards, _ = rewards_from([reward for group in groups for reward in group])
    numbers = [number for number, group in enumerate(groups) for _ in group]
    return group_advantages(rewards, torch.tensor(numbers, dtype=torch.int64), estimator, **options)


@pytest.mark.parametrize(
    ("estimator", "kind", "expected"),
    [
        (GROUP_MEAN_STD, StdKind.SAMPLE, [1.434103, -0.956069, -0.956069, 0.239017, 0.239017]),
        (GROUP_MEAN_STD, StdKind.POPULATION, [1.603353, -1.068902, -1.068902, 0.267226, 0.267226]),
        (AdvantageEstimator.LEAVE_ONE_OUT, StdKind.SAMPLE, [1.5, -1.0, -1.0, 0.25, 0.25]),
        (AdvantageEstimator.MEAN_ONLY, StdKind.SAMPLE, [1.2, -0.8, -0.8, 0.2, 0.2]),
    ],
    ids=["V1", "V2", "V3", "V4"],
)
def test_one_group_gives_the_stated_advantages(
    estimator: AdvantageEstimator, kind: StdKind, expected: list[float]
) -> None:
    """V1, V2, V3, V4."""
    found = of_groups(V_REWARDS, estimator=estimator, std_kind=kind).advantages_N

    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, abs=2e-6)
    assert found.tolist() == pytest.approx(slow_oracle.advantages([V_REWARDS], estimator, kind)[0], abs=1e-6)


def test_batch_std_divides_every_group_by_one_spread() -> None:
    """V5."""
    found = of_groups(V_REWARDS, [1.0, 0.0, 0.0], estimator=AdvantageEstimator.BATCH_STD).advantages_N

    expected = [1.612635, -1.075090, -1.075090, 0.268772, 0.268772, 0.895908, -0.447954, -0.447954]
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("kind", "expected"), [(StdKind.SAMPLE, 0.707057), (StdKind.POPULATION, 0.999900)])
def test_a_nan_reward_leaves_its_member_out_and_the_others_go_on(kind: StdKind, expected: float) -> None:
    """V6."""
    found = of_groups([2.0, math.nan, 0.0], std_kind=kind)

    assert found.usable_N.tolist() == [True, False, True]
    assert found.advantages_N[[0, 2]].tolist() == pytest.approx([expected, -expected], abs=2e-6)
    assert math.isnan(found.advantages_N[1])


@pytest.mark.parametrize("estimator", list(AdvantageEstimator))
def test_equal_rewards_give_exactly_zero(estimator: AdvantageEstimator) -> None:
    """V7, C12."""
    found = of_groups([0.7, 0.7, 0.7], [1.0, 1.0 + 1e-9, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0], estimator=estimator)

    assert found.advantages_N[:7].tolist() == [0.0] * 7
    assert found.zero_variance_G.tolist() == [True, True, False]
    assert all(found.advantages_N[7:] != 0.0)


def test_the_tolerance_grows_with_the_rewards() -> None:
    """C12: half a unit is rounding at a million, and a real difference at one."""
    found = of_groups([1e6, 1e6 + 0.5], [0.5, 1.0])

    assert found.zero_variance_G.tolist() == [True, False]


@pytest.mark.parametrize(("kind", "expected"), [(StdKind.SAMPLE, 0.86588), (StdKind.POPULATION, 0.99980)])
def test_a_zero_variance_group_does_not_touch_the_other_group(kind: StdKind, expected: float) -> None:
    """C12."""
    found = of_groups([1.0] * 4, [1.0, 0.0, 0.0, 1.0], std_kind=kind).advantages_N

    assert found[:4].tolist() == [0.0] * 4
    assert found[4:].tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"std_kind": StdKind.SAMPLE}, [1.49970, -0.49990, -0.49990, -0.49990]),
        ({"std_kind": StdKind.POPULATION}, [1.73165, -0.57722, -0.57722, -0.57722]),
        ({"estimator": AdvantageEstimator.MEAN_ONLY}, [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_the_kind_of_deviation_is_the_named_one(options: dict, expected: list[float]) -> None:
    """C14."""
    found = of_groups([1.0, 0.0, 0.0, 0.0], **options).advantages_N

    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_batch_keyed_by_trajectory_is_refused() -> None:
    """C16."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.arange(4)

    with pytest.raises(GroupingError, match="keyed by trajectory"):
        group_advantages(rewards, groups, GROUP_MEAN_STD, declared_group_size=4)
    with pytest.raises(GroupingError, match="two groups share one number"):
        group_advantages(rewards, torch.zeros(4, dtype=torch.int64), GROUP_MEAN_STD, declared_group_size=2)


def test_uneven_groups_stay_apart() -> None:
    """C18."""
    found = of_groups([1.0, 1.0, 0.0], [0.0, 1.0], declared_group_size=3).advantages_N

    assert found.tolist() == pytest.approx([0.57725, 0.57725, -1.15450, -0.70701, 0.70701], abs=2e-5)


def test_a_group_that_arrives_in_pieces_is_normalised_as_one() -> None:
    """C21: rewards [1, 1] and [0, 0] of one group, other members in between."""
    rewards = torch.tensor([1.0, 1.0, 5.0, 0.0, 0.0, 6.0])
    groups = torch.tensor([7, 7, 9, 7, 7, 9])

    found = group_advantages(rewards, groups, GROUP_MEAN_STD)

    expected = [0.86588, 0.86588, -0.86588, -0.86588]
    assert found.advantages_N[[0, 1, 3, 4]].tolist() == pytest.approx(expected, abs=1e-5)
    assert found.groups_G.tolist() == [7, 9]


@pytest.mark.parametrize(("kind", "expected"), [(StdKind.SAMPLE, 0.70701), (StdKind.POPULATION, 0.99980)])
def test_failed_rewards_have_reasons_and_a_group_without_rewards_is_dropped(kind: StdKind, expected: float) -> None:
    """C22."""
    values = [1.0, None, 0.0, math.inf, None, None, math.nan]
    rewards, reasons = rewards_from(values)

    found = group_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1, 1]), GROUP_MEAN_STD, std_kind=kind)

    assert reasons == (None, "reward_null", None, "reward_infinite", "reward_null", "reward_null", "reward_nan")
    assert found.usable_N.tolist() == [True, False, True, False, False, False, False]
    assert found.advantages_N[[0, 2]].tolist() == pytest.approx([expected, -expected], abs=2e-5)
    assert found.dropped_G.tolist() == [False, True]
    assert found.usable_count_G.tolist() == [2, 0]


def test_an_unusable_member_that_is_trained_by_mistake_is_refused() -> None:
    """C22: an error is not a zero."""
    advantages = torch.tensor([1.0, math.nan, 2.0], dtype=torch.float64)

    with pytest.raises(NonFinite, match="advantages is not finite at row 1"):
        run_step(fixture_f(advantages=advantages), ObjectiveSettings())


def test_a_withheld_member_keeps_its_reward_in_the_baseline() -> None:
    """C48: the stale fourth member is masked out of the loss, not out of the group."""
    found = of_groups([1.0, 0.0, 0.0, 1.0]).advantages_N

    assert found[:3].tolist() == pytest.approx([0.86588, -0.86588, -0.86588], abs=1e-5)


def test_one_member_alone_is_below_the_minimum() -> None:
    found = of_groups([1.0, None], [1.0, 0.0, 1.0], min_group=3)

    assert found.dropped_G.tolist() == [True, False]
    assert torch.isnan(found.advantages_N[:2]).all()


def test_an_empty_step_has_no_groups() -> None:
    found = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), GROUP_MEAN_STD, declared_group_size=4)

    assert found.advantages_N.shape == (0,)
    assert found.groups_G.shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "options", "error", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int64), {}, ShapeError, "rewards must be float"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), {}, ShapeError, "rewards must be float"),
        (torch.zeros(2), torch.zeros(3, dtype=torch.int64), {}, ShapeError, "group must be int64"),
        (torch.zeros(2), torch.zeros(2), {}, ShapeError, "group must be int64"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), {"min_group": 1}, InvalidSetting, "min_group"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), {"epsilon": -1.0}, InvalidSetting, "epsilon"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.int64),
            {"zero_variance_tolerance": math.nan},
            InvalidSetting,
            "zero_variance_tolerance",
        ),
    ],
)
def test_wrong_rewards_are_refused_by_name(
    rewards: torch.Tensor, groups: torch.Tensor, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        group_advantages(rewards, groups, GROUP_MEAN_STD, **options)


@pytest.mark.parametrize("estimator", list(AdvantageEstimator))
@pytest.mark.parametrize("rewards", [[0.0, 1.0, -1e200], [1.7e308, 1.7e308, 0.0], [1.7e308, -1.7e308, 1.7e308]])
def test_rewards_too_large_to_square_or_add_end_no_step_by_themselves(
    estimator: AdvantageEstimator, rewards: list[float]
) -> None:
    """What is not finite then is the loss's to refuse by name; the numbers are those of float64 tensor operations."""
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    found = group_advantages(rewards_N, torch.zeros(3, dtype=torch.int64), estimator).advantages_N
    deviation_N = rewards_N - rewards_N.sort().values.sum() / 3
    expected_N = {
        AdvantageEstimator.MEAN_ONLY: deviation_N,
        AdvantageEstimator.LEAVE_ONE_OUT: deviation_N * 3 / 2,
    }.get(estimator, deviation_N / (deviation_N.square().sum() / 2).sqrt())
    torch.testing.assert_close(found, expected_N.float(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("estimator", list(AdvantageEstimator))
def test_the_order_of_members_changes_nothing_where_a_sum_runs_over_on_its_way(estimator: AdvantageEstimator) -> None:
    rewards = (1.7e308, 1.7e308, -1.7e308, -1.0)
    by_order = []
    for order in itertools.permutations(range(4)):
        rewards_N = torch.tensor([rewards[member] for member in order], dtype=torch.float64)
        found = group_advantages(rewards_N, torch.zeros(4, dtype=torch.int64), estimator).advantages_N.tolist()
        by_order.append(tuple(str(found[order.index(member)]) for member in range(4)))
    assert len(set(by_order)) == 1


def test_a_spread_that_vanishes_without_an_epsilon_is_infinite_and_no_error() -> None:
    found = group_advantages(
        torch.tensor([0.0, 1e-200], dtype=torch.float64),
        torch.zeros(2, dtype=torch.int64),
        AdvantageEstimator.GROUP_MEAN_STD,
        epsilon=0.0,
        zero_variance_tolerance=0.0,
    )
    assert found.advantages_N.tolist() == [-math.inf, math.inf]
