"""verl's side: ppo_loss whole (policy loss, entropy, divergence), its advantage and rollout-correction functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from benchmarks.parity.batches import Batch
from benchmarks.parity.comparison import Outcome, Side
from benchmarks.parity.ours import loss_and_gradient

NO_DUAL_CLIP = 1e6
"""verl always dual-clips; a bound this far away never binds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlOptions:
    """The settings of actor and algorithm that a case may change; names are verl's."""

    loss_mode: str = "vanilla"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = NO_DUAL_CLIP
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None
    kl_loss_type: str | None = None
    kl_loss_coef: float = 0.0
    entropy_coeff: float = 0.0
    decoupled: bool = False
    """old log-probabilities are the proximal ones and rollout correction applies; else the behaviour's"""
    rollout_is: str | None = None
    rollout_is_threshold: str | float = 2.0
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None
    count_original: bool = False
    """hand over the token and row counts of the batch before rejection"""
    dp_size: int = 1


def loss(options: VerlOptions, *, micro_rows: int | None = None) -> Side:
    """verl.workers.utils.losses.ppo_loss; in micro-batches it gets the counts of the whole step, as its engine does."""

    def side(batch: Batch) -> Outcome:
        rows = len(batch.mask_BT)
        step = micro_rows or rows
        old_BT = batch.proximal_BT if options.decoupled else batch.behaviour_BT
        mask_BT, weights_BT = batch.mask_BT.to(old_BT.dtype), None
        if options.decoupled:
            mask_BT, weights_BT = _correction(batch, mask_BT, options)
        counts: dict[str, Any] = {"batch_num_tokens": None, "global_batch_size": None}
        if options.count_original or step < rows or options.dp_size > 1:
            counts = {
                "batch_num_tokens": int(batch.mask_BT.sum()),
                "global_batch_size": int(batch.mask_BT.any(dim=1).sum()),
            }
        config = _actor(options)

        def total(theta_BT: Tensor, entropy_BT: Tensor) -> Tensor:
            shares = []
            for start in range(0, rows, step):
                part = batch.rows(start, start + step)
                at = slice(start, start + step)
                data = _data(part, mask_BT[at], old_BT[at], None if weights_BT is None else weights_BT[at])
                tensordict_utils.assign_non_tensor(data, dp_size=options.dp_size, **counts)
                output = {"log_probs": _flat(theta_BT[at])}
                if options.entropy_coeff > 0:
                    output["entropy"] = _flat(entropy_BT[at])
                shares.append(ppo_loss(config, output, data)[0])
            return torch.stack(shares).sum()

        return loss_and_gradient(batch, total)

    return side


def reinforce(*, rollout_is: str | None, bypass: bool = False) -> Side:
    """compute_policy_loss_reinforce with given weights, or the bypass mode: weights from the current policy."""

    def side(batch: Batch) -> Outcome:
        mask_BT = batch.mask_BT.to(batch.theta_BT.dtype)
        options = VerlOptions(rollout_is=rollout_is)
        weights_BT = _correction(batch, mask_BT, options)[1] if rollout_is else None
        config = _actor(options)
        given = {
            "advantages": _spread(batch),
            "response_mask": mask_BT,
            "loss_agg_mode": "token-mean",
            "config": config,
        }

        def total(theta_BT: Tensor, _: Tensor) -> Tensor:
            if bypass:
                return core_algos.compute_policy_loss_bypass_mode(batch.behaviour_BT, theta_BT, **given)[0]
            return core_algos.compute_policy_loss_reinforce(
                batch.behaviour_BT, theta_BT, rollout_is_weights=weights_BT, **given
            )[0]

        return loss_and_gradient(batch, total)

    return side


def advantages(function: Callable[..., tuple[Tensor, Tensor]], *, kl_coefficient: float = 0.0, **options: Any) -> Side:
    """One of core_algos' outcome advantages; the reward stands at the first counted token of its row."""

    def side(batch: Batch) -> Outcome:
        first_B = batch.mask_BT.long().argmax(dim=1)
        scores_BT = torch.zeros_like(batch.theta_BT)
        scores_BT[torch.arange(len(first_B)), first_B] = batch.rewards_B
        if kl_coefficient > 0:
            scores_BT = core_algos.compute_rewards(scores_BT, batch.proximal_BT, batch.reference_BT, kl_coefficient)
            scores_BT = scores_BT * batch.mask_BT
        mask_BT = batch.mask_BT.to(scores_BT.dtype)
        index = np.array([str(group) for group in batch.group_B.tolist()], dtype=object)
        found_BT = function(token_level_rewards=scores_BT, response_mask=mask_BT, index=index, **options)[0]
        return Outcome(value=found_BT[torch.arange(len(first_B)), first_B])

    return side


def _correction(batch: Batch, mask_BT: Tensor, options: VerlOptions) -> tuple[Tensor, Tensor | None]:
    found, kept_BT, _ = compute_rollout_correction_and_rejection_mask(
        batch.proximal_BT,
        batch.behaviour_BT,
        mask_BT,
        rollout_is=options.rollout_is,
        rollout_is_threshold=options.rollout_is_threshold,
        rollout_rs=options.rollout_rs,
        rollout_rs_threshold=options.rollout_rs_threshold,
    )
    return kept_BT, None if found is None else found.batch["rollout_is_weights"]


def _actor(options: VerlOptions) -> ActorConfig:
    correction = RolloutCorrectionConfig(
        loss_type="reinforce", rollout_is=options.rollout_is, rollout_is_threshold=options.rollout_is_threshold
    )
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=options.clip_ratio_low,
        clip_ratio_high=options.clip_ratio_high,
        clip_ratio_c=options.clip_ratio_c,
        loss_agg_mode=options.loss_agg_mode,
        loss_scale_factor=options.loss_scale_factor,
        use_kl_loss=options.kl_loss_type is not None,
        kl_loss_coef=options.kl_loss_coef,
        kl_loss_type=options.kl_loss_type or "low_var_kl",
        entropy_coeff=options.entropy_coeff,
        policy_loss=PolicyLossConfig(loss_mode=options.loss_mode, rollout_correction=correction),
    )


def _data(part: Batch, mask_BT: Tensor, old_BT: Tensor, weights_BT: Tensor | None) -> TensorDict:
    """One prompt token and T response tokens a row, all attended: the layout ppo_loss unpacks."""
    rows, width = mask_BT.shape
    tensors = {
        "prompts": torch.ones(rows, 1, dtype=torch.long),
        "responses": torch.ones(rows, width, dtype=torch.long),
        "attention_mask": torch.ones(rows, 1 + width, dtype=torch.long),
        "response_mask": mask_BT,
        "old_log_probs": old_BT,
        "advantages": _spread(part),
        "ref_log_prob": part.reference_BT,
    }
    if weights_BT is not None:
        tensors["rollout_is_weights"] = weights_BT
    return TensorDict(tensors, batch_size=[rows])


def _flat(values_BT: Tensor) -> Tensor:
    """Without padding, shifted by one: position t predicts token t + 1."""
    return torch.cat([values_BT, torch.zeros_like(values_BT[:, :1])], dim=1).reshape(-1)


def _spread(batch: Batch) -> Tensor:
    advantages = batch.advantages
    return advantages if advantages.dim() == 2 else advantages[:, None].expand(batch.mask_BT.shape).contiguous()
