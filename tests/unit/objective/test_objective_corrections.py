"""Weights and masks for the mismatch of trainer and generator, and weights from age."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from consumers.objective import (
    Aggregation,
    Correction,
    CorrectionKind,
    InvalidSetting,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    RejectionDenominator,
    ShapeError,
    aggregate,
    correct,
    count_denominators,
    mismatch_ratios,
    staleness_weights,
    step_metrics,
)
from tests.unit.objective import slow_oracle
from tests.unit.objective.fixture_f import MASK, THETA, fixture_f, oracle_case, row_of, run_step


def corrected(log_ratios: list[list[float]], kind: CorrectionKind, **options: float) -> Correction:
    proximal = torch.tensor(log_ratios, dtype=torch.float64)
    mask = torch.ones(proximal.shape, dtype=torch.bool)
    mismatch = mismatch_ratios(proximal, torch.zeros_like(proximal), mask)
    return correct(mismatch, mask, kind, **{"cap": 2.0, "band_low": 0.5, "band_high": 2.0, **options})


def test_mismatch_ratios_of_the_fixture_are_the_stated_ones() -> None:
    batch = fixture_f()

    found = mismatch_ratios(batch.proximal, batch.behaviour, batch.mask)

    token = [1.349859, 0.904837, 0.904837, 0.904837, 0.818731, 2.718282, 0.406570, 1.105171]
    assert found.token_BT[batch.mask].tolist() == pytest.approx(token, abs=2e-6)
    assert found.geometric_BT[:, 0].tolist() == pytest.approx([1.033895, 1.262802, 0.670320], abs=2e-6)
    assert found.product_BT[:, 0].tolist() == pytest.approx([1.105171, 2.013753, 0.449329], abs=2e-6)
    for ratio in (found.token_BT, found.geometric_BT, found.product_BT):
        assert torch.all(ratio[~batch.mask] == 1.0)


@pytest.mark.parametrize("kind", list(CorrectionKind))
@pytest.mark.parametrize("band", [(0.5, 2.0), (0.9, 1.1)])
@pytest.mark.parametrize("after", list(RejectionDenominator))
def test_every_correction_agrees_with_the_slow_loops(
    kind: CorrectionKind, band: tuple[float, float], after: RejectionDenominator
) -> None:
    settings = ObjectiveSettings(
        denominator=RatioDenominator.PROXIMAL,
        correction=kind,
        band_low=band[0],
        band_high=band[1],
        denominator_after_rejection=after,
        aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
    )
    case = oracle_case(
        den="proximal", correction=str(kind), band=band, after=str(after), agg="seq_mean_token_mean", mask=MASK
    )

    result = run_step(fixture_f(), settings, cut=[[1], [0, 2]])

    assert result.loss == pytest.approx(slow_oracle.loss(THETA, case), abs=1e-12)
    expected = torch.tensor(slow_oracle.gradient(THETA, case), dtype=torch.float64)
    torch.testing.assert_close(result.gradient, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize(("proximal", "behaviour", "weight"), [(-1.0, -1.7, 2.0), (-1.7, -1.0, 0.496585)])
def test_the_weight_is_trainer_over_generator_and_constant(proximal: float, behaviour: float, weight: float) -> None:
    """C33."""
    batch = row_of([proximal - behaviour], 1.0, base=proximal, first_step=True)
    for objective in (Objective.REINFORCE, Objective.PPO_CLIP):
        settings = ObjectiveSettings(
            objective=objective,
            denominator=RatioDenominator.PROXIMAL,
            correction=CorrectionKind.TOKEN_TIS,
        )
        assert run_step(batch, settings).gradient.item() == pytest.approx(-weight, abs=1e-6)

    moved = replace(batch, theta=batch.theta - 0.3)
    settings = ObjectiveSettings(objective=Objective.REINFORCE, correction=CorrectionKind.TOKEN_TIS)
    assert run_step(moved, settings).gradient.item() == pytest.approx(-weight, abs=1e-6)


@pytest.mark.parametrize(
    ("after", "expected"), [(RejectionDenominator.KEPT, 1.108858), (RejectionDenominator.ORIGINAL, 0.665315)]
)
def test_the_denominator_after_rejection_is_the_named_one(after: RejectionDenominator, expected: float) -> None:
    """C37."""
    found = corrected([[0.0, 0.2, 1.5, -3.0, 0.1]], CorrectionKind.ICEPOP)
    mask = torch.ones((1, 5), dtype=torch.bool)

    assert found.keep_BT.tolist() == [[True, True, False, False, True]]
    unit_loss = torch.where(found.keep_BT, found.weight_BT, 0.0)
    assert unit_loss.sum().item() == pytest.approx(3.326574, abs=1e-6)
    denominators = count_denominators(mask, found.keep_BT, after)
    loss = aggregate(unit_loss, mask, Aggregation.TOKEN_MEAN, denominators)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("after", list(RejectionDenominator))
def test_the_rejected_share_is_reported_and_nothing_kept_means_no_step(after: RejectionDenominator) -> None:
    """C37."""
    settings = ObjectiveSettings(
        denominator=RatioDenominator.PROXIMAL,
        correction=CorrectionKind.ICEPOP,
        denominator_after_rejection=after,
    )
    some = run_step(row_of([0.0, 0.2, 1.5, -3.0, 0.1], 1.0, first_step=True), settings)
    assert step_metrics(some.tally, settings)["rejected_fraction"] == pytest.approx(0.4)
    assert not some.denominators.skipped

    none = run_step(row_of([5.0, -5.0], 1.0, first_step=True), settings)
    assert none.denominators.skipped
    assert none.loss == 0.0
    assert none.gradient.tolist() == [[0.0, 0.0]]
    assert step_metrics(none.tally, settings)["rejected_fraction"] == 1.0
    assert "mismatch_applied_mean" not in step_metrics(none.tally, settings)


def test_raw_and_applied_weights_are_reported_apart() -> None:
    """C38."""
    settings = ObjectiveSettings(denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.TOKEN_TIS)
    result = run_step(row_of([math.log(0.5), math.log(12), math.log(0.8)], 1.0, first_step=True), settings)

    metrics = step_metrics(result.tally, settings)

    assert metrics["mismatch_raw_mean"] == pytest.approx(4.433333, abs=1e-6)
    assert metrics["mismatch_applied_mean"] == pytest.approx(1.1)
    assert metrics["mismatch_outside_band_fraction"] == pytest.approx(1 / 3)
    assert metrics["mismatch_capped_fraction"] == pytest.approx(1 / 3)
    assert metrics["mismatch_raw_ess"] * 3 == pytest.approx(1.2209, abs=1e-4)


def test_an_infinite_weight_in_a_rejected_row_never_reaches_the_sum() -> None:
    """C39."""
    found = corrected([[math.log(10), -math.log(10)], [200.0, 0.0]], CorrectionKind.GEOMETRIC_TOKEN_TIS)

    assert found.keep_BT.tolist() == [[True, True], [False, False]]
    assert found.weight_BT[0].tolist() == pytest.approx([2.0, 0.1])
    assert found.capped_BT.tolist() == [[True, False], [False, False]]
    settings = ObjectiveSettings(denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.GEOMETRIC_TOKEN_TIS)
    result = run_step(row_of([200.0, 0.0], -1.0, first_step=True), settings)
    assert result.loss == 0.0
    assert result.gradient.tolist() == [[0.0, 0.0]]


def test_both_ends_of_the_band_are_accepted() -> None:
    exact = [[math.log(0.5), math.log(2.0)]]
    low, high = (math.exp(value) for value in exact[0])

    assert corrected(exact, CorrectionKind.TOKEN_MASK, band_low=low, band_high=high).keep_BT.all()
    narrower = corrected(exact, CorrectionKind.TOKEN_MASK, band_low=low * 1.000001, band_high=high * 0.999999)
    assert not narrower.keep_BT.any()


def test_masks_without_weight_leave_the_weight_at_one() -> None:
    for kind in (CorrectionKind.GEOMETRIC, CorrectionKind.TOKEN_MASK, CorrectionKind.SEQUENCE_MASK):
        found = corrected([[0.1, 0.2], [3.0, 4.0]], kind)
        assert found.keep_BT.tolist() == [[True, True], [False, False]]
        assert torch.all(found.weight_BT == 1.0)


def test_weight_from_age_is_one_inside_the_limit_and_decays_beyond() -> None:
    found = staleness_weights(torch.tensor([0, 1, 2, 3, 5]), max_lag=2, decay=0.5)

    assert found.dtype == torch.float32
    assert found.tolist() == [1.0, 1.0, 1.0, 0.5, 0.125]


@pytest.mark.parametrize(
    ("lags", "max_lag", "decay", "error"),
    [
        (torch.tensor([0.0]), 1, 0.5, ShapeError),
        (torch.tensor([[0]]), 1, 0.5, ShapeError),
        (torch.tensor([-1]), 1, 0.5, InvalidSetting),
        (torch.tensor([1]), -1, 0.5, InvalidSetting),
        (torch.tensor([1]), 1, 0.0, InvalidSetting),
        (torch.tensor([1]), 1, 1.5, InvalidSetting),
        (torch.tensor([1]), 1, math.nan, InvalidSetting),
    ],
)
def test_impossible_ages_are_refused(lags: torch.Tensor, max_lag: int, decay: float, error: type[Exception]) -> None:
    with pytest.raises(error):
        staleness_weights(lags, max_lag=max_lag, decay=decay)
