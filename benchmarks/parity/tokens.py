"""Log-probabilities and entropies from hidden states: our chunked function beside each oracle's full-logits one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from trl.trainer.utils import selective_log_softmax_and_entropy
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

from benchmarks.parity.batches import Batch
from benchmarks.parity.comparison import Case, Outcome, Side
from consumers.objective import token_logprobs

HIDDEN, VOCABULARY, CHUNK = 16, 97, 7
TEMPERATURE = 0.7
OFFSET = 128.0
"""Added to all logits of a token: it cancels in exact arithmetic, and float32 holds 128 to 8e-6 only."""

FromLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, targets) at temperature 1 to (log-probabilities, entropies)"""


def cases() -> list[Case]:
    """Both numbers, at a temperature other than 1, in chunks that do not divide the tokens."""
    oracles: tuple[tuple[str, FromLogits], ...] = (("trl", selective_log_softmax_and_entropy), ("verl", _verl))
    found = []
    for oracle, from_logits in oracles:
        for at, number in ((0, "log-probabilities"), (1, "entropy")):
            near = f"{number}, temperature {TEMPERATURE}"
            named = {"explained": "rounding of large logits", "proof": near} if number == "entropy" else {}
            found += [
                Case(option=near, oracle=oracle, ours=_ours(at), theirs=_full(from_logits, at)),
                Case(
                    option=f"{number}, logits around {OFFSET:g}",
                    oracle=oracle,
                    ours=_ours(at, OFFSET),
                    theirs=_full(from_logits, at, OFFSET),
                    **named,
                ),
            ]
    return found


def _verl(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    return logprobs_from_logits(logits_NV, targets_N), entropy_from_logits(logits_NV)


def _ours(at: int, offset: float = 0.0) -> Side:
    def numbers(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
        temperature_N = torch.full_like(hidden_NH[:, 0], TEMPERATURE)
        found = token_logprobs(
            hidden_NH, weight_VH, targets_N, temperature_N, entropy=True, entropy_gradient=True, chunk_tokens=CHUNK
        )
        assert found.entropy_N is not None
        return (found.logprobs_N, found.entropy_N)[at]

    return lambda batch: _outcome(batch, numbers, offset)


def _full(from_logits: FromLogits, at: int, offset: float = 0.0) -> Side:
    def numbers(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
        return from_logits((hidden_NH @ weight_VH.T) / TEMPERATURE, targets_N)[at]

    return lambda batch: _outcome(batch, numbers, offset)


def _outcome(batch: Batch, numbers: Callable[[Tensor, Tensor, Tensor], Tensor], offset: float) -> Outcome:
    """Value at every counted token, and the gradient of their weighted sum by the hidden states."""
    dtype, count = batch.theta_BT.dtype, int(batch.mask_BT.sum())
    generator = torch.Generator().manual_seed(count)
    hidden_NH = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64) / HIDDEN**0.5
    targets_N = torch.randint(0, VOCABULARY, (count,), generator=generator)
    hidden_NH[:, 0], weight_VH[:, 0] = offset * TEMPERATURE, 1.0  # the same for every word: an offset of all logits
    hidden_NH = hidden_NH.to(dtype).requires_grad_()
    values_N = numbers(hidden_NH, weight_VH.to(dtype), targets_N)
    (values_N * batch.theta_BT[batch.mask_BT]).sum().backward()
    return Outcome(value=values_N.detach(), gradient=hidden_NH.grad)
