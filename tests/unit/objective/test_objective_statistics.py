"""Statistics: rows P2 and P3, sums over micro-batches, percentiles, and that every name is documented."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from consumers import objective
from consumers.objective import (
    METRICS,
    CorrectionKind,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    ShapeError,
    percentiles,
    step_metrics,
)
from consumers.objective.statistics import PEAKS, SUMS
from tests.unit.objective.fixture_f import fixture_f, one_token, run_step

DOCS = Path(__file__).resolve().parents[3] / "docs" / "objectives.md"


@pytest.mark.parametrize(
    ("clip_high", "expected"),
    [
        (0.2, {"clipfrac": 0.375, "clipfrac_high": 0.25, "clipfrac_low": 0.125}),
        (0.5, {"clipfrac": 0.125, "clipfrac_high": 0.0, "clipfrac_low": 0.125}),
    ],
)
def test_clip_fractions_of_the_fixture_are_the_stated_ones(clip_high: float, expected: dict[str, float]) -> None:
    """P2."""
    settings = ObjectiveSettings(clip_high=clip_high)

    metrics = step_metrics(run_step(fixture_f(), settings).tally, settings)

    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_mismatch_metrics_of_the_fixture_are_the_stated_ones(dtype: torch.dtype) -> None:
    """P3."""
    settings = ObjectiveSettings(denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.TOKEN_TIS)

    metrics = step_metrics(run_step(fixture_f(dtype), settings, cut=[[2], [0, 1]]).tally, settings)

    expected = {
        "mismatch_raw_mean": 1.139141,
        "mismatch_applied_mean": 1.049355,
        "mismatch_raw_ess": 0.756400,
        "mismatch_applied_ess": 0.852336,
        "mismatch_raw_chi2": 0.715549,
        "mismatch_outside_band_fraction": 0.25,
        "mismatch_raw_k3": 0.139141,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [({"dual_clip": 3.0}, "clipfrac_dual", 1 / 8), ({"two_sided_delta": 2.0}, "clipfrac_delta", 1 / 8)],
)
def test_optional_bounds_have_a_fraction_of_their_own(changes: dict, name: str, expected: float) -> None:
    settings = ObjectiveSettings(**changes)
    assert step_metrics(run_step(fixture_f(), settings).tally, settings)[name] == expected
    assert name not in step_metrics(run_step(fixture_f(), ObjectiveSettings()).tally, ObjectiveSettings())


def test_reinforce_reports_drift_but_no_clip_fraction() -> None:
    settings = ObjectiveSettings(objective=Objective.REINFORCE)

    metrics = step_metrics(run_step(fixture_f(), settings).tally, settings)

    assert metrics["ratio_ess"] < 1.0
    assert not [name for name in metrics if name.startswith("clipfrac")]


def test_a_weight_of_one_is_a_full_sample() -> None:
    metrics = step_metrics(run_step(one_token(0.0, 1.0), ObjectiveSettings()).tally, ObjectiveSettings())

    assert (metrics["ratio_ess"], metrics["ratio_chi2"], metrics["ratio_k3"], metrics["ppo_kl"]) == (1.0, 0.0, 0.0, 0.0)


def test_a_step_without_tokens_reports_counts_only() -> None:
    result = run_step(fixture_f(mask=torch.zeros((3, 4), dtype=torch.bool)), ObjectiveSettings())

    assert step_metrics(result.tally, ObjectiveSettings()) == {"loss": 0.0, "tokens": 0.0, "rows": 0.0}
    assert all(peak == -math.inf for peak in result.tally.named_peaks().values())


def test_a_micro_batch_without_rows_adds_nothing() -> None:
    settings = ObjectiveSettings()
    whole = run_step(fixture_f(), settings)
    with_empty = run_step(fixture_f(), settings, cut=[[], [0, 1, 2]])

    assert step_metrics(with_empty.tally, settings) == pytest.approx(step_metrics(whole.tally, settings))


def test_collected_values_are_those_of_the_mask() -> None:
    result = run_step(fixture_f(), ObjectiveSettings(), cut=[[1], [0, 2]])

    together = torch.cat([output.log_ratio_N for output in result.outputs])
    expected = [-0.2, -0.3, 1.2, 0.4, 0.1, -0.1, -1.0, 0.2]
    assert together.tolist() == pytest.approx(expected)
    assert not together.requires_grad
    mismatch = torch.cat([output.mismatch_log_ratio_N for output in result.outputs])
    assert mismatch.tolist() == pytest.approx([-0.1, -0.2, 1.0, 0.3, -0.1, -0.1, -0.9, 0.1])


def test_percentiles_are_those_of_torch() -> None:
    torch.manual_seed(1)
    for count in (1, 2, 7, 1000):
        values = torch.randn(count)
        found = percentiles(values)
        levels = torch.tensor([0.01, 0.05, 0.5, 0.95, 0.99], dtype=torch.float64)
        expected = torch.quantile(values.double(), levels).tolist()
        assert list(found) == ["p01", "p05", "p50", "p95", "p99"]
        assert list(found.values()) == pytest.approx(expected)
    assert percentiles(torch.zeros(0)) == {}
    with pytest.raises(ShapeError, match="values must be float"):
        percentiles(torch.zeros(2, 2))


def test_every_metric_is_registered_and_explained_in_the_documentation() -> None:
    produced: set[str] = set()
    entropy = torch.ones((3, 4), dtype=torch.float64)
    for settings in (
        ObjectiveSettings(dual_clip=3.0, two_sided_delta=2.0),
        ObjectiveSettings(objective=Objective.CISPO),
    ):
        produced |= step_metrics(run_step(fixture_f(entropy=entropy), settings).tally, settings).keys()

    assert set(METRICS) == produced
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in METRICS if f"`{name}`" not in text] == []


def test_sums_and_peaks_have_unique_names() -> None:
    assert len(set(SUMS)) == len(SUMS)
    assert len(set(PEAKS)) == len(PEAKS)


def test_all_names_the_package_promises_exist_and_are_sorted() -> None:
    assert sorted(objective.__all__) == sorted(set(objective.__all__))
    assert [name for name in objective.__all__ if not hasattr(objective, name)] == []
