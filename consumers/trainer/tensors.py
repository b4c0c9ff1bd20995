"""From trajectories to tensors: right-padded rows, masks by length, micro-batches by token budget.

Everything here is a pure function of the rows: the same batch gives the same tensors in the same order.
Shape letters: B rows, L tokens of prompt and completion together, T completion tokens, N valid completion
tokens of all rows in one list.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.batch import BatchRow
from schemas.errors import StepRefused
from schemas.trajectory import Trajectory

Tokens = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowData:
    """What the loss needs of one trajectory; what travels to the other ranks."""

    row_id: str
    """trajectory id"""
    prompt: npt.NDArray[np.int32]
    completion: npt.NDArray[np.int32]
    """[T]"""
    behaviour: npt.NDArray[np.float32]
    """[T] stored log-probabilities"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]"""
    truncated: bool
    """cut off by max_tokens"""
    temperature: float
    advantage: float
    weight: float
    policy_lag: int


def row_data(row: BatchRow) -> RowData:
    """The row of a batch."""
    return _row_data(row.trajectory, row.advantage, row.weight, row.policy_lag)


def scored_data(trajectory: Trajectory) -> RowData:
    """A trajectory that is only scored."""
    return _row_data(trajectory, 0.0, 1.0, 0)


def sequence_data(pair: tuple[Sequence[int], Sequence[int]], temperature: float) -> RowData:
    """A bare (prompt, completion) pair that is only scored."""
    prompt, completion = (np.asarray(tokens, dtype=np.int32) for tokens in pair)
    return RowData(
        row_id="a probe",
        prompt=prompt,
        completion=completion,
        behaviour=np.zeros(len(completion), dtype=np.float32),
        loss_mask=np.zeros(len(completion), dtype=np.bool_),
        truncated=False,
        temperature=temperature,
        advantage=0.0,
        weight=1.0,
        policy_lag=0,
    )


def check_rows(rows: Sequence[RowData], vocabulary_size: int) -> None:
    """StepRefused, naming the trajectory, for what no forward pass could use. The loss checks the rest."""
    tokens_are_clean = _tokens_are_clean(rows, vocabulary_size)
    for row in rows:
        length = len(row.completion)
        for name, array in (("logprobs", row.behaviour), ("loss_mask", row.loss_mask)):
            if len(array) != length:
                raise StepRefused(f"{row.row_id}: {length} token ids, {len(array)} {name}: refuse it before the step")
        if not (len(row.prompt) and length):
            raise StepRefused(f"{row.row_id}: prompt or completion is empty")
        for name, tokens in (("prompt_token_ids", row.prompt), ("token_ids", row.completion)):
            if not tokens_are_clean and (int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary_size):
                raise StepRefused(f"{row.row_id}: {name} leave the vocabulary 0..{vocabulary_size - 1}")
        if not (math.isfinite(row.temperature) and row.temperature > 0):
            raise StepRefused(
                f"{row.row_id}: temperature {row.temperature}: greedy tokens (temperature 0) cannot be trained"
            )


def _tokens_are_clean(rows: Sequence[RowData], vocabulary_size: int) -> bool:
    """All token ids are of the vocabulary, looked at end to end; False only means: look at each row."""
    if not rows:
        return True
    # As unsigned numbers negative ids are huge ones.
    ids = np.concatenate([tokens for row in rows for tokens in (row.prompt, row.completion)])
    return not len(ids) or int(ids.astype(np.int64).view(np.uint64).max()) < vocabulary_size


def _row_data(trajectory: Trajectory, advantage: float, weight: float, policy_lag: int) -> RowData:
    return RowData(
        row_id=str(trajectory.trajectory_id),
        prompt=trajectory.prompt_token_ids,
        completion=trajectory.token_ids,
        behaviour=trajectory.logprobs,
        loss_mask=trajectory.loss_mask,
        truncated=trajectory.finish_reason == "length",
        temperature=trajectory.sampling.temperature,
        advantage=advantage,
        weight=weight,
        policy_lag=policy_lag,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """Some rows of a step, ready for one forward pass."""

    rows: tuple[int, ...]
    """indices into the step's rows, in the order of the tensors; (-1,) for a pass over nothing"""
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
    def is_real(self) -> bool:
        """Rows of the step, not a pass over `nothing`."""
        return self.rows[0] >= 0

    @property
    def width(self) -> int:
        """T"""
        return int(self.valid_BT.shape[1])


def row_tokens(row: RowData) -> int:
    """Tokens of prompt and completion."""
    return len(row.prompt) + len(row.completion)


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


def pack(rows: Sequence[RowData], chosen: Sequence[int], device: str, *, mask_truncated: bool = False) -> RowTensors:
    """Tensors of the chosen rows. `mask_truncated`: rows cut off by max_tokens do not count in the loss."""
    picked = [rows[index] for index in chosen]
    layout = _layout([(row.prompt, row.completion) for row in picked])
    behaviour = np.zeros(layout.valid.shape, dtype=np.float32)
    mask = np.zeros(layout.valid.shape, dtype=np.bool_)
    for place, row in enumerate(picked):
        length = len(row.completion)
        behaviour[place, :length] = row.behaviour
        mask[place, :length] = False if mask_truncated and row.truncated else row.loss_mask

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
        temperatures_B=tensor([row.temperature for row in picked], torch.float32),
        row_ids=tuple(row.row_id for row in picked),
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


def nothing(device: str) -> RowTensors:
    """One row of one token that counts nowhere: what a rank without work passes through the model."""
    return replace(pack_sequences([([0], [0])], [1.0], device), rows=(-1,))


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
