"""Every row of the oracle table, against its stated numbers and against slow loops."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from consumers.objective import (
    Aggregation,
    CorrectionKind,
    Denominators,
    KlEstimator,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    RatioLevel,
    RejectionDenominator,
    aggregate,
    importance_ratio,
    sel,
)
from tests.unit.objective import slow_oracle
from tests.unit.objective.fixture_f import MASK, THETA, TOLERANCE, Batch, fixture_f, oracle_case, run_step

PROXIMAL = {"denominator": RatioDenominator.PROXIMAL}
KEPT = {"denominator_after_rejection": RejectionDenominator.KEPT}
NARROW = {"band_low": 0.9, "band_high": 1.1}
NARROW_GEOMETRIC = {"correction": CorrectionKind.GEOMETRIC, **NARROW}
ROW_2_MASKED = [[True, True, True, False], [False] * 4, [True, True, False, False]]
NOTHING = [[False] * 4] * 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: settings for us, words for the loops, the stated numbers."""

    id: str
    ours: dict[str, object]
    loops: dict[str, object]
    loss: float
    gradient: tuple[float, float, float]
    """at [0,1], [1,3], [2,0]"""
    mask: list[list[bool]] = field(default_factory=lambda: MASK)
    row_weights: tuple[float, float, float] = (1.0, 1.0, 1.0)


def row(id: str, ours: dict, loops: dict, loss: float, *gradient: float, **more: object) -> Row:
    return Row(id=id, ours=ours, loops=loops, loss=loss, gradient=gradient, **more)


