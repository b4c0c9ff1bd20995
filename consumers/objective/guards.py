"""Two looks at a whole step that a single micro-batch cannot take.

Guarantees that the denominators covered exactly the rows that were trained, and that the ratio was
taken over the log-probabilities that came with the trajectories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from consumers.objective.aggregation import Denominators
from consumers.objective.inputs import LossInputs
from consumers.objective.options import RatioDenominator
from consumers.objective.settings import ObjectiveSettings
from consumers.objective.shapes import (
    DenominatorMismatch,
    RecomputedBehaviour,
    check_tokens,
    sel,
)
from consumers.objective.statistics import Tally

FRESH_TOLERANCE = 1e-4
"""Largest |ratio - 1| expected at lag 0 where trainer and generator compute in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """The token of a lag-0 row where trainer and generator disagree most."""

    row: int
    position: int
    row_id: str | None
    proximal: float
    """log-probability, trainer"""
    behaviour: float
    """log-probability, stored by the generator"""
    ratio_error: float
    """|exp(proximal - behaviour) - 1|"""

    @property
    def exceeds(self) -> bool:
        """Whether it is worth a warning."""
        return self.ratio_error > FRESH_TOLERANCE

    def __str__(self) -> str:
        row = f"row {self.row}" + (f" ({self.row_id})" if self.row_id else "")
        return (
            f"{row}, position {self.position}: trainer {self.proximal:.6f}, generator "
            f"{self.behaviour:.6f}, |ratio - 1| = {self.ratio_error:.2e} at lag 0"
        )


def check_step(tally: Tally, settings: ObjectiveSettings, denominators: Denominators) -> None:
    """Judge the sum of a step's tallies before the optimizer step is made.

    - The counted tokens and rows equal the denominators that each share was divided by.
    - Denominator behaviour, at least one live row with policy lag >= 1, and the largest |log ratio|
      of the step exactly 0: somebody recomputed the old log-probabilities. Rows of lag 0 may be
      exactly 1. Judge this on the first optimizer step of a training step: later ones differ
      anyway.

    Raises DenominatorMismatch, RecomputedBehaviour.

    Source: ours; the second after reports of systems that trained for weeks with a ratio of 1.
    """
    sums, peaks = tally.named_sums(), tally.named_peaks()
    counted = tuple(int(sums[name]) for name in ("counted_tokens", "counted_rows", "kept_tokens"))
    expected = (denominators.tokens, denominators.rows, denominators.kept_tokens)
    if counted != expected:
        raise DenominatorMismatch(
            f"the micro-batches hold {counted} counted tokens, counted rows and accepted tokens, "
            f"the denominators {expected}: count them over all rows of the optimizer step"
        )
    over_behaviour = settings.denominator is RatioDenominator.BEHAVIOUR
    if over_behaviour and sums["aged_rows"] > 0 and peaks["token_log_ratio_abs"] == 0.0:
        raise RecomputedBehaviour(
            "old log-probabilities were recomputed from the current policy: "
            f"{int(sums['aged_rows'])} rows have policy lag >= 1, yet every log ratio is exactly "
            "0; use the log-probabilities stored with the trajectories"
        )


@torch.no_grad()
def worst_fresh_token(inputs: LossInputs) -> WorstToken | None:
    """The lag-0 token with the largest |exp(prox - beh) - 1|, or None without lag-0 rows.

    Same weights on both sides must give the same numbers; what is left shows dropout, a temperature
    applied on one side only, another precision, or another tokenisation. Raises ShapeError.
    """
    mask_BT = inputs.mask_BT
    check_tokens(mask_BT, proximal=inputs.proximal_BT, behaviour=inputs.behaviour_BT)
    fresh_BT = mask_BT & (inputs.policy_lag_B == 0)[:, None]
    if not bool(fresh_BT.any()):
        return None
    difference_BT = sel(inputs.proximal_BT.double(), inputs.behaviour_BT.double(), fresh_BT)
    error_BT = torch.where(fresh_BT, torch.expm1(difference_BT).abs(), -math.inf)
    row, position = divmod(int(error_BT.argmax()), error_BT.shape[1])
    return WorstToken(
        row=row,
        position=position,
        row_id=inputs.row_ids[row] if inputs.row_ids else None,
        proximal=float(inputs.proximal_BT[row, position]),
        behaviour=float(inputs.behaviour_BT[row, position]),
        ratio_error=float(error_BT[row, position]),
    )
