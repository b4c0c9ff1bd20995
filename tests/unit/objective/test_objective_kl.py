"""Divergence from the reference: rows K1 to K5, and the case about signs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from consumers.objective import (
    KlEstimator,
    NegativeDivergence,
    NonFinite,
    Objective,
    ObjectiveSettings,
    ShapeError,
    Tally,
    kl_in_reward,
    kl_terms,
    step_metrics,
)
from consumers.objective.kl import refuse_negative
from consumers.objective.statistics import SUMS
from tests.unit.objective import slow_oracle
from tests.unit.objective.fixture_f import THETA, fixture_f, oracle_case, run_step

ONE = torch.ones((1, 1), dtype=torch.bool)


def estimates(x: float, dtype: torch.dtype = torch.float64) -> dict[str, tuple[float, float]]:
    """Value and gradient of each estimator for theta - ref = x."""
    found = {}
    for name in KlEstimator:
        theta = torch.tensor([[x - 1.0]], dtype=dtype, requires_grad=True)
        value = kl_terms(theta, torch.full((1, 1), -1.0, dtype=dtype), ONE).of(name)
        value.sum().backward()
        assert theta.grad is not None
        found[str(name)] = (value.item(), theta.grad.item())
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.3, {"k1": (0.3, 1.0), "k2": (0.045, 0.3), "k3": (0.040818, 0.259182)}),
        (-0.8, {"k1": (-0.8, 1.0), "k2": (0.32, -0.8), "k3": (0.425541, -1.225541)}),
        (-2.5, {"k2": (3.125, -2.5), "k3": (8.682494, -11.182494)}),
    ],
    ids=["K1", "K2", "K3"],
)
def test_values_and_gradients_are_the_stated_ones(
    x: float, expected: dict[str, tuple[float, float]], dtype: torch.dtype
) -> None:
    """K1, K2, K3."""
    found = estimates(x, dtype)

    for name, pair in expected.items():
        assert found[name] == pytest.approx(pair, rel=1e-6, abs=2e-6)
        assert found[name][0] == pytest.approx(slow_oracle.kl(x, name), abs=1e-5)


def test_a_runaway_token_is_clamped_counted_and_without_gradient() -> None:
    """K4."""
    terms = kl_terms(torch.tensor([[-41.0]]), torch.tensor([[-1.0]]), ONE)

    assert terms.k3_BT.item() == pytest.approx(22015.465795, rel=1e-7)
    assert estimates(-40.0)["k3"][1] == 0.0
    assert terms.clamped_BT.item()
    settings = ObjectiveSettings()
    reference = fixture_f().reference.clone()
    reference[0, 0] = -30.0
    metrics = step_metrics(run_step(fixture_f(reference=reference), settings).tally, settings)
    assert metrics["kl_ref_clamped_fraction"] == 1 / 8


def test_the_reward_loses_the_summed_difference_to_the_reference() -> None:
    """K5."""
    batch = fixture_f()

    found = kl_in_reward(batch.proximal, batch.reference, batch.mask, coefficient=0.1)

    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([-0.01, 0.0, 0.02], abs=1e-12)


def test_the_sign_is_policy_minus_reference() -> None:
    """C29."""
    terms = kl_terms(torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), ONE)

    assert terms.k1_BT.item() == pytest.approx(-0.5)
    assert terms.k2_BT.item() == pytest.approx(0.125)
    assert terms.k3_BT.item() == pytest.approx(0.148721, abs=1e-6)


def test_metrics_name_the_estimator_and_a_negative_k1_is_no_alarm() -> None:
    """C29."""
    reference = fixture_f().theta + 0.5
    settings = ObjectiveSettings()

    metrics = step_metrics(run_step(fixture_f(reference=reference), settings).tally, settings)

    assert metrics["kl_ref_k1"] == pytest.approx(-0.5)
    assert metrics["kl_ref_k2"] == pytest.approx(0.125)
    assert metrics["kl_ref_k3"] == pytest.approx(0.148721, abs=1e-6)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_a_negative_k2_or_k3_is_an_error(name: str) -> None:
    """C29: no formula here gives one, so the sums are damaged by hand."""
    tally = run_step(fixture_f(), ObjectiveSettings()).tally
    sums = tally.sums_K.clone()
    sums[SUMS.index(name)] = -1e-5
    with pytest.raises(NegativeDivergence, match=f"kl_ref_{name}"):
        step_metrics(Tally(sums_K=sums, peaks_K=tally.peaks_K), ObjectiveSettings())
    refuse_negative("kl_ref_k3", -1e-8)


def test_float32_rounding_never_makes_k3_an_alarm() -> None:
    x = torch.linspace(-1e-3, 1e-3, 20_001)[None, :]

    terms = kl_terms(x - 1.0, torch.full_like(x, -1.0), torch.ones(x.shape, dtype=torch.bool))

    assert terms.k3_BT.min().item() >= -1e-7


@pytest.mark.parametrize("estimator", [KlEstimator.K2, KlEstimator.K3])
def test_the_divergence_in_the_loss_may_be_weighted_by_a_constant_ratio(estimator: KlEstimator) -> None:
    settings = ObjectiveSettings(
        objective=Objective.REINFORCE, kl_coefficient=0.1, kl_estimator=estimator, kl_importance_weighted=True
    )
    batch = fixture_f(advantages=torch.zeros(3, dtype=torch.float64))

    result = run_step(batch, settings)

    case = oracle_case()
    terms = [
        slow_oracle.ratio(THETA, case, i, t) * slow_oracle.kl(THETA[i][t] - case.ref[i][t], estimator)
        for i in range(3)
        for t in range(4)
        if case.mask[i][t]
    ]
    assert result.loss == pytest.approx(0.1 * sum(terms) / 8)
    x = -0.3 + 0.9
    slope = x if estimator is KlEstimator.K2 else 1 - math.exp(-x)
    assert result.gradient[1, 3].item() == pytest.approx(0.1 * math.exp(1.2) * slope / 8)


def test_a_missing_or_broken_reference_is_refused() -> None:
    settings = ObjectiveSettings(kl_coefficient=0.1)
    with pytest.raises(ShapeError, match="reference is missing"):
        run_step(fixture_f(reference=None), settings)

    broken = fixture_f().reference.clone()
    broken[0, 1] = math.inf
    with pytest.raises(NonFinite, match="reference is not finite at row 0, position 1"):
        run_step(fixture_f(reference=broken), settings)
    batch = fixture_f(reference=broken)
    with pytest.raises(NonFinite, match="reference"):
        kl_in_reward(batch.proximal, broken, batch.mask, coefficient=0.1)
    with pytest.raises(ShapeError, match="proximal requires a gradient"):
        kl_in_reward(batch.proximal.clone().requires_grad_(), fixture_f().reference, batch.mask, coefficient=0.1)


def test_the_entropy_bonus_lowers_the_loss_and_carries_its_gradient() -> None:
    settings = ObjectiveSettings(entropy_coefficient=0.01)
    entropy = torch.full((3, 4), 2.0, dtype=torch.float64, requires_grad=True)

    with_bonus = run_step(fixture_f(entropy=entropy), settings)

    assert with_bonus.loss == pytest.approx(run_step(fixture_f(), ObjectiveSettings()).loss - 0.02)
    assert entropy.grad is not None
    assert torch.equal(entropy.grad != 0.0, fixture_f().mask)
    assert step_metrics(with_bonus.tally, settings)["entropy"] == pytest.approx(2.0)


def test_entropy_must_fit_its_use() -> None:
    constant = torch.ones((3, 4), dtype=torch.float64)
    with pytest.raises(ShapeError, match="entropy is missing"):
        run_step(fixture_f(), ObjectiveSettings(entropy_coefficient=0.01))
    with pytest.raises(ShapeError, match="entropy must carry a gradient"):
        run_step(fixture_f(entropy=constant), ObjectiveSettings(entropy_coefficient=0.01))
    with pytest.raises(ShapeError, match="the bonus is off"):
        run_step(fixture_f(entropy=constant.clone().requires_grad_()), ObjectiveSettings())
    broken = constant.clone()
    broken[2, 1] = math.nan
    with pytest.raises(NonFinite, match="entropy is not finite at row 2, position 1"):
        run_step(replace(fixture_f(), entropy=broken), ObjectiveSettings())
