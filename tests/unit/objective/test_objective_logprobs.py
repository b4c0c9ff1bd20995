"""Chunked log-probabilities against the plain formula, in value, gradient and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from consumers.objective import (
    InvalidSetting,
    ShapeError,
    scatter_to_rows,
    score_logprobs,
    token_logprobs,
)

torch.set_num_threads(1)


def problem(dtype: torch.dtype = torch.float64, tokens: int = 13, scale: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, 6, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(70, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(70, (tokens,), generator=generator)
    temperature = torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5
    return hidden.to(dtype), weight.to(dtype), targets, temperature.to(dtype)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The formula with all logits in memory: log-probabilities and entropy."""
    log_p = torch.log_softmax(hidden @ weight.T / temperature[:, None], dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)


TILES_OF_16_WORDS = 2**19
"""chunk_tokens at which a tile has room for 16 words only, whatever the number of tokens"""


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 512, TILES_OF_16_WORDS, 2**23, 2**30])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_log_softmax(chunk_tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    upstream = torch.linspace(-1, 1, 13, dtype=dtype)
    results = []
    for chunked in (True, False):
        hidden, weight, targets, temperature = problem(dtype)
        hidden.requires_grad_(), weight.requires_grad_()
        if chunked:
            values = token_logprobs(hidden, weight, targets, temperature, chunk_tokens=chunk_tokens).logprobs_N
        else:
            values = plain(hidden, weight, targets, temperature)[0]
        (values * upstream).sum().backward()
        results.append((values.detach(), hidden.grad, weight.grad))

    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chunk", [3, 2**21])
def test_gradients_pass_the_numerical_check(chunk: int) -> None:
    hidden, weight, targets, temperature = problem(tokens=4)
    weight = weight[:9].clone()
    targets = targets % 9

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        found = token_logprobs(hidden, weight, targets, temperature, entropy_gradient=True, chunk_tokens=chunk)
        assert found.entropy_N is not None
        return found.logprobs_N, found.entropy_N

    assert torch.autograd.gradcheck(function, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("chunk_tokens", [150, TILES_OF_16_WORDS])
def test_entropy_and_its_gradient_are_exact_over_tiles(chunk_tokens: int) -> None:
    hidden, weight, targets, temperature = problem(tokens=200)
    hidden.requires_grad_(), weight.requires_grad_()

    found = token_logprobs(hidden, weight, targets, temperature, entropy_gradient=True, chunk_tokens=chunk_tokens)
    (found.logprobs_N.sum() + (found.entropy_N * 0.3).sum()).backward()

    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logprobs, entropy = plain(hidden, weight, targets, temperature)
    (logprobs.sum() + (entropy * 0.3).sum()).backward()
    torch.testing.assert_close(ours, (hidden.grad, weight.grad))
    torch.testing.assert_close(found.entropy_N, entropy)


@pytest.mark.parametrize("chunk_tokens", [512, TILES_OF_16_WORDS])
def test_large_logits_lose_no_digits(chunk_tokens: int) -> None:
    hidden, weight, targets, temperature = problem(torch.float32, scale=60.0)
    exact = plain(hidden.double(), weight.double(), targets, temperature.double())[0]

    found = score_logprobs(hidden, weight, targets, temperature, chunk_tokens=chunk_tokens).logprobs_N

    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1e-5)
    assert torch.isfinite(found).all()


def test_an_offset_of_all_logits_costs_no_digits() -> None:
    """Whole numbers, so that the logits are exact: only the log-sum-exp could round."""
    hidden = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    weight = torch.stack([torch.full((5,), 5000.0), torch.arange(5.0)], dim=1)
    targets, temperature = torch.tensor([4, 4, 3]), torch.ones(3)

    found = score_logprobs(hidden, weight, targets, temperature).logprobs_N

    exact = plain(hidden.double(), weight.double(), targets, temperature.double())[0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_scoring_is_bit_identical_to_training() -> None:
    inputs = problem(torch.float32)
    trained = token_logprobs(*inputs, entropy=True, chunk_tokens=5)
    scored = score_logprobs(*inputs, entropy=True, chunk_tokens=5)

    assert torch.equal(trained.logprobs_N, scored.logprobs_N)
    assert torch.equal(trained.entropy_N, scored.entropy_N)
    assert not scored.logprobs_N.requires_grad
    assert score_logprobs(*inputs).entropy_N is None


def test_measured_entropy_is_exact_and_carries_no_gradient() -> None:
    hidden, weight, targets, temperature = problem()
    hidden.requires_grad_()

    found = token_logprobs(hidden, weight, targets, temperature, entropy=True)

    torch.testing.assert_close(found.entropy_N, plain(hidden, weight, targets, temperature)[1].detach())
    assert not found.entropy_N.requires_grad
    assert found.logprobs_N.requires_grad
    assert token_logprobs(hidden, weight, targets, temperature).entropy_N is None


def test_temperature_divides_the_logits_and_not_the_log_probability() -> None:
    """C01: logits [2, 1, 0], T = 0.5, token 1."""
    hidden, weight = torch.eye(3), torch.tensor([[2.0], [1.0], [0.0]]).repeat(1, 3)
    targets, temperature = torch.tensor([1, 1, 1]), torch.tensor([0.5, 1.0, 0.5])

    found = score_logprobs(hidden, weight, targets, temperature).logprobs_N.tolist()

    assert found == pytest.approx([-2.142932, -1.407606, -2.142932], abs=1e-6)
    assert math.exp(found[0] - -1.407606) == pytest.approx(0.479349, abs=1e-6)
    assert math.exp(found[0] - -2.815212) == pytest.approx(1.958699, abs=1e-5)


def test_the_sampled_token_is_scored_and_not_the_likeliest() -> None:
    """C03."""
    hidden, weight, targets, temperature = problem()
    found = score_logprobs(hidden, weight, targets, temperature).logprobs_N
    best = torch.log_softmax(hidden @ weight.T / temperature[:, None], dim=-1).amax(dim=1)

    assert (found < best).any()
    torch.testing.assert_close(found, plain(hidden, weight, targets, temperature)[0])


@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_only_the_gradients_that_are_needed_are_made(which: str) -> None:
    hidden, weight, targets, temperature = problem()
    wanted, other = (hidden, weight) if which == "hidden" else (weight, hidden)
    wanted.requires_grad_()

    token_logprobs(hidden, weight, targets, temperature).logprobs_N.sum().backward()

    assert wanted.grad is not None
    assert other.grad is None


def test_autocast_does_not_lower_the_precision() -> None:
    hidden, weight, targets, temperature = problem(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    expected = plain(hidden, weight, targets, temperature)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_logprobs(hidden, weight, targets, temperature).logprobs_N
        found.sum().backward()
    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    expected.sum().backward()

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, (hidden.grad, weight.grad), atol=1e-5, rtol=1e-5)


def test_half_precision_states_are_raised_to_float32() -> None:
    hidden, weight, targets, temperature = problem(torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()

    found = token_logprobs(hidden, weight, targets, temperature.float())
    found.logprobs_N.sum().backward()

    expected = plain(hidden.float(), weight.float(), targets, temperature.float())[0]
    assert found.logprobs_N.dtype == torch.float32
    torch.testing.assert_close(found.logprobs_N, expected, atol=1e-5, rtol=1e-5)
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_no_tokens_give_no_values_and_a_zero_gradient() -> None:
    hidden, weight, targets, temperature = (part[:0] if len(part) == 13 else part for part in problem())
    weight = weight.clone().requires_grad_()

    token_logprobs(hidden, weight, targets, temperature).logprobs_N.sum().backward()

    assert torch.all(weight.grad == 0.0)


@pytest.mark.parametrize(
    ("place", "change", "error", "message"),
    [
        (0, lambda t: t[0], ShapeError, "hidden must be float"),
        (0, lambda t: t[:, :5], ShapeError, "weight must be"),
        (1, lambda t: t.long(), ShapeError, "weight must be float"),
        (2, lambda t: t[:5], ShapeError, "targets must be int64"),
        (2, lambda t: t.int(), ShapeError, "targets must be int64"),
        (2, lambda t: t + 70, ShapeError, "targets must lie in 0..69, row 0"),
        (2, lambda t: t.index_fill(0, torch.tensor([4]), -100), ShapeError, "row 4 is -100"),
        (3, lambda t: t[:1], ShapeError, "temperature must be float"),
        (3, lambda t: t.long(), ShapeError, "temperature must be float"),
        (3, lambda t: t.clone().requires_grad_(), ShapeError, "temperature requires a gradient"),
        (3, lambda t: t.index_fill(0, torch.tensor([2]), 0.0), InvalidSetting, "row 2 is 0.0: a greedily"),
        (3, lambda t: t.index_fill(0, torch.tensor([2]), -1.0), InvalidSetting, "temperature"),
        (3, lambda t: t.index_fill(0, torch.tensor([2]), math.nan), InvalidSetting, "temperature"),
    ],
)
def test_wrong_inputs_are_refused_by_name(place: int, change, error: type[Exception], message: str) -> None:
    inputs = list(problem())
    inputs[place] = change(inputs[place])
    for function in (token_logprobs, score_logprobs):
        with pytest.raises(error, match=message):
            function(*inputs)


def test_a_chunk_holds_at_least_one_token() -> None:
    with pytest.raises(ShapeError, match="chunk_tokens"):
        score_logprobs(*problem(), chunk_tokens=0)


def test_values_go_to_their_places_with_their_gradient() -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    rows = scatter_to_rows(values, mask)
    (rows * torch.tensor([[1.0, 9.0, 2.0], [9.0, 3.0, 9.0]])).sum().backward()

    assert rows.tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]
    assert values.grad.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ShapeError, match="values must be"):
        scatter_to_rows(values[:2], mask)
    with pytest.raises(ShapeError, match="mask must be bool"):
        scatter_to_rows(values, mask.int())
