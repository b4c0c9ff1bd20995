"""Ratios and clipping: the cases about exponents, bounds, levels and the first step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from consumers.objective import (
    InvalidSetting,
    NonFinite,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    RatioLevel,
    check_inputs,
    cispo_loss,
    importance_ratio,
    ppo_clip_loss,
    reinforce_loss,
    step_metrics,
    worst_fresh_token,
)
from tests.unit.objective.fixture_f import Batch, fixture_f, one_token, row_of, run_step


@pytest.mark.parametrize(("advantage", "loss"), [(0.0, 0.0), (1.0, -1.28), (-1.0, math.exp(20))])
def test_a_log_ratio_of_120_stays_finite(advantage: float, loss: float) -> None:
    """C27."""
    settings = ObjectiveSettings(clip_high=0.28)

    result = run_step(one_token(120.0, advantage, torch.float32), settings)

    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.gradient.item() == 0.0
    assert step_metrics(result.tally, settings)["log_ratio_clamped_fraction"] == 1.0


def test_a_nan_log_ratio_refuses_the_step_and_names_the_trajectory() -> None:
    """C27."""
    inputs = replace(one_token(math.nan, 1.0, torch.float32).inputs(), row_ids=("run/7/3",))

    with pytest.raises(NonFinite, match=r"proximal is not finite at row 0 \(run/7/3\), position 0"):
        check_inputs(inputs, ObjectiveSettings())


def test_asymmetric_bounds_bind_on_their_own_side_and_are_counted_where_they_bind() -> None:
    """C32."""
    ratios = torch.tensor([[1.5], [1.5], [0.5], [0.5], [1.25]], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    mask = torch.ones((5, 1), dtype=torch.bool)

    losses = ppo_clip_loss(ratios, advantages, mask, clip_low=0.2, clip_high=0.28)

    assert losses[:, 0].tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.25])

    settings = ObjectiveSettings(clip_high=0.28)
    theta = torch.full((5, 1), -0.1, dtype=torch.float64)
    old = theta - ratios.log()
    batch = Batch(
        theta=theta,
        proximal=old,
        behaviour=old,
        mask=mask,
        advantages=advantages,
        row_weights=torch.ones(5, dtype=torch.float64),
        policy_lag=torch.zeros(5, dtype=torch.int64),
    )
    metrics = step_metrics(run_step(batch, settings).tally, settings)
    assert (metrics["clipfrac"], metrics["clipfrac_high"], metrics["clipfrac_low"]) == (0.4, 0.2, 0.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_low": -0.1},
        {"clip_low": 1.0},
        {"clip_high": -0.1},
        {"clip_high": math.inf},
        {"clip_low": math.nan},
        {"dual_clip": 1.0},
        {"dual_clip": math.inf},
        {"two_sided_delta": 1.2},
        {"cispo_cap": 0.0},
        {"cispo_cap": math.inf},
        {"cispo_floor": -0.1},
        {"cispo_floor": 5.0},
    ],
    ids=str,
)
def test_bounds_that_make_no_sense_are_refused_by_name(changes: dict[str, float]) -> None:
    """C32."""
    with pytest.raises(InvalidSetting, match=next(iter(changes))):
        ObjectiveSettings(**changes)


def test_a_row_ratio_is_a_mean_over_real_tokens() -> None:
    """C35."""
    batch = row_of([2.0, -2.0, 0.9, 7.0, -9.0], 1.0)
    mask = torch.tensor([[True, True, True, False, False]])
    batch = replace(batch, mask=mask)

    ratio = importance_ratio(batch.theta, batch.behaviour, batch.mask, RatioLevel.SEQUENCE)
    result = run_step(batch, ObjectiveSettings(level=RatioLevel.SEQUENCE))

    assert ratio.ratio_BT[0, :3].tolist() == pytest.approx([1.349859] * 3, abs=1e-6)
    assert result.loss == pytest.approx(-1.2)
    assert result.gradient[0, 3:].tolist() == [0.0, 0.0]
    free = run_step(batch, ObjectiveSettings(level=RatioLevel.SEQUENCE, clip_high=0.5))
    assert free.gradient[0].tolist() == pytest.approx([-1.349859 / 3] * 3 + [0.0] * 2, abs=1e-6)


@pytest.mark.parametrize("level", [RatioLevel.SEQUENCE, RatioLevel.SEQUENCE_SUM])
def test_the_width_of_the_padding_moves_no_bit_of_a_row_ratio(level: RatioLevel) -> None:
    """C35, C10: sums of float32 depend on where the zeros stand, so rows are added in float64."""
    torch.manual_seed(0)
    theta, behaviour = -torch.rand(4, 3000), -torch.rand(4, 3000)
    found = []
    for width in (0, 1, 517, 4096):
        pads = [torch.nn.functional.pad(part, (width, 0), value=math.nan) for part in (theta, behaviour)]
        mask = torch.isfinite(pads[0])
        found.append(importance_ratio(*pads, mask, level).log_ratio_BT[:, -1])

    assert all(torch.equal(other, found[0]) for other in found[1:])
    exact = (theta.double() - behaviour.double()).sum(dim=1)
    exact = exact / 3000 if level is RatioLevel.SEQUENCE else exact
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-6, atol=1e-6)


def test_a_row_without_tokens_is_left_out_of_the_mean() -> None:
    """C35."""
    with_row = fixture_f(mask=torch.tensor([[True, True, True, False], [False] * 4, [True, True, False, False]]))

    result = run_step(with_row, ObjectiveSettings(level=RatioLevel.SEQUENCE))

    assert result.denominators.rows == 2
    assert math.isfinite(result.loss)


def test_the_first_step_has_ratio_one_and_clips_nothing() -> None:
    """C30."""
    batch = fixture_f(theta=fixture_f().behaviour, proximal=fixture_f().behaviour)
    metrics = step_metrics(run_step(batch, ObjectiveSettings()).tally, ObjectiveSettings())

    assert (metrics["log_ratio_min"], metrics["log_ratio_max"]) == (0.0, 0.0)
    assert (metrics["clipfrac"], metrics["ratio_k3"], metrics["mismatch_raw_k3"]) == (0.0, 0.0, 0.0)


def test_the_worst_token_of_fresh_rows_is_named_with_both_log_probabilities() -> None:
    """C30."""
    worst = worst_fresh_token(fixture_f(policy_lag=torch.tensor([0, 3, 0])).inputs())

    assert worst is not None
    assert (worst.row, worst.position) == (2, 0)
    assert (worst.proximal, worst.behaviour) == (-1.9, -1.0)
    assert worst.exceeds
    assert "row 2, position 0: trainer -1.900000, generator -1.000000" in str(worst)

    same = fixture_f(proximal=fixture_f().behaviour).inputs()
    assert worst_fresh_token(same) is not None
    assert not worst_fresh_token(same).exceeds
    assert worst_fresh_token(fixture_f(policy_lag=torch.tensor([1, 1, 1])).inputs()) is None


@pytest.mark.parametrize("level", list(RatioLevel))
def test_clamped_tokens_are_counted_at_every_level(level: RatioLevel) -> None:
    batch = row_of([30.0, 25.0], 1.0)
    ratio = importance_ratio(batch.theta, batch.behaviour, batch.mask, level)

    assert ratio.clamped_BT.tolist() == [[True, True]]
    assert ratio.ratio_BT.tolist() == [pytest.approx([math.exp(20)] * 2)]


def test_a_level_may_be_given_by_its_word() -> None:
    batch = fixture_f()

    for level in RatioLevel:
        by_word = importance_ratio(batch.theta, batch.behaviour, batch.mask, str(level))
        by_name = importance_ratio(batch.theta, batch.behaviour, batch.mask, level)
        assert torch.equal(by_word.ratio_BT, by_name.ratio_BT)


def test_cispo_keeps_the_gradient_of_capped_and_floored_tokens() -> None:
    settings = ObjectiveSettings(objective=Objective.CISPO, cispo_cap=1.3, cispo_floor=0.5)
    result = run_step(fixture_f(), settings)

    assert result.gradient[1, 3].item() == pytest.approx(1.3 * 0.5 / 8)
    assert result.gradient[2, 0].item() == pytest.approx(-0.5 * 2.0 / 8)
    metrics = step_metrics(result.tally, settings)
    assert metrics["cispo_capped_fraction"] == 2 / 8
    assert metrics["cispo_floored_fraction"] == 1 / 8
    assert "clipfrac" not in metrics


def test_advantages_per_token_are_used_per_token() -> None:
    advantages = torch.tensor([[1.0, 2.0, 0.0, math.nan], [0.0, 0.0, 0.0, 0.0], [0.0] * 4], dtype=torch.float64)

    result = run_step(fixture_f(advantages=advantages), ObjectiveSettings(objective=Objective.REINFORCE))

    assert result.gradient[0].tolist() == pytest.approx([-1 / 8, -2 / 8, 0.0, 0.0])
    assert torch.all(result.gradient[1:] == 0.0)


def test_bare_objectives_return_exactly_zero_outside_the_mask() -> None:
    batch = fixture_f()
    ratio = torch.full_like(batch.theta, math.inf)
    ratio[batch.mask] = 1.0

    for losses in (
        reinforce_loss(batch.theta, batch.advantages, batch.mask),
        ppo_clip_loss(ratio, batch.advantages, batch.mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        cispo_loss(batch.theta, ratio, batch.advantages, batch.mask, cap=5.0),
    ):
        assert torch.all(losses[~batch.mask] == 0.0)
        assert torch.isfinite(losses).all()


def test_the_proximal_denominator_ignores_what_was_stored() -> None:
    settings = ObjectiveSettings(denominator=RatioDenominator.PROXIMAL)
    moved = fixture_f(behaviour=fixture_f().behaviour - 1.0)

    assert run_step(moved, settings).loss == run_step(fixture_f(), settings).loss
