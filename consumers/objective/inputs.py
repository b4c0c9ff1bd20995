"""What the loss takes: the padded tensors of one micro-batch, and the checks on them.

Guarantees that nothing is computed from a wrong shape or from a number that is not finite. This is
the rule that keeps them out; the checks at admission only save compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.objective.options import KlPlacement
from consumers.objective.settings import ObjectiveSettings
from consumers.objective.shapes import (
    Checked,
    ShapeError,
    check_constants,
    check_finite,
    check_mask,
    check_rows,
    check_tokens,
    spread_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The rows of one micro-batch. All token tensors share one float dtype and one device.

    What stands outside the mask is arbitrary, NaN allowed. Log-probabilities are natural logs of
    the token that was sampled, at the row's sampling temperature.
    """

    theta_BT: Tensor
    """[B,T] float, carries the gradient: the policy being differentiated"""
    proximal_BT: Tensor
    """[B,T] float, constant: the weights at the START of the training step"""
    behaviour_BT: Tensor
    """[B,T] float, constant: stored by the policy that sampled the token"""
    mask_BT: Tensor
    """[B,T] bool: tokens that count; see training_mask"""
    advantages: Tensor
    """[B] or [B,T] float, constant"""
    row_weights_B: Tensor
    """[B] float, constant: u, from age; see staleness_weights"""
    policy_lag_B: Tensor
    """[B] int64, training steps; for the guard against recomputed log-probabilities"""
    reference_BT: Tensor | None = None
    """[B,T] float, constant: the frozen reference policy"""
    entropy_BT: Tensor | None = None
    """[B,T] float, nats; carries a gradient only where the entropy bonus is on"""
    row_ids: tuple[str, ...] | None = None
    """[B] trajectory ids, so that an error can name the row"""


def check_inputs(inputs: LossInputs, settings: ObjectiveSettings) -> None:
    """Shapes, dtypes, constants, then finiteness. Raises ShapeError, NonFinite."""
    _check_shapes(inputs)
    _check_presence(inputs, settings)
    mask_BT = inputs.mask_BT
    live_B = mask_BT.any(dim=1)
    checks = [
        Checked("theta", inputs.theta_BT, mask_BT),
        Checked("proximal", inputs.proximal_BT, mask_BT),
        Checked("behaviour", inputs.behaviour_BT, mask_BT),
    ]
    if inputs.reference_BT is not None:
        checks.append(Checked("reference", inputs.reference_BT, mask_BT))
    if inputs.entropy_BT is not None:
        checks.append(Checked("entropy", inputs.entropy_BT, mask_BT))
    per_token = inputs.advantages.dim() == 2
    checks.append(Checked("advantages", inputs.advantages, mask_BT if per_token else live_B))
    checks.append(Checked("row_weights", inputs.row_weights_B, live_B))
    check_finite(checks, inputs.row_ids)


def _check_shapes(inputs: LossInputs) -> None:
    mask_BT = inputs.mask_BT
    check_mask(mask_BT)
    constants = {"proximal": inputs.proximal_BT, "behaviour": inputs.behaviour_BT}
    if inputs.reference_BT is not None:
        constants["reference"] = inputs.reference_BT
    tokens = {"theta": inputs.theta_BT, **constants}
    if inputs.entropy_BT is not None:
        tokens["entropy"] = inputs.entropy_BT
    check_tokens(mask_BT, **tokens)
    check_rows(mask_BT, row_weights=inputs.row_weights_B)
    check_constants(row_weights=inputs.row_weights_B, **constants)
    spread_rows("advantages", inputs.advantages, mask_BT, inputs.theta_BT.dtype)
    spread_rows("row_weights", inputs.row_weights_B, mask_BT, inputs.theta_BT.dtype)
    lag_B = inputs.policy_lag_B
    if lag_B.dtype != torch.int64 or lag_B.shape != mask_BT.shape[:1]:
        raise ShapeError(f"policy_lag must be int64 [{mask_BT.shape[0]}], is {lag_B.dtype} {list(lag_B.shape)}")
    if inputs.row_ids is not None and len(inputs.row_ids) != mask_BT.shape[0]:
        raise ShapeError(f"row_ids must be {mask_BT.shape[0]}, are {len(inputs.row_ids)}")


def _check_presence(inputs: LossInputs, settings: ObjectiveSettings) -> None:
    kl_in_loss = settings.kl_coefficient > 0 and settings.kl_placement is KlPlacement.LOSS
    if kl_in_loss and inputs.reference_BT is None:
        raise ShapeError("reference is missing: kl_coefficient > 0 with kl_placement loss")
    entropy_BT = inputs.entropy_BT
    if settings.entropy_coefficient > 0:
        if entropy_BT is None:
            raise ShapeError("entropy is missing: entropy_coefficient > 0")
        if inputs.theta_BT.requires_grad and not entropy_BT.requires_grad:
            raise ShapeError("entropy must carry a gradient: entropy_coefficient > 0")
    elif entropy_BT is not None and entropy_BT.requires_grad:
        raise ShapeError("entropy requires a gradient, must be constant: the bonus is off")
