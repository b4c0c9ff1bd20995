"""From token losses to one number, exactly, however the rows are cut into micro-batches and ranks.

Guarantees that partial results add up to the whole: every micro-batch divides by the denominators
of all rows of the optimizer step, which are counted once, before the first backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from consumers.objective.options import Aggregation, RejectionDenominator
from consumers.objective.shapes import (
    IllegalCombination,
    InvalidSetting,
    ShapeError,
    check_mask,
    check_tokens,
    row_counts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What one optimizer step divides by: all its micro-batches, all its ranks.

    Example: the fixture of docs/objectives.md has Denominators(tokens=8, rows=3, kept_tokens=8).
    Those of parts (or of ranks, through an all-reduce of the three counts) are added with `+`.
    """

    tokens: int
    """N, counted tokens: of the mask (original) or of the accepted part (kept)"""
    rows: int
    """S, rows with at least one counted token"""
    kept_tokens: int
    """accepted tokens, whichever of the two is counted"""
    averaging_ranks: int = 1
    """ranks whose gradients are averaged afterwards; each loss is multiplied by it to make up"""

    def __post_init__(self) -> None:
        if min(self.tokens, self.rows, self.kept_tokens) < 0 or self.averaging_ranks < 1:
            raise InvalidSetting(f"counts must be >= 0 and ranks >= 1: {self}")

    def __add__(self, other: Denominators) -> Denominators:
        if self.averaging_ranks != other.averaging_ranks:
            raise IllegalCombination(
                f"averaging_ranks {self.averaging_ranks}",
                f"averaging_ranks {other.averaging_ranks}",
                "parts of one step share one number of ranks",
            )
        return replace(
            self,
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            kept_tokens=self.kept_tokens + other.kept_tokens,
        )

    @property
    def skipped(self) -> bool:
        """No token can move the policy: the loss is 0.0 and no optimizer step may be made.

        An optimizer step on a zero gradient is not nothing: momentum and weight decay move weights.
        """
        return self.tokens == 0 or self.rows == 0 or self.kept_tokens == 0


def counted_tokens(mask_BT: Tensor, keep_BT: Tensor, after_rejection: RejectionDenominator) -> Tensor:
    """D, the tokens the denominators count: mask (original) or keep (kept). bool [B,T]."""
    check_mask(mask_BT)
    check_mask(keep_BT, "keep")
    if keep_BT.shape != mask_BT.shape:
        raise ShapeError(f"keep must be {list(mask_BT.shape)}, is {list(keep_BT.shape)}")
    kept_only = RejectionDenominator(after_rejection) is RejectionDenominator.KEPT
    return keep_BT if kept_only else mask_BT


def count_denominators(
    mask_BT: Tensor,
    keep_BT: Tensor,
    after_rejection: RejectionDenominator,
    *,
    averaging_ranks: int = 1,
) -> Denominators:
    """Count N, S and the accepted tokens of some rows; those of a step are the sum over its rows.

    A row all of whose tokens are rejected stays in S under `original` and leaves it under `kept`.

    mask_BT, keep_BT: bool [B,T]. Returns Denominators. Raises ShapeError.
    """
    counted_BT = counted_tokens(mask_BT, keep_BT, after_rejection)
    return Denominators(
        tokens=int(counted_BT.sum()),
        rows=int(counted_BT.any(dim=1).sum()),
        kept_tokens=int((keep_BT & mask_BT).sum()),
        averaging_ranks=averaging_ranks,
    )


def aggregate(
    loss_BT: Tensor,
    counted_BT: Tensor,
    mode: Aggregation,
    denominators: Denominators,
    *,
    constant_length: int | None = None,
) -> Tensor:
    """This micro-batch's share of the loss; the shares of all micro-batches are added.

        token_mean           sum l / N
        seq_mean_token_mean  (1/S) sum_i (sum_t l[i,t] / n_i)       over live rows i
        seq_mean_token_sum   (1/S) sum_i sum_t l[i,t]
        seq_sum_constant     sum l / (S * L)

    loss_BT: float [B,T], 0 where a token does not count. counted_BT: bool [B,T], D, gives n_i.
    denominators: of the whole optimizer step. constant_length: L, tokens, for seq_sum_constant.
    Returns a scalar; 0.0 that still has a graph when nothing counts. Raises ShapeError,
    InvalidSetting, IllegalCombination.

    Source: seq_mean_token_mean Shao et al. 2024 (GRPO, 2402.03300), eq. 3; token_mean Yu et al.
    2025 (DAPO, 2503.14476), eq. 8; seq_sum_constant Liu et al. 2025 (Dr. GRPO, 2503.20783),
    listing 1. Departure: N and S count the whole optimizer step, where the papers count one group.
    """
    check_tokens(counted_BT, loss=loss_BT)
    mode = Aggregation(mode)
    if mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        loss_BT = loss_BT / row_counts(counted_BT).clamp(min=1)
    divisor = _divisor(mode, denominators, constant_length)
    return loss_BT.sum() * (denominators.averaging_ranks / divisor)


def _divisor(mode: Aggregation, denominators: Denominators, constant_length: int | None) -> int:
    if mode is Aggregation.TOKEN_MEAN:
        return max(denominators.tokens, 1)
    rows = max(denominators.rows, 1)
    if mode is not Aggregation.SEQ_SUM_CONSTANT:
        return rows
    if constant_length is None:
        raise IllegalCombination(
            "aggregation seq_sum_constant",
            "constant_length unset",
            "the constant must be given, usually the generator's max_tokens",
        )
    if constant_length < 1:
        raise InvalidSetting(f"constant_length must be >= 1 token, is {constant_length}")
    return rows * constant_length
