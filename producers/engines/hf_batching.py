"""A running batch: rows that were started together and take one token a step, over a shared KV cache.

Rows of unequal prompts are padded on the left, with their own positions. A batch without padding passes no
mask at all, so what a single group computes is the same whatever else the engine serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infra.model import transformers_module
from infra.ports import EngineRequest
from producers.engines.hf_sampling import draw, uniforms
from producers.engines.members import SampledMember
from schemas.errors import IllegalState
from schemas.trajectory import Sampling


@dataclass(slots=True, kw_only=True)
class RowState(SampledMember):
    """One member with the numbers its tokens are drawn by."""

    uniform: npt.NDArray[np.float64]
    """[most tokens of this row]"""

    def finished(self) -> bool:
        """Stopped, or out of tokens."""
        return self.stopped() or len(self.tokens) >= len(self.uniform)


def start_rows(request: EngineRequest, now_us: int) -> list[RowState]:
    """The members that are asked for, before their next token."""
    prompt, count, group = request.request, request.new_tokens, str(request.request.group_id)
    prompt_ids = [*(int(token) for token in prompt.prompt_token_ids), *request.context]
    return [
        RowState(
            group_id=group,
            index_in_group=index,
            prompt=prompt_ids,
            sampling=prompt.sampling,
            uniform=uniforms(request.rng_seed, group, index, count, context_tokens=len(request.context)),
            started_at_us=now_us,
        )
        for index in request.members
    ]


def greedy_rows(prompts: Sequence[Sequence[int]], tokens: int, now_us: int) -> list[RowState]:
    """One row a prompt that takes its `tokens` likeliest tokens; they belong to no group."""
    return [
        RowState(
            group_id="greedy",
            index_in_group=index,
            prompt=[int(token) for token in prompt],
            sampling=Sampling(temperature=0.0, max_tokens=tokens),
            uniform=np.zeros(tokens),
            started_at_us=now_us,
        )
        for index, prompt in enumerate(prompts)
    ]


class RunningBatch:
    """Rows that advance together. State: the rows, and a KV cache that can be forgotten at any time."""

    def __init__(self, model: Any, rows: Sequence[RowState]) -> None:
        self._model = model
        self._device = model.device
        self._sampled = 0
        """tokens every running row has"""
        self._context = CachedContext(model)
        self._rows = list(rows)
        width = max(len(row.uniform) for row in rows)
        uniform_BT = np.zeros((len(rows), width))
        for place, row in enumerate(rows):
            uniform_BT[place, : len(row.uniform)] = row.uniform
        temperatures = [row.sampling.temperature for row in rows]
        self._uniform_BT = torch.from_numpy(uniform_BT).to(self._device)
        self._temperature_B = torch.tensor(temperatures, dtype=torch.float32, device=self._device)
        self._last_B = torch.zeros(len(rows), dtype=torch.long, device=self._device)

    @property
    def rows(self) -> Sequence[RowState]:
        """Rows that are not finished."""
        return self._rows

    def forget_cache(self) -> None:
        """The weights changed: every key and value in the cache is wrong now."""
        self._context = CachedContext(self._model)

    @torch.inference_mode()
    def step(self, version: int, proof: int) -> list[RowState]:
        """One token for every row; returns the rows it finished."""
        logits_BV = self._next_logits()
        token_B, logprob_B = draw(logits_BV, self._temperature_B, self._uniform_BT[:, self._sampled])
        if not bool(torch.isfinite(logprob_B).all()):
            raise IllegalState(f"the model of version {version} gives log-probabilities that are not finite: reload it")
        self._sampled += 1
        self._last_B = token_B
        for row, token, logprob in zip(self._rows, token_B.tolist(), logprob_B.tolist(), strict=True):
            row.take((token,), (logprob,), version, proof)
        finished = [row for row in self._rows if row.finished()]
        if finished:
            self._keep([place for place, row in enumerate(self._rows) if not row.finished()])
        return finished

    def _next_logits(self) -> torch.Tensor:
        if self._context.empty:
            return self._context.prefill([row.prompt + row.tokens for row in self._rows])
        return self._context.extend(self._last_B[:, None])[:, -1]

    def _keep(self, places: list[int]) -> None:
        self._rows = [self._rows[place] for place in places]
        if not places:
            return
        self._context.select(places)
        index = torch.tensor(places, dtype=torch.long, device=self._device)
        self._last_B = self._last_B[index]
        self._uniform_BT = self._uniform_BT[index]
        self._temperature_B = self._temperature_B[index]


class CachedContext:
    """Token contexts inside a model's KV cache. The one forward pass: sampling and probe scoring both use it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = transformers_module().DynamicCache(config=model.config)
        self._mask_BT: torch.Tensor | None = None
        self._position_B: torch.Tensor | None = None
        self.empty = True

    def prefill(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read whole contexts (equal ones once only) and return the logits after each, [B, V]."""
        unique: dict[tuple[int, ...], int] = {}
        places = [unique.setdefault(tuple(context), len(unique)) for context in contexts]
        width = max(len(context) for context in unique)
        padded = np.zeros((len(unique), width), dtype=np.int64)
        mask = np.zeros((len(unique), width), dtype=np.int64)
        for row, context in enumerate(unique):
            padded[row, width - len(context) :] = context
            mask[row, width - len(context) :] = 1
        device = self._model.device
        if not mask.all():
            self._mask_BT = torch.from_numpy(mask).to(device)
        self._position_B = torch.zeros(len(unique), dtype=torch.long, device=device)
        tokens_BT = torch.from_numpy(padded).to(device)
        positions_BT = torch.from_numpy(np.maximum(mask.cumsum(-1) - 1, 0)).to(device)
        logits_BV = self._forward(tokens_BT, positions_BT, keep=1)[:, -1]
        self._position_B = positions_BT[:, -1] + 1
        self.empty = False
        if places == list(range(len(unique))):
            return logits_BV
        self.select(places)
        return logits_BV[places]

    def extend(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Feed further tokens, [B, T], and return the logits after each, [B, T, V]."""
        assert self._position_B is not None
        count = tokens_BT.shape[1]
        positions_BT = self._position_B[:, None] + torch.arange(count, device=tokens_BT.device)
        if self._mask_BT is not None:
            self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(tokens_BT)], dim=1)
        self._position_B = self._position_B + count
        return self._forward(tokens_BT, positions_BT, keep=0)

    def select(self, places: Sequence[int]) -> None:
        """Keep these rows, in this order (a row may be taken several times)."""
        index = torch.tensor(places, dtype=torch.long, device=self._model.device)
        self._cache.batch_select_indices(index)
        assert self._position_B is not None
        self._position_B = self._position_B[index]
        if self._mask_BT is not None:
            self._mask_BT = self._mask_BT[index]

    def _forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, *, keep: int) -> torch.Tensor:
        output = self._model(
            input_ids=tokens_BT,
            attention_mask=self._mask_BT,
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = output.logits
        return logits


@torch.inference_mode()
def score_sequences(
    model: Any, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> list[npt.NDArray[np.float32]]:
    """Temperature-1 log-probability of each token after the prompt, through the cache that generation uses."""
    if not sequences:
        return []
    for place, (sequence, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        if not 0 < length < len(sequence):
            raise ValueError(f"sequence {place}: prompt length {length} must be between 1 and {len(sequence) - 1}")
    context = CachedContext(model)
    completions = [list(sequence[length:]) for sequence, length in zip(sequences, prompt_lengths, strict=True)]
    first_BV = context.prefill([sequence[:length] for sequence, length in zip(sequences, prompt_lengths, strict=True)])
    width = max(len(completion) for completion in completions)
    # Padding to the right of a completion is never looked at by a real token.
    padded = np.zeros((len(completions), width), dtype=np.int64)
    for place, completion in enumerate(completions):
        padded[place, : len(completion)] = completion
    tokens_BT = torch.from_numpy(padded).to(model.device)
    logits_BTV = first_BV[:, None]
    if width > 1:
        logits_BTV = torch.cat([logits_BTV, context.extend(tokens_BT[:, :-1])], dim=1)
    logprobs_BT = logits_BTV.float().log_softmax(-1).gather(-1, tokens_BT[..., None]).squeeze(-1).cpu().numpy()
    return [logprobs_BT[place, : len(completion)].copy() for place, completion in enumerate(completions)]
