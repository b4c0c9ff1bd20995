"""From trajectories to tensors: right-padded rows, masks by length, micro-batches by token budget.

Everything here is a pure function of the rows: the same batch gives the same tensors in the same order.
Shape letters: B rows, L tokens of prompt and completion together, T completion tokens, N valid completion
tokens of all rows in one list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.batch import BatchRow

Tokens = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """Some rows of a step, ready for one forward pass."""

    rows: tuple[int, ...]
    """indices into the step's rows, in the order of the tensors"""
    tokens_BL: Tensor
    """int64; prompt, completion, then padding whose value is never looked at"""
    predictor_BT: Tensor
    """int64: the position in L whose output predicts completion token t"""
    targets_BT: Tensor
    """int64, completion tokens"""
    valid_BT: Tensor
    """bool: t < length of the completion; by length, never by token value"""
    mask_BT: Tensor
    """bool: valid, sampled by the policy, in a row that is trained"""
    behaviour_BT: Tensor
    """float32, stored log-probabilities"""
    advantages_B: Tensor
    """float32"""
    weights_B: Tensor
    """float32, from age"""
    lags_B: Tensor
    """int64, policy lag"""
    temperatures_B: Tensor
    """float32"""
    row_ids: tuple[str, ...]

    @property
    def width(self) -> int:
        """T"""
        return int(self.valid_BT.shape[1])


def row_tokens(row: BatchRow) -> int:
    """Tokens of prompt and completion."""
    return len(row.trajectory.prompt_token_ids) + len(row.trajectory.token_ids)


def split_by_budget(lengths: Sequence[int], budget_tokens: int) -> list[tuple[int, ...]]:
    """Cut rows into micro-batches of at most `budget_tokens` padded tokens; a longer row stands alone.

    Rows of like length stand together (padding is waste). Equal lengths keep their order.

    >>> split_by_budget([3, 9, 3, 4], 9)
    [(0, 2), (3,), (1,)]
    """
    parts: list[tuple[int, ...]] = []
    current: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if current and (len(current) + 1) * lengths[row] > budget_tokens:
            parts.append(tuple(current))
            current = []
        current.append(row)
    if current:
        parts.append(tuple(current))
    return parts


def split_minibatches(count: int, minibatches: int, *, seed: int, step: int, epoch: int) -> list[tuple[int, ...]]:
    """Row indices of each optimizer step of one epoch: a seeded deal, each row exactly once.

    The order comes from a hash of (seed, step, epoch, row), so there is no generator state to save.
    Fewer rows than minibatches give fewer minibatches, never an empty one.
    """
    if minibatches == 1:
        return [tuple(range(count))]
    order = sorted(range(count), key=lambda row: hashlib.sha256(f"{seed}/{step}/{epoch}/{row}".encode()).digest())
    parts = min(minibatches, count)
    return [tuple(sorted(order[part::parts])) for part in range(parts)]


def pack(rows: Sequence[BatchRow], chosen: Sequence[int], device: str, *, mask_truncated: bool = False) -> RowTensors:
    """Tensors of the chosen rows. `mask_truncated`: rows cut off by max_tokens do not count in the loss."""
    picked = [rows[index] for index in chosen]
    trajectories = [row.trajectory for row in picked]
    layout = _layout([(t.prompt_token_ids, t.token_ids) for t in trajectories])
    behaviour = np.zeros(layout.valid.shape, dtype=np.float32)
    mask = np.zeros(layout.valid.shape, dtype=np.bool_)
    for place, trajectory in enumerate(trajectories):
        length = len(trajectory.token_ids)
        behaviour[place, :length] = trajectory.logprobs
        truncated = mask_truncated and trajectory.finish_reason == "length"
        mask[place, :length] = False if truncated else trajectory.loss_mask

    def tensor(values: object, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=device)

    return RowTensors(
        rows=tuple(chosen),
        tokens_BL=tensor(layout.tokens),
        predictor_BT=tensor(layout.predictor),
        targets_BT=tensor(layout.targets),
        valid_BT=tensor(layout.valid),
        mask_BT=tensor(mask),
        behaviour_BT=tensor(behaviour),
        advantages_B=tensor([row.advantage for row in picked], torch.float32),
        weights_B=tensor([row.weight for row in picked], torch.float32),
        lags_B=tensor([row.policy_lag for row in picked], torch.int64),
        temperatures_B=tensor([t.sampling.temperature for t in trajectories], torch.float32),
        row_ids=tuple(str(t.trajectory_id) for t in trajectories),
    )


def pack_sequences(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperatures: Sequence[float], device: str
) -> RowTensors:
    """Tensors of bare (prompt, completion) pairs, for scoring only: nothing in them counts in a loss."""
    layout = _layout(sequences)
    count = len(sequences)
    valid_BT = torch.from_numpy(layout.valid).to(device)
    return RowTensors(
        rows=tuple(range(count)),
        tokens_BL=torch.from_numpy(layout.tokens).to(device),
        predictor_BT=torch.from_numpy(layout.predictor).to(device),
        targets_BT=torch.from_numpy(layout.targets).to(device),
        valid_BT=valid_BT,
        mask_BT=torch.zeros_like(valid_BT),
        behaviour_BT=torch.zeros(valid_BT.shape, device=device),
        advantages_B=torch.zeros(count, device=device),
        weights_B=torch.zeros(count, device=device),
        lags_B=torch.zeros(count, dtype=torch.int64, device=device),
        temperatures_B=torch.tensor(temperatures, dtype=torch.float32, device=device),
        row_ids=tuple(str(index) for index in range(count)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where the tokens lie; numpy arrays of the fields of RowTensors."""

    tokens: npt.NDArray[np.int64]
    predictor: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]


def _layout(sequences: Sequence[tuple[Tokens, Tokens]]) -> _Layout:
    count = len(sequences)
    width_L = max(len(prompt) + len(completion) for prompt, completion in sequences)
    width_T = max(len(completion) for _, completion in sequences)
    tokens = np.zeros((count, width_L), dtype=np.int64)
    targets = np.zeros((count, width_T), dtype=np.int64)
    valid = np.zeros((count, width_T), dtype=np.bool_)
    prompt_lengths = np.zeros((count, 1), dtype=np.int64)
    for place, (prompt, completion) in enumerate(sequences):
        tokens[place, : len(prompt)] = prompt
        tokens[place, len(prompt) : len(prompt) + len(completion)] = completion
        targets[place, : len(completion)] = completion
        valid[place, : len(completion)] = True
        prompt_lengths[place] = len(prompt)
    predictor = np.minimum(prompt_lengths - 1 + np.arange(width_T), width_L - 1)
    return _Layout(tokens=tokens, predictor=predictor, targets=targets, valid=valid)
