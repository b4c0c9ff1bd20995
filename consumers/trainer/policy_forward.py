"""The trainer's forward pass: log-probabilities of completion tokens, with or without a gradient.

One pass over prompt and completion; only the positions that predict completion tokens reach the output
embedding, in chunks. Guarantees float32 logits at each row's own temperature, and no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consumers.objective.logprobs import TokenLogprobs, scatter_to_rows, score_logprobs, token_logprobs
from consumers.trainer.tensors import RowTensors
from schemas.errors import ConfigError

HEAD_TOLERANCE = 1e-3
"""Logits computed our way against the model's own; rounding is some 1e-6"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSettings:
    """How the pass is computed."""

    chunk_tokens: int
    autocast: bool
    """bfloat16 in the body of the model"""


def completion_logprobs(
    model: Any, tensors: RowTensors, settings: ForwardSettings, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """theta_BT and entropy_BT of the rows; theta carries a gradient, entropy only when asked to. 0 outside valid."""
    hidden_NH, weight_VH = _hidden(model, tensors, settings)
    found = token_logprobs(
        hidden_NH,
        weight_VH,
        tensors.targets_BT[tensors.valid_BT],
        _temperatures(tensors),
        entropy=True,
        entropy_gradient=entropy_gradient,
        chunk_tokens=settings.chunk_tokens,
    )
    return _spread(found, tensors)


@torch.no_grad()
def score_rows(model: Any, tensors: RowTensors, settings: ForwardSettings) -> tuple[Tensor, Tensor]:
    """The numbers of `completion_logprobs` without a gradient."""
    hidden_NH, weight_VH = _hidden(model, tensors, settings)
    found = score_logprobs(
        hidden_NH,
        weight_VH,
        tensors.targets_BT[tensors.valid_BT],
        _temperatures(tensors),
        entropy=True,
        chunk_tokens=settings.chunk_tokens,
    )
    return _spread(found, tensors)


@torch.no_grad()
def check_head(model: Any) -> None:
    """ConfigError for a model whose logits are not hidden states times output embedding (scaled, capped, biased)."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"{type(model).__name__} has no plain output embedding: it cannot be trained here")
    vocabulary = head.weight.shape[0]
    tokens = (torch.arange(1, 9, device=model.device) * 7919 % vocabulary)[None, :]
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    ours = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.float() @ head.weight.float().T
    difference = float((logits - ours).abs().max())
    if not difference <= HEAD_TOLERANCE * max(1.0, float(logits.abs().max())):
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the output embedding (difference {difference:.3g}): "
            "the trainer would compute other log-probabilities than the generators"
        )


def _hidden(model: Any, tensors: RowTensors, settings: ForwardSettings) -> tuple[Tensor, Tensor]:
    # Padding stands to the right and attention looks left: no mask is needed, positions count from 0.
    with torch.autocast(tensors.tokens_BL.device.type, dtype=torch.bfloat16, enabled=settings.autocast):
        hidden_BLH = model.base_model(input_ids=tensors.tokens_BL, use_cache=False).last_hidden_state
    rows_N = tensors.valid_BT.nonzero()[:, 0]
    hidden_NH: Tensor = hidden_BLH[rows_N, tensors.predictor_BT[tensors.valid_BT]]
    weight_VH: Tensor = model.get_output_embeddings().weight
    return hidden_NH, weight_VH


def _temperatures(tensors: RowTensors) -> Tensor:
    return tensors.temperatures_B[:, None].expand(tensors.valid_BT.shape)[tensors.valid_BT]


def _spread(found: TokenLogprobs, tensors: RowTensors) -> tuple[Tensor, Tensor]:
    assert found.entropy_N is not None
    return scatter_to_rows(found.logprobs_N, tensors.valid_BT), scatter_to_rows(found.entropy_N, tensors.valid_BT)
