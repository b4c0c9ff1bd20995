"""Gradient norm and clipping."""

from __future__ import annotations

import math

import pytest
import torch

from consumers.objective import InvalidSetting, NonFinite, clip_gradients, gradient_norm


def parameter(*gradient: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.zeros(len(gradient), dtype=dtype, requires_grad=True)
    tensor.grad = torch.tensor(gradient, dtype=dtype)
    return tensor


def test_the_norm_is_taken_over_all_parameters_in_float32() -> None:
    norm = gradient_norm([parameter(3.0, 0.0), parameter(4.0, dtype=torch.bfloat16), torch.zeros(2)])

    assert norm.item() == 5.0
    assert norm.dtype == torch.float32
    assert gradient_norm([]).item() == 0.0


def test_a_tied_tensor_counts_once() -> None:
    tied = parameter(3.0)
    twin = torch.zeros(1, requires_grad=True)
    twin.grad = tied.grad

    assert gradient_norm([tied, tied, twin, parameter(4.0)]).item() == 5.0
    clip_gradients([tied, tied, twin], torch.tensor(3.0), 1.0)
    assert tied.grad.item() == pytest.approx(1.0)


def test_gradients_are_scaled_to_the_limit_and_left_alone_below_it() -> None:
    parameters = [parameter(3.0), parameter(4.0)]
    clip_gradients(parameters, gradient_norm(parameters), 10.0)
    assert [p.grad.item() for p in parameters] == [3.0, 4.0]

    clip_gradients(parameters, gradient_norm(parameters), 1.0)
    assert [p.grad.item() for p in parameters] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_scales_nothing(bad: float) -> None:
    parameters = [parameter(bad, 1.0), parameter(2.0)]
    norm = gradient_norm(parameters)
    assert not torch.isfinite(norm)

    with pytest.raises(NonFinite, match="gradient norm"):
        clip_gradients(parameters, norm, 1.0)
    assert parameters[1].grad.item() == 2.0
    with pytest.raises(InvalidSetting, match="max_norm"):
        clip_gradients(parameters, torch.tensor(1.0), 0.0)
