"""The errors of the maths, the checks that come before it, and selection by mask.

Guarantees that a wrong rank, size, dtype, device or a non-finite value is refused with the name of
the tensor before any arithmetic, and that nothing outside the mask can reach a result or a
gradient.

Shape letters in this package: B rows (one trajectory each), T padded token positions, N tokens or
members in one flat list, H hidden size, V vocabulary, G prompt groups. `[B,1]` is a row value that
is ready to be spread over T.

    ObjectiveError(ValueError)   root; never worth a retry with the same input
    |- ShapeError                rank, size, dtype, device, or a gradient where a constant is due
    |- NonFinite                 NaN or inf where a number counts: names tensor, row and position
    |- InvalidSetting            one setting is outside its range
    |- IllegalCombination        two settings contradict each other: names the pair
    |- GroupingError             the members of a batch do not form groups
    |- DenominatorMismatch       the micro-batches of a step do not add up to its denominators
    |- RecomputedBehaviour       the stored behaviour log-probabilities are not what is used
    `- NegativeDivergence        an estimator that cannot be negative is negative
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
"""No half precision: 200 tokens rounded to bfloat16 move a sequence ratio from 1 to 0.68."""


class ObjectiveError(ValueError):
    """Root of the tree above."""

    retriable = False


class ShapeError(ObjectiveError):
    """A tensor has the wrong rank, size, dtype or device, or a gradient where it may not."""


class NonFinite(ObjectiveError):
    """A NaN or an infinity stands where it would count; never replaced, never masked out."""

    def __init__(self, name: str, row: int, position: int | None, row_id: str | None = None) -> None:
        super().__init__(name, row, position, row_id)
        self.name = name
        self.row = row
        self.position = position
        """None where the value belongs to the whole row"""
        self.row_id = row_id
        """the caller's name of the row, such as a trajectory id"""

    def __str__(self) -> str:
        row = f"row {self.row}" + (f" ({self.row_id})" if self.row_id else "")
        where = row if self.position is None else f"{row}, position {self.position}"
        return f"{self.name} is not finite at {where}: refuse this row before the step"


class InvalidSetting(ObjectiveError):
    """One setting is outside its range; the message names it and the range."""


class IllegalCombination(ObjectiveError):
    """Two settings contradict each other; the message names both and says why."""

    def __init__(self, first: str, second: str, reason: str) -> None:
        super().__init__(first, second, reason)
        self.pair = (first, second)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.pair[0]} cannot go with {self.pair[1]}: {self.reason}"


class GroupingError(ObjectiveError):
    """The members of a batch do not form groups."""


class DenominatorMismatch(ObjectiveError):
    """The micro-batches of a step do not add up to the denominators they were divided by."""


class RecomputedBehaviour(ObjectiveError):
    """Old log-probabilities were recomputed from the current policy."""


class NegativeDivergence(ObjectiveError):
    """k2 or k3 is below zero by more than rounding."""


class Checked(NamedTuple):
    """One tensor to be looked at for non-finite values, and where it counts."""

    name: str
    values: Tensor
    where: Tensor
    """bool, of the shape of `values`"""


def check_mask(mask_BT: Tensor, name: str = "mask") -> None:
    """Refuse a mask that is not a bool tensor of two dimensions."""
    if mask_BT.dtype != torch.bool:
        raise ShapeError(f"{name} must be bool, is {mask_BT.dtype}")
    if mask_BT.dim() != 2:
        raise ShapeError(f"{name} must be [B,T], is {list(mask_BT.shape)}")


def check_tokens(mask_BT: Tensor, **tensors: Tensor) -> None:
    """Refuse a token tensor that is not float and [B,T] like the mask; all must share one dtype."""
    check_mask(mask_BT)
    dtype: torch.dtype | None = None
    for name, tensor in tensors.items():
        _check_float(name, tensor, mask_BT)
        if tensor.shape != mask_BT.shape:
            raise ShapeError(f"{name} must be [B,T] = {list(mask_BT.shape)}, is {list(tensor.shape)}")
        if dtype is not None and tensor.dtype != dtype:
            raise ShapeError(f"{name} is {tensor.dtype} beside tensors of {dtype}")
        dtype = tensor.dtype


def check_rows(mask_BT: Tensor, **tensors: Tensor) -> None:
    """Refuse a row tensor that is not float and [B]; it is never spread over T by chance."""
    check_mask(mask_BT)
    for name, tensor in tensors.items():
        _check_float(name, tensor, mask_BT)
        if tensor.shape != mask_BT.shape[:1]:
            raise ShapeError(f"{name} must be [B] = [{mask_BT.shape[0]}], is {list(tensor.shape)}")


