"""Fixture F of docs/objectives.md: three rows, NaN wherever nothing counts, and ways to run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from consumers.objective import (
    Denominators,
    LossInputs,
    LossOutputs,
    ObjectiveSettings,
    Tally,
    policy_loss,
    step_denominators,
)
from tests.unit.objective import slow_oracle

torch.set_num_threads(1)

NAN = math.nan
THETA = [[-0.5, -1.0, -0.2, NAN], [-0.7, NAN, -1.5, -0.3], [-2.0, -0.4, NAN, NAN]]
PROXIMAL = [[-0.6, -1.2, -0.2, NAN], [-0.6, NAN, -1.4, -0.5], [-1.9, -0.5, NAN, NAN]]
BEHAVIOUR = [[-0.9, -1.1, -0.1, NAN], [-0.5, 0.0, -1.2, -1.5], [-1.0, -0.6, NAN, NAN]]
REFERENCE = [[-0.8, -0.9, -0.4, NAN], [-0.6, NAN, -1.0, -0.9], [-1.5, -0.7, NAN, NAN]]
MASK = [[True, True, True, False], [True, False, True, True], [True, True, False, False]]
ADVANTAGES = [1.0, -0.5, 2.0]

TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-5}


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """All rows of a step, before they are cut into micro-batches."""

    theta: Tensor
    proximal: Tensor
    behaviour: Tensor
    mask: Tensor
    advantages: Tensor
    row_weights: Tensor
    policy_lag: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None

    def inputs(self, rows: Sequence[int] | None = None) -> LossInputs:
        """The rows of one micro-batch, all by default."""
        at = torch.tensor(list(range(len(self.mask))) if rows is None else list(rows), dtype=torch.int64)
        return LossInputs(
            theta_BT=self.theta[at],
            proximal_BT=self.proximal[at],
            behaviour_BT=self.behaviour[at],
            mask_BT=self.mask[at],
            advantages=self.advantages[at],
            row_weights_B=self.row_weights[at],
            policy_lag_B=self.policy_lag[at],
            reference_BT=None if self.reference is None else self.reference[at],
            entropy_BT=None if self.entropy is None else self.entropy[at],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What a step gave: the summed loss, the gradient of theta, the summed tally."""

    loss: float
    gradient: Tensor
    tally: Tally
    denominators: Denominators
    outputs: list[LossOutputs]


def fixture_f(dtype: torch.dtype = torch.float64, **changes: Tensor | None) -> Batch:
    """Fixture F as tensors; name a field to replace it."""
    fields: dict[str, Tensor | None] = {
        "theta": torch.tensor(THETA, dtype=dtype),
        "proximal": torch.tensor(PROXIMAL, dtype=dtype),
        "behaviour": torch.tensor(BEHAVIOUR, dtype=dtype),
        "reference": torch.tensor(REFERENCE, dtype=dtype),
        "mask": torch.tensor(MASK),
        "advantages": torch.tensor(ADVANTAGES, dtype=dtype),
        "row_weights": torch.ones(3, dtype=dtype),
        "policy_lag": torch.zeros(3, dtype=torch.int64),
    }
    return Batch(**{**fields, **changes})  # type: ignore[arg-type]


def run_step(
    batch: Batch,
    settings: ObjectiveSettings,
    cut: Sequence[Sequence[int]] | None = None,
    averaging_ranks: int = 1,
) -> Result:
    """Loss and gradient of a step, cut into the given rows (default: one micro-batch)."""
    theta = batch.theta.clone().requires_grad_()
    batch = replace(batch, theta=theta)
    denominators = step_denominators(
        batch.proximal, batch.behaviour, batch.mask, settings, averaging_ranks=averaging_ranks
    )
    outputs = []
    for rows in cut or [range(len(batch.mask))]:
        outputs.append(policy_loss(batch.inputs(rows), settings, denominators))
        outputs[-1].loss.backward()
    tally = outputs[0].tally
    for later in outputs[1:]:
        tally = tally + later.tally
    assert theta.grad is not None
    return Result(
        loss=sum(output.loss.item() for output in outputs),
        gradient=theta.grad,
        tally=tally,
        denominators=denominators,
        outputs=outputs,
    )


def one_token(log_ratio: float, advantage: float, dtype: torch.dtype = torch.float64, base: float = -0.1) -> Batch:
    """A batch of one token with a given log ratio over behaviour and proximal alike."""
    return row_of([log_ratio], advantage, dtype, base)


def row_of(
    log_ratios: Sequence[float],
    advantage: float,
    dtype: torch.dtype = torch.float64,
    base: float = -0.1,
    first_step: bool = False,
) -> Batch:
    """A batch of one row with given token log ratios of theta over behaviour.

    Proximal equals behaviour, or theta where this is the first optimizer step.
    """
    theta = torch.full((1, len(log_ratios)), base, dtype=dtype)
    old = theta - torch.tensor([list(log_ratios)], dtype=dtype)
    return Batch(
        theta=theta,
        proximal=theta.clone() if first_step else old,
        behaviour=old,
        mask=torch.ones((1, len(log_ratios)), dtype=torch.bool),
        advantages=torch.tensor([advantage], dtype=dtype),
        row_weights=torch.ones(1, dtype=dtype),
        policy_lag=torch.zeros(1, dtype=torch.int64),
    )


def oracle_case(**choices: object) -> slow_oracle.Case:
    """Fixture F for the slow loops, with some choices."""
    case = slow_oracle.Case(prox=PROXIMAL, beh=BEHAVIOUR, ref=REFERENCE, mask=MASK, adv=ADVANTAGES, u=[1.0, 1.0, 1.0])
    return slow_oracle.change(case, **choices)
