"""Log-probabilities of given tokens from hidden states, without ever holding all the logits.

Guarantees the numbers of log_softmax(hidden @ weight.T / temperature) in float32, gathered at the
targets, in the memory of one chunk of tokens. The last bits of the gradients depend on the chunk
size: record it beside the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consumers.objective.shapes import InvalidSetting, ShapeError

CHUNK_TOKENS = 512
"""Measured by benchmarks/bench_objective.py: smaller chunks read the weight more often, larger ones
hold more logits (512 tokens x 49,152 words x 4 bytes = 96 MiB)."""

_CACHED_ROWS = 32
"""Rows that are normalised at a time: 32 x 49,152 floats are 6 MiB and stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Per token, float32 (float64 where all inputs are)."""

    logprobs_N: Tensor
    """[N] natural log of the target's probability at its temperature"""
    entropy_N: Tensor | None
    """[N] nats, of the whole distribution at that temperature; None if not asked for"""


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenLogprobs:
    """Log-probability of each target, with gradients for hidden states and weight.

        z = (hidden @ weight.T) / temperature             float32, whatever autocast says
        logprob = z[target] - logsumexp(z)                entropy = -sum_v p_v log p_v

    Logits are made again in the backward pass, chunk by chunk: one more matrix product instead of
    N x V floats. There is no bias.

    hidden_NH: float [N,H], at the positions that predict the targets. weight_VH: float [V,H], the
    output embedding. targets_N: int64 [N]. temperature_N: float [N], > 0; a greedy row (0) cannot
    be trained. entropy: also measure it. entropy_gradient: let it carry a gradient, for a bonus.
    Returns TokenLogprobs. Raises ShapeError, InvalidSetting (temperature).

    Source: log-softmax by the log-sum-exp shift; chunking after Wijmans et al. 2024 (Cut your
    losses, 2411.09009), section 4. Departure: chunks of tokens over the whole vocabulary, exact
    gradients (no filter), one temperature a token.
    """
    _check(hidden_NH, weight_VH, targets_N, temperature_N, chunk_tokens)
    wanted = entropy or entropy_gradient
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, temperature_N, wanted, entropy_gradient, chunk_tokens
    )
    return TokenLogprobs(logprobs_N=logprobs_N, entropy_N=entropy_N if wanted else None)


@torch.no_grad()
def score_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    entropy: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenLogprobs:
    """The numbers of token_logprobs without a gradient: proximal, reference and probe scores.

    Bit-identical to token_logprobs at equal inputs and chunk size. Arguments, returns and raises as
    there.
    """
    _check(hidden_NH, weight_VH, targets_N, temperature_N, chunk_tokens)
    logprobs_N, entropy_N, _ = _forward(hidden_NH, weight_VH, targets_N, temperature_N, entropy, chunk_tokens)
    return TokenLogprobs(logprobs_N=logprobs_N, entropy_N=entropy_N if entropy else None)


