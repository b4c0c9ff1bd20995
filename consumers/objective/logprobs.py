"""Log-probabilities of given tokens from hidden states, without ever holding all the logits.

Guarantees the numbers of log_softmax(hidden @ weight.T / temperature) in float32, gathered at the
targets, in the memory of one tile of them (some tokens x some words). The last bits depend on the
chunk size: record it beside the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consumers.objective.shapes import InvalidSetting, ShapeError

CHUNK_TOKENS = 2048
"""Tokens whose log-sum-exp is made at a time; each chunk reads the whole weight once."""

_TILE_FLOATS = {"cpu": 2**23}
_TILE_FLOATS_ELSEWHERE = 2**26
"""Logits that exist at a time: 32 MiB, 256 MiB on an accelerator. Much smaller tiles fit the cache, but
every operation on a tile ends in a barrier, and on a busy machine the barriers cost more."""


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

    Logits are made again in the backward pass, tile by tile: one more matrix product instead of
    N x V floats. There is no bias.

    hidden_NH: float [N,H], at the positions that predict the targets. weight_VH: float [V,H], the
    output embedding. targets_N: int64 [N]. temperature_N: float [N], > 0; a greedy row (0) cannot
    be trained. entropy: also measure it. entropy_gradient: let it carry a gradient, for a bonus.
    Returns TokenLogprobs. Raises ShapeError, InvalidSetting (temperature).

    Source: the running log-sum-exp of Milakov and Gimelshein 2018 (1805.02867), algorithm 3; tiles
    after Wijmans et al. 2024 (Cut your losses, 2411.09009), section 4. Departure: exact gradients
    (no filter), one temperature a token, matrix products by the library and no kernel of our own.
    """
    _check(hidden_NH, weight_VH, targets_N, temperature_N, chunk_tokens)
    wanted = entropy or entropy_gradient
    logprobs_N, entropy_N = _TiledLogprobs.apply(  # type: ignore[no-untyped-call]
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


class _TiledLogprobs(torch.autograd.Function):
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
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=dtype) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight) if need_weight else None
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(normalizer_N)
        for tile in _tiles(hidden_NH, weight, targets_N, temperature_N, ctx.chunk_tokens):
            at, words = tile.tokens, tile.words
            grad_CW = _grad_logits(
                tile,
                temperature_N[at],
                normalizer_N[at],
                grad_logprobs_N[at],
                None if grad_entropy_N is None else (entropy_N[at], grad_entropy_N[at]),
            )
            if grad_hidden_NH is not None:
                grad_hidden_NH[at].addmm_(grad_CW, weight[words])
            if grad_weight_VH is not None:
                grad_weight_VH[words].addmm_(grad_CW.T, tile.hidden_CH)
        # Autograd lowers both to the dtype of their inputs where that is half.
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


class _Tile(NamedTuple):
    """Logits of some tokens for some words, at the temperature of each token."""

    tokens: slice
    words: slice
    hidden_CH: Tensor
    logits_CW: Tensor
    """lives until the next tile only, and may be overwritten"""
    target_C1: Tensor
    """place of the target among these words; any place where it is not among them"""
    is_here_C: Tensor
    """bool: the target is among these words"""