def check_constants(**tensors: Tensor) -> None:
    """Refuse a tensor that carries a gradient although it stands for stored or frozen numbers."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise ShapeError(f"{name} requires a gradient, must be constant: detach it")


def check_finite(checks: Iterable[Checked], row_ids: Sequence[str] | None = None) -> None:
    """Raise NonFinite for the first NaN or infinity that counts, in the order given."""
    bad = [(item, item.where & ~torch.isfinite(item.values)) for item in checks]
    if not bad or not bool(torch.stack([flags.any() for _, flags in bad]).any()):
        return  # one wait for the device in the good case
    for item, flags in bad:
        if bool(flags.any()):
            first = flags.nonzero()[0].tolist()
            row, position = first[0], (first[1] if len(first) > 1 else None)
            raise NonFinite(item.name, row, position, row_ids[row] if row_ids else None)


def length_mask(lengths_B: Tensor, width: int, *, padding: str = "right") -> Tensor:
    """Positions that hold a token, by the length of each row and never by the value of a token.

    A mask built by comparing with the padding id drops real end tokens where both share an id.

    lengths_B: int, 0..width. padding: "right" or "left", the side that is filled up.
    Returns bool [B,width]. Raises ShapeError.
    """
    if lengths_B.dim() != 1 or lengths_B.is_floating_point() or lengths_B.dtype == torch.bool:
        raise ShapeError(f"lengths must be int [B], is {lengths_B.dtype} {list(lengths_B.shape)}")
    if lengths_B.numel() and not 0 <= int(lengths_B.min()) <= int(lengths_B.max()) <= width:
        raise ShapeError(f"lengths must lie in 0..{width}, are {lengths_B.tolist()}")
    positions = torch.arange(width, device=lengths_B.device)[None, :]
    if padding == "right":
        return positions < lengths_B[:, None]
    if padding == "left":
        return positions >= width - lengths_B[:, None]
    raise ShapeError(f'padding must be "right" or "left", is "{padding}"')


def training_mask(valid_BT: Tensor, loss_mask_BT: Tensor, trained_B: Tensor) -> Tensor:
    """Tokens that count: inside the row, sampled by the policy, in a row that is trained.

    valid_BT: bool, see length_mask. loss_mask_BT: bool, false for tool output and the like.
    trained_B: bool, false for a row that is held back (cut off at the length limit, stale).
    Returns bool [B,T]. Raises ShapeError.
    """
    check_mask(valid_BT, "valid")
    check_mask(loss_mask_BT, "loss_mask")
    if loss_mask_BT.shape != valid_BT.shape:
        raise ShapeError(f"loss_mask must be {list(valid_BT.shape)}, is {list(loss_mask_BT.shape)}")
    if trained_B.dtype != torch.bool or trained_B.shape != valid_BT.shape[:1]:
        raise ShapeError(f"trained must be bool [{valid_BT.shape[0]}], is {trained_B.dtype} {list(trained_B.shape)}")
    return valid_BT & loss_mask_BT & trained_B[:, None]


def sel(x_BT: Tensor, y_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x - y inside the mask, exactly 0 outside, whatever stands there.

    where(mask, where(mask, x, 0) - where(mask, y, 0), 0). Selection and not multiplication: 0 * inf
    and 0 * NaN are NaN, in the value and again in the gradient.
    """
    return torch.where(mask_BT, pick(x_BT, mask_BT) - pick(y_BT, mask_BT), 0.0)


def pick(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x inside the mask, exactly 0 outside; the gradient outside is exactly 0 as well."""
    return torch.where(mask_BT, x_BT, 0.0)


def row_sums(x_BT: Tensor) -> Tensor:
    """Sum over T, [B,1]. Added in float64: the width of the padding must not move a ratio."""
    return x_BT.sum(dim=1, keepdim=True, dtype=torch.float64).to(x_BT.dtype)


def row_counts(mask_BT: Tensor) -> Tensor:
    """Number of counted tokens a row, int64 [B,1]."""
    return mask_BT.sum(dim=1, keepdim=True)


def spread_rows(name: str, values: Tensor, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """A constant [B] or [B,T] tensor as [B,T], exactly 0 outside the mask. Raises ShapeError."""
    check_constants(**{name: values})
    if values.dim() == 2:
        check_tokens(mask_BT, **{name: values})
        values_BT = values
    else:
        check_rows(mask_BT, **{name: values})
        values_BT = values[:, None].expand(mask_BT.shape)
    if values.dtype != dtype:
        raise ShapeError(f"{name} is {values.dtype} beside tensors of {dtype}")
    return pick(values_BT, mask_BT)


def _check_float(name: str, tensor: Tensor, mask_BT: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise ShapeError(f"{name} must be float32 or float64, is {tensor.dtype}")
    if tensor.device != mask_BT.device:
        raise ShapeError(f"{name} is on {tensor.device}, the mask on {mask_BT.device}")
