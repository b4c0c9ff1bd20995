"""Wrong shapes, dtypes, devices and numbers are refused with the name of the tensor and the row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from consumers.objective import (
    NonFinite,
    ObjectiveError,
    ObjectiveSettings,
    ShapeError,
    aggregate,
    check_inputs,
    count_denominators,
    importance_ratio,
    length_mask,
    policy_loss,
    reinforce_loss,
    sel,
    training_mask,
)
from consumers.objective.options import Aggregation, RatioLevel, RejectionDenominator
from tests.unit.objective.fixture_f import BEHAVIOUR, fixture_f, run_step

FIELDS = {
    "theta_BT": "theta",
    "proximal_BT": "proximal",
    "behaviour_BT": "behaviour",
    "reference_BT": "reference",
    "entropy_BT": "entropy",
}


def checked(**changes: object) -> None:
    check_inputs(replace(fixture_f().inputs(), **changes), ObjectiveSettings())


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), r"must be \[B,T\] = \[3, 4\], is \[3\]"),
        (torch.zeros((3, 5), dtype=torch.float64), r"is \[3, 5\]"),
        (torch.zeros((3, 1), dtype=torch.float64), r"is \[3, 1\]"),
        (torch.zeros((3, 4, 1), dtype=torch.float64), r"is \[3, 4, 1\]"),
        (torch.zeros((3, 4), dtype=torch.bfloat16), "must be float32 or float64, is torch.bfloat16"),
        (torch.zeros((3, 4), dtype=torch.int64), "must be float32 or float64"),
        (torch.zeros((3, 4), dtype=torch.float64, device="meta"), "is on meta"),
    ],
    ids=["row", "wider", "broadcastable", "rank 3", "half", "integer", "device"],
)
def test_a_wrong_token_tensor_is_refused_by_name(field: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=f"{FIELDS[field]} {message}|{FIELDS[field]}.*{message}"):
        checked(**{field: tensor})


@pytest.mark.parametrize("name", ["proximal_BT", "behaviour_BT", "reference_BT", "row_weights_B", "advantages"])
def test_a_stored_tensor_with_a_gradient_is_refused_by_name(name: str) -> None:
    tensor = getattr(fixture_f().inputs(), name).clone().requires_grad_()

    with pytest.raises(ShapeError, match=f"{name.split('_B')[0]} requires a gradient"):
        checked(**{name: tensor})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_BT": torch.ones(3, 4)}, "mask must be bool"),
        ({"mask_BT": torch.ones(4, dtype=torch.bool)}, r"mask must be \[B,T\]"),
        ({"advantages": torch.zeros(2, dtype=torch.float64)}, "advantages must be"),
        ({"advantages": torch.zeros((3, 5), dtype=torch.float64)}, "advantages must be"),
        ({"advantages": torch.zeros(3)}, "advantages is torch.float32 beside"),
        ({"row_weights_B": torch.ones((3, 1), dtype=torch.float64)}, "row_weights must be"),
        ({"row_weights_B": torch.ones(3)}, "row_weights is torch.float32 beside"),
        ({"policy_lag_B": torch.zeros(3)}, "policy_lag must be int64"),
        ({"policy_lag_B": torch.zeros((3, 1), dtype=torch.int64)}, "policy_lag must be int64"),
        ({"row_ids": ("a", "b")}, "row_ids must be 3, are 2"),
        ({"theta_BT": torch.zeros(3, 4)}, "proximal is torch.float64 beside tensors of torch.float32"),
    ],
)
def test_a_wrong_row_tensor_or_mask_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        checked(**changes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["theta", "proximal", "behaviour", "reference"])
def test_a_number_that_is_not_finite_is_refused_with_row_and_position(name: str, bad: float) -> None:
    """C09: no substitution by 0.0, by the trainer's own number, or by a clamp."""
    tensor = getattr(fixture_f(), name).clone()
    tensor[2, 1] = bad

    with pytest.raises(NonFinite) as caught:
        run_step(fixture_f(**{name: tensor}), ObjectiveSettings())

    assert (caught.value.name, caught.value.row, caught.value.position) == (name, 2, 1)
    assert str(caught.value) == f"{name} is not finite at row 2, position 1: refuse this row before the step"


@pytest.mark.parametrize("name", ["advantages", "row_weights"])
def test_a_row_value_that_is_not_finite_is_refused_only_where_the_row_is_live(name: str) -> None:
    tensor = getattr(fixture_f(), name).clone()
    tensor[1] = math.nan
    with pytest.raises(NonFinite, match=f"{name} is not finite at row 1:"):
        run_step(fixture_f(**{name: tensor}), ObjectiveSettings())

    mask = fixture_f().mask.clone()
    mask[1] = False
    result = run_step(fixture_f(**{name: tensor}, mask=mask), ObjectiveSettings())
    assert math.isfinite(result.loss)
    assert torch.isfinite(result.gradient).all()