def scatter_to_rows(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Put N values, in row order, at the N true positions of a mask; 0 elsewhere, gradient kept.

    values_N: float [N]. mask_BT: bool [B,T] with N true. Returns float [B,T]. Raises ShapeError.
    """
    if mask_BT.dtype != torch.bool or mask_BT.dim() != 2:
        raise ShapeError(f"mask must be bool [B,T], is {mask_BT.dtype} {list(mask_BT.shape)}")
    count = int(mask_BT.sum())
    if values_N.shape != (count,):
        raise ShapeError(f"values must be [{count}] like the mask, is {list(values_N.shape)}")
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps the inputs and one log-sum-exp a token; makes the logits again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        entropy: bool,
        entropy_gradient: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, normalizer_N = _forward(
            hidden_NH, weight_VH, targets_N, temperature_N, entropy, chunk_tokens
        )
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperature_N, normalizer_N, entropy_N)
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, temperature_N, normalizer_N, entropy_N = ctx.saved_tensors
        dtype = normalizer_N.dtype
        weight, temperature_N = weight_VH.to(dtype), temperature_N.to(dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.empty_like(hidden_NH) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight) if need_weight else None
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(normalizer_N)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for at, hidden_CH, logits_CV in _chunks(hidden_NH, weight, ctx.chunk_tokens):
                grad_CV = _grad_logits(
                    logits_CV,
                    temperature_N[at],
                    normalizer_N[at],
                    targets_N[at],
                    grad_logprobs_N[at],
                    None if grad_entropy_N is None else (entropy_N[at], grad_entropy_N[at]),
                )
                if grad_hidden_NH is not None:
                    grad_hidden_NH[at] = grad_CV @ weight
                if grad_weight_VH is not None:
                    grad_weight_VH.addmm_(grad_CV.T, hidden_CH)
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


def _forward(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    entropy: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy (0 if not asked for) and log-sum-exp of every token."""
    dtype = _math_dtype(hidden_NH, weight_VH)
    temperature_N = temperature_N.to(dtype)
    logprobs_N = torch.empty(len(hidden_NH), dtype=dtype, device=hidden_NH.device)
    entropy_N, normalizer_N = torch.zeros_like(logprobs_N), torch.empty_like(logprobs_N)
    for at, _, logits_CV in _chunks(hidden_NH, weight_VH.to(dtype), chunk_tokens):
        found = _normalize(logits_CV, temperature_N[at], targets_N[at], entropy)
        logprobs_N[at], normalizer_N[at], entropy_N[at] = found
    return logprobs_N, entropy_N, normalizer_N


def _chunks(hidden_NH: Tensor, weight_VH: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Which tokens, their hidden states, their logits. The logits live until the next chunk only.

    One buffer serves all chunks: a fresh one each time costs more in page faults than its softmax.
    Autocast leaves products into a given buffer alone, so these stay in float32.
    """
    size = min(chunk_tokens, len(hidden_NH))
    buffer_CV = weight_VH.new_empty((size, len(weight_VH)))
    for start in range(0, len(hidden_NH), chunk_tokens):
        at = slice(start, start + chunk_tokens)
        hidden_CH = hidden_NH[at].to(weight_VH.dtype)
        logits_CV = torch.mm(hidden_CH, weight_VH.T, out=buffer_CV[: len(hidden_CH)])
        yield at, hidden_CH, logits_CV


def _normalize(logits_CV: Tensor, temperature_C: Tensor, targets_C: Tensor, entropy: bool) -> tuple[Tensor, ...]:
    """Log-probability, log-sum-exp and entropy of each row. Overwrites the logits.

    Rows are taken a few at a time: they stay in the cache through all passes, and entropy needs the
    probabilities beside the logits.
    """
    found = []
    for start in range(0, len(logits_CV), _CACHED_ROWS):
        rows = slice(start, start + _CACHED_ROWS)
        z_RV = logits_CV[rows].div_(temperature_C[rows, None])
        largest_R = z_RV.amax(dim=1)
        z_RV.sub_(largest_R[:, None])
        chosen_R = z_RV.gather(1, targets_C[rows, None])[:, 0]
        if entropy:
            shares_RV = z_RV.exp()
            total_R = shares_RV.sum(dim=1)
            entropy_R = total_R.log() - shares_RV.mul_(z_RV).sum(dim=1) / total_R
        else:
            total_R = z_RV.exp_().sum(dim=1)
            entropy_R = torch.zeros_like(total_R)
        # chosen is relative to the largest: small, where log-sum-exp may be large and coarse
        found.append((chosen_R - total_R.log(), largest_R + total_R.log(), entropy_R))
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


def _grad_logits(
    logits_CV: Tensor,
    temperature_C: Tensor,
    normalizer_C: Tensor,
    targets_C: Tensor,
    grad_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient for the logits before the temperature, in place.

    (g * (onehot - p) - h * p * (log p + entropy)) / temperature, with g and h the gradients of
    log-probability and entropy.
    """
    scaled_C = grad_C / temperature_C
    for start in range(0, len(logits_CV), _CACHED_ROWS):
        rows = slice(start, start + _CACHED_ROWS)
        log_p_RV = logits_CV[rows].div_(temperature_C[rows, None]).sub_(normalizer_C[rows, None])
        if entropy is None:
            log_p_RV.exp_().mul_(-scaled_C[rows, None])
            continue
        entropy_C, grad_entropy_C = entropy
        slope_RV = log_p_RV + entropy_C[rows, None]
        slope_RV.mul_((grad_entropy_C / temperature_C)[rows, None]).add_(scaled_C[rows, None])
        log_p_RV.exp_().mul_(slope_RV.neg_())
    return logits_CV.scatter_add_(1, targets_C[:, None], scaled_C[:, None])


def _math_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 only where everything is; half precision is raised to float32, never kept."""
    only_double = all(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if only_double else torch.float32


def _check(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    chunk_tokens: int,
) -> None:
    for name, tensor, letters in (("hidden", hidden_NH, "[N,H]"), ("weight", weight_VH, "[V,H]")):
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ShapeError(f"{name} must be float {letters}, is {tensor.dtype} {list(tensor.shape)}")
    count, words = hidden_NH.shape[0], weight_VH.shape[0]
    if hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ShapeError(f"weight must be [V,{hidden_NH.shape[1]}] like hidden, is {list(weight_VH.shape)}")
    if targets_N.dtype != torch.int64 or targets_N.shape != (count,):
        raise ShapeError(f"targets must be int64 [{count}], is {targets_N.dtype} {list(targets_N.shape)}")
    if temperature_N.shape != (count,) or not temperature_N.is_floating_point():
        raise ShapeError(f"temperature must be float [{count}], is {temperature_N.dtype} {list(temperature_N.shape)}")
    if temperature_N.requires_grad:
        raise ShapeError("temperature requires a gradient, must be constant: detach it")
    if chunk_tokens < 1:
        raise ShapeError(f"chunk_tokens must be >= 1, is {chunk_tokens}")
    outside_N = (targets_N < 0) | (targets_N >= words)
    unusable_N = ~(torch.isfinite(temperature_N) & (temperature_N > 0))
    if not bool((outside_N | unusable_N).any()):
        return
    if bool(outside_N.any()):
        row = int(outside_N.nonzero()[0])
        raise ShapeError(f"targets must lie in 0..{words - 1}, row {row} is {int(targets_N[row])}")
    row = int(unusable_N.nonzero()[0])
    raise InvalidSetting(
        f"temperature must be finite and > 0, row {row} is {float(temperature_N[row])}: "
        "a greedily sampled token (temperature 0) cannot be trained"
    )