TABLE = [
    row(
        "O1",
        {"objective": Objective.REINFORCE},
        {"objective": "reinforce"},
        0.656250, -0.125000, 0.062500, -0.250000,
    ),
    row(
        "O2",
        {"objective": Objective.REINFORCE, "correction": CorrectionKind.TOKEN_TIS},
        {"objective": "reinforce", "correction": "token_tis"},
        0.380051, -0.113105, 0.125000, -0.101642,
    ),
    row("O4", {}, {}, -0.484543, -0.138146, 0.207507, -0.091970),
    row("O5", {"clip_high": 0.5}, {"hi": 0.5}, -0.526372, -0.138146, 0.207507, -0.091970),
    row("O6", {"dual_clip": 3.0}, {"dual": 3.0}, -0.504550, -0.138146, 0.000000, -0.091970),
    row("O7", PROXIMAL, {"den": "proximal"}, -0.726206, 0.000000, 0.076338, -0.226209),
    row(
        "O8",
        {**PROXIMAL, "correction": CorrectionKind.TOKEN_TIS},
        {"den": "proximal", "correction": "token_tis"},
        -0.582482, 0.000000, 0.152675, -0.091970,
    ),
    row(
        "O9",
        {**PROXIMAL, "correction": CorrectionKind.SEQUENCE_TIS},
        {"den": "proximal", "correction": "sequence_tis"},
        -0.303501, 0.000000, 0.152675, -0.101642,
    ),
    row(
        "O10",
        {**PROXIMAL, "correction": CorrectionKind.ICEPOP},
        {"den": "proximal", "correction": "icepop"},
        -0.643187, 0.0, 0.0, 0.0,
    ),
    row(
        "O11",
        {**PROXIMAL, "correction": CorrectionKind.ICEPOP, **KEPT},
        {"den": "proximal", "correction": "icepop", "after": "kept"},
        -0.857583, 0.0, 0.0, 0.0,
    ),
    row(
        "O12",
        NARROW_GEOMETRIC,
        {"correction": "geometric", "band": (0.9, 1.1)},
        -0.401251, -0.138146, 0.0, 0.0,
    ),
    row(
        "O13",
        {**NARROW_GEOMETRIC, **KEPT},
        {"correction": "geometric", "band": (0.9, 1.1), "after": "kept"},
        -1.070003, -0.368390, 0.0, 0.0,
    ),
    row(
        "O14",
        {**PROXIMAL, "correction": CorrectionKind.MIS},
        {"den": "proximal", "correction": "mis"},
        -0.456597, 0.0, 0.0, 0.0,
    ),
    row(
        "O15",
        {
            "level": RatioLevel.SEQUENCE,
            "clip_low": 0.05,
            "clip_high": 0.05,
            "aggregation": Aggregation.SEQ_MEAN_TOKEN_MEAN,
        },
        {"level": "sequence", "lo": 0.05, "hi": 0.05, "agg": "seq_mean_token_mean"},
        -0.586413, 0.0, 0.070156, -0.223440,
    ),
    row(
        "O16",
        {"level": RatioLevel.SEQUENCE},
        {"level": "sequence"},
        -0.526871, -0.142829, 0.078925, -0.167580,
    ),
    row(
        "O17",
        {"level": RatioLevel.SEQUENCE_SUM},
        {"level": "sequence_sum"},
        -0.297086, 0.0, 0.377579, -0.224664,
    ),
    row(
        "O18",
        {"objective": Objective.CISPO, "cispo_cap": 1.3},
        {"objective": "cispo", "cap": 1.3},
        0.418451, -0.138146, 0.081250, -0.091970,
    ),
    row(
        "O19",
        {"aggregation": Aggregation.SEQ_MEAN_TOKEN_MEAN},
        {"agg": "seq_mean_token_mean"},
        -0.604914, -0.122797, 0.184451, -0.122626,
    ),
    row(
        "O20",
        {"aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM},
        {"agg": "seq_mean_token_sum"},
        -1.292114, -0.368390, 0.553353, -0.245253,
    ),
    row(
        "O21",
        {"aggregation": Aggregation.SEQ_SUM_CONSTANT, "constant_length": 8},
        {"agg": "seq_sum_constant", "L": 8},
        -0.161514, -0.046049, 0.069169, -0.030657,
    ),
    row("O22", {}, {}, -1.269153, -0.221034, 0.0, -0.147152, mask=ROW_2_MASKED),
    row(
        "O23",
        {"aggregation": Aggregation.SEQ_MEAN_TOKEN_MEAN},
        {"agg": "seq_mean_token_mean"},
        -1.318941, -0.184195, 0.0, -0.183940,
        mask=ROW_2_MASKED,
    ),
    row("O24", {}, {}, 0.0, 0.0, 0.0, 0.0, mask=NOTHING),
    row("O25", {}, {}, -0.344905, -0.138146, 0.103754, -0.022992, row_weights=(1.0, 0.5, 0.25)),
    row(
        "O26",
        {"kl_coefficient": 0.1, "kl_estimator": KlEstimator.K1},
        {"beta": 0.1, "kl": "k1"},
        -0.482043, -0.125646, 0.220007, -0.079470,
    ),
    row(
        "O27",
        {"kl_coefficient": 0.1, "kl_estimator": KlEstimator.K2},
        {"beta": 0.1, "kl": "k2"},
        -0.477668, -0.139396, 0.215007, -0.098220,
    ),
    row(
        "O28",
        {"kl_coefficient": 0.1, "kl_estimator": KlEstimator.K3},
        {"beta": 0.1, "kl": "k3"},
        -0.477581, -0.139461, 0.213147, -0.100079,
    ),
    row("O29", {"two_sided_delta": 2.0}, {"delta": 2.0}, -0.567050, -0.138146, 0.0, -0.091970),
]  # fmt: skip


def batch_of(entry: Row, dtype: torch.dtype) -> Batch:
    return fixture_f(
        dtype,
        mask=torch.tensor(entry.mask),
        row_weights=torch.tensor(entry.row_weights, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.id)
def test_loss_and_gradient_are_the_stated_ones(entry: Row, dtype: torch.dtype) -> None:
    result = run_step(batch_of(entry, dtype), ObjectiveSettings(**entry.ours))

    tolerance = TOLERANCE[dtype]
    assert result.loss == pytest.approx(entry.loss, abs=tolerance)
    gradient = tuple(result.gradient[at].item() for at in ((0, 1), (1, 3), (2, 0)))
    assert gradient == pytest.approx(entry.gradient, abs=tolerance)
    assert torch.all(result.gradient[~torch.tensor(entry.mask)] == 0.0)


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.id)
def test_loss_and_whole_gradient_agree_with_the_slow_loops(entry: Row) -> None:
    case = oracle_case(mask=entry.mask, u=list(entry.row_weights), **entry.loops)

    result = run_step(batch_of(entry, torch.float64), ObjectiveSettings(**entry.ours))

    assert result.loss == pytest.approx(slow_oracle.loss(THETA, case), abs=1e-12)
    expected = torch.tensor(slow_oracle.gradient(THETA, case), dtype=torch.float64)
    torch.testing.assert_close(result.gradient, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_unclipped_ratio_gives_row_o3(dtype: torch.dtype) -> None:
    batch = fixture_f(dtype)
    theta = batch.theta.clone().requires_grad_()

    ratio = importance_ratio(theta, batch.behaviour, batch.mask, RatioLevel.TOKEN).ratio_BT
    token_loss = torch.where(batch.mask, -ratio * batch.advantages[:, None], 0.0)
    denominators = Denominators(tokens=8, rows=3, kept_tokens=8)
    loss = aggregate(token_loss, batch.mask, Aggregation.TOKEN_MEAN, denominators)
    loss.backward()

    assert theta.grad is not None
    assert loss.item() == pytest.approx(-0.530071, abs=TOLERANCE[dtype])
    gradient = tuple(theta.grad[at].item() for at in ((0, 1), (1, 3), (2, 0)))
    assert gradient == pytest.approx((-0.138146, 0.207507, -0.091970), abs=TOLERANCE[dtype])
    assert loss.item() == pytest.approx(slow_oracle.loss(THETA, oracle_case(objective="unclipped")), abs=1e-5)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (RatioLevel.TOKEN, [1.491825, 1.105171, 0.904837, 0.818731, 0.740818, 3.320117, 0.367879, 1.221403]),
        (RatioLevel.SEQUENCE, [1.142631] * 3 + [1.262802] * 3 + [0.670320] * 2),
        (RatioLevel.SEQUENCE_SUM, [1.491825] * 3 + [2.013753] * 3 + [0.449329] * 2),
    ],
)
def test_ratios_of_the_fixture_are_the_stated_ones(level: RatioLevel, expected: list[float]) -> None:
    batch = fixture_f()

    ratio = importance_ratio(batch.theta, batch.behaviour, batch.mask, level)

    assert ratio.ratio_BT[batch.mask].tolist() == pytest.approx(expected, abs=2e-6)
    assert torch.all(ratio.ratio_BT[~batch.mask] == 1.0)


def test_selection_differs_from_multiplication_where_padding_is_nan() -> None:
    batch = fixture_f()

    difference = sel(batch.theta, batch.behaviour, batch.mask)

    assert torch.all(difference[~batch.mask] == 0.0)
    assert torch.isnan((batch.theta - batch.behaviour) * batch.mask).any()


def test_every_row_of_the_table_is_here() -> None:
    assert {f"O{number}" for number in range(1, 30)} == {entry.id for entry in TABLE} | {"O3"}