def _tiles(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature_N: Tensor, chunk_tokens: int
) -> Iterator[_Tile]:
    """All words for some tokens, then all words for the next ones; weight in the dtype of the maths.

    One buffer serves all tiles: a fresh one each time costs more in page faults than its softmax.
    Autocast leaves products into a given buffer alone, so these stay in float32.
    """
    device = weight_VH.device
    width = max(1, _TILE_FLOATS.get(device.type, _TILE_FLOATS_ELSEWHERE) // chunk_tokens)
    height = min(chunk_tokens, len(hidden_NH))
    buffer = weight_VH.new_empty(height * min(width, len(weight_VH)))
    for start in range(0, len(hidden_NH), chunk_tokens):
        tokens = slice(start, start + chunk_tokens)
        hidden_CH = hidden_NH[tokens].to(weight_VH.dtype)
        for first in range(0, len(weight_VH), width):
            words = slice(first, first + width)
            shape = (len(hidden_CH), len(weight_VH[words]))
            logits_CW = buffer[: shape[0] * shape[1]].view(shape)
            torch.mm(hidden_CH, weight_VH[words].T, out=logits_CW)
            place_C = targets_N[tokens] - first
            yield _Tile(
                tokens=tokens,
                words=words,
                hidden_CH=hidden_CH,
                logits_CW=logits_CW.div_(temperature_N[tokens, None]),
                target_C1=place_C.clamp(0, shape[1] - 1)[:, None],
                is_here_C=(place_C >= 0) & (place_C < shape[1]),
            )


def _forward(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    entropy: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy (0 if not asked for) and log-sum-exp of every token.

    Running over the tiles, relative to the largest logit so far: the sum of exp(z - largest), and for
    the entropy the sum of exp(z - largest) * (z - largest).
    """
    dtype = _math_dtype(hidden_NH, weight_VH)
    weight, temperature_N = weight_VH.to(dtype), temperature_N.to(dtype)
    chosen_N = torch.zeros(len(hidden_NH), dtype=dtype, device=hidden_NH.device)
    # The least finite number and not -inf, which would make 0 * inf below.
    largest_N = torch.full_like(chosen_N, torch.finfo(dtype).min)
    total_N, weighted_N = torch.zeros_like(chosen_N), torch.zeros_like(chosen_N)
    for tile in _tiles(hidden_NH, weight, targets_N, temperature_N, chunk_tokens):
        at, z_CW = tile.tokens, tile.logits_CW
        target_C = z_CW.gather(1, tile.target_C1)[:, 0]
        chosen_N[at] = torch.where(tile.is_here_C, target_C, chosen_N[at])
        largest_C = torch.maximum(largest_N[at], z_CW.amax(dim=1))
        shift_C = largest_N[at] - largest_C
        scale_C = shift_C.exp()
        z_CW.sub_(largest_C[:, None])
        if entropy:
            share_CW = z_CW.exp()
            moved_C = scale_C * (weighted_N[at] + shift_C * total_N[at])
            weighted_N[at] = moved_C + z_CW.mul_(share_CW).sum(dim=1)
        else:
            share_CW = z_CW.exp_()
        total_N[at] = scale_C * total_N[at] + share_CW.sum(dim=1)
        largest_N[at] = largest_C
    log_total_N = total_N.log()
    entropy_N = log_total_N - weighted_N / total_N if entropy else torch.zeros_like(chosen_N)
    # chosen - largest first: it is small, where the log-sum-exp may be large and coarse.
    return (chosen_N - largest_N) - log_total_N, entropy_N, largest_N + log_total_N


def _grad_logits(
    tile: _Tile,
    temperature_C: Tensor,
    normalizer_C: Tensor,
    grad_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient for the logits before the temperature, in place.

    (g * (onehot - p) - h * p * (log p + entropy)) / temperature, with g and h the gradients of
    log-probability and entropy.
    """
    scaled_C = grad_C / temperature_C
    log_p_CW = tile.logits_CW.sub_(normalizer_C[:, None])
    if entropy is None:
        grad_CW = log_p_CW.exp_().mul_(-scaled_C[:, None])
    else:
        entropy_C, grad_entropy_C = entropy
        slope_CW = (log_p_CW + entropy_C[:, None]).mul_((grad_entropy_C / temperature_C)[:, None])
        grad_CW = log_p_CW.exp_().mul_(slope_CW.add_(scaled_C[:, None]).neg_())
    onehot_C = torch.where(tile.is_here_C, scaled_C, 0.0)
    return grad_CW.scatter_add_(1, tile.target_C1, onehot_C[:, None])


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