def test_a_per_token_advantage_that_is_not_finite_has_a_position() -> None:
    advantages = torch.zeros((3, 4), dtype=torch.float64)
    advantages[1, 1] = math.nan
    run_step(fixture_f(advantages=advantages), ObjectiveSettings())
    advantages[1, 2] = math.nan

    with pytest.raises(NonFinite, match="advantages is not finite at row 1, position 2"):
        run_step(fixture_f(advantages=advantages), ObjectiveSettings())


def test_half_precision_log_probabilities_would_have_moved_a_sequence_weight() -> None:
    """C10: refused by dtype; float32 is good enough."""
    exact = torch.full((1, 200), -2.345678, dtype=torch.float64)
    half = exact.to(torch.bfloat16)
    mask = torch.ones((1, 200), dtype=torch.bool)

    with pytest.raises(ShapeError, match="denominator must be float32 or float64"):
        importance_ratio(exact.float(), half, mask, RatioLevel.SEQUENCE_SUM)

    drift = importance_ratio(exact, half.double(), mask, RatioLevel.SEQUENCE_SUM)
    assert drift.ratio_BT[0, 0].item() == pytest.approx(0.680, abs=1e-3)
    single = importance_ratio(exact, exact.float().double(), mask, RatioLevel.SEQUENCE_SUM)
    assert abs(single.log_ratio_BT[0, 0].item()) <= 2e-4


@pytest.mark.parametrize(
    ("tokens", "expected", "count"),
    [([5, 6, 2], [1, 1, 1, 0, 0], 3), ([5, 2, 6, 2], [1, 1, 1, 1, 0], 4)],
)
def test_masks_come_from_lengths_and_never_from_token_values(
    tokens: list[int], expected: list[int], count: int
) -> None:
    """C24: padding and end token share the id 2."""
    lengths = torch.tensor([len(tokens)])

    mask = length_mask(lengths, 5)

    assert mask[0].int().tolist() == expected
    assert int(mask.sum()) == count
    assert length_mask(lengths, 5, padding="left")[0].int().tolist() == expected[::-1]


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        (torch.tensor([1.0]), {}),
        (torch.tensor([[1]]), {}),
        (torch.tensor([6]), {}),
        (torch.tensor([-1]), {}),
        (torch.tensor([1]), {"padding": "both"}),
    ],
)
def test_impossible_lengths_are_refused(lengths: torch.Tensor, options: dict) -> None:
    with pytest.raises(ShapeError):
        length_mask(lengths, 5, **options)


def test_a_token_counts_if_it_is_real_sampled_and_in_a_trained_row() -> None:
    valid = length_mask(torch.tensor([3, 2, 3]), 3)
    sampled = torch.tensor([[True, False, True], [True, True, True], [True, True, True]])

    mask = training_mask(valid, sampled, torch.tensor([True, True, False]))

    assert mask.int().tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    with pytest.raises(ShapeError, match="loss_mask"):
        training_mask(valid, sampled[:, :2], torch.tensor([True] * 3))
    with pytest.raises(ShapeError, match="trained"):
        training_mask(valid, sampled, torch.ones(3))


def test_bare_functions_check_for_themselves() -> None:
    mask, row = fixture_f().mask, torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ShapeError, match="theta"):
        reinforce_loss(row, row, mask)
    with pytest.raises(ShapeError, match="denominator requires a gradient"):
        importance_ratio(fixture_f().theta, fixture_f().theta.clone().requires_grad_(), mask, RatioLevel.TOKEN)
    with pytest.raises(ShapeError, match="keep must be"):
        count_denominators(mask, mask[:, :2], RejectionDenominator.KEPT)
    with pytest.raises(ShapeError, match="loss must be"):
        aggregate(row, mask, Aggregation.TOKEN_MEAN, run_step(fixture_f(), ObjectiveSettings()).denominators)


def test_every_error_is_a_value_error_that_no_retry_helps() -> None:
    assert issubclass(ObjectiveError, ValueError)
    for error in ObjectiveError.__subclasses__():
        assert not error.retriable


def test_selection_blocks_infinities_in_value_and_gradient() -> None:
    """C39."""
    x = torch.tensor([[1.0, math.inf]], requires_grad=True)
    difference = sel(x, torch.tensor([[0.5, math.inf]]), torch.tensor([[True, False]]))
    difference.exp().sum().backward()

    assert difference.tolist() == [[0.5, 0.0]]
    assert x.grad is not None
    assert x.grad[0, 1].item() == 0.0


def test_the_loss_can_be_computed_without_a_gradient() -> None:
    denominators = run_step(fixture_f(), ObjectiveSettings()).denominators
    with torch.no_grad():
        outputs = policy_loss(fixture_f().inputs(), ObjectiveSettings(), denominators)

    assert outputs.loss.item() == pytest.approx(-0.484543, abs=2e-6)
    assert not outputs.loss.requires_grad


def test_inputs_are_left_as_they_were() -> None:
    batch = fixture_f()
    run_step(batch, ObjectiveSettings())

    expected = torch.tensor(BEHAVIOUR, dtype=torch.float64)
    torch.testing.assert_close(batch.behaviour, expected, equal_nan=True, rtol=0, atol=0)
