"""TRL's side: GRPOTrainer and RLOOTrainer without a model, a data set or a configuration.

Their losses and advantages live in methods of the trainers. An instance is made without __init__, gets the attributes
these methods read, and a model that answers with given log-probabilities. Nothing of TRL is changed or copied.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from benchmarks.parity.batches import Batch
from benchmarks.parity.comparison import Outcome, Side
from benchmarks.parity.ours import loss_and_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlOptions:
    """The trainer's settings that a case may change; names and defaults as far as possible TRL's."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    max_completion_length: int = 16
    scale_rewards: str = "group"
    vllm_importance_sampling_mode: str | None = None
    """None: no vLLM, old log-probabilities are the behaviour's; else they are the proximal's"""
    clip_min: float | None = None
    clip_max: float | None = None


class GivenModel:
    """Answers the trainer's forward pass with log-probabilities and entropies that it was given."""

    training = True
    is_gradient_checkpointing = False

    def __init__(self, logprobs_BT: Tensor, entropy_BT: Tensor) -> None:
        self.logprobs_BT, self.entropy_BT = logprobs_BT, entropy_BT

    def __call__(self, **_: object) -> SimpleNamespace:
        prompt_B1 = torch.zeros_like(self.logprobs_BT[:, :1])
        return SimpleNamespace(
            log_probs=torch.cat([prompt_B1, self.logprobs_BT], dim=1),
            entropy=torch.cat([prompt_B1, self.entropy_BT], dim=1),
        )


def loss(options: TrlOptions, *, micro_rows: int | None = None) -> Side:
    """GRPOTrainer._compute_loss, on inputs that GRPOTrainer._generate_and_score_completions prepared."""

    def side(batch: Batch) -> Outcome:
        rows = len(batch.mask_BT)
        step = micro_rows or rows
        trainer = _grpo(batch, options, micro_batches=-(-rows // step))
        prepared = _prepare(trainer, batch)
        prepared["advantages"] = batch.advantages
        if options.vllm_importance_sampling_mode is None:
            prepared["old_per_token_logps"] = batch.behaviour_BT

        def total(theta_BT: Tensor, entropy_BT: Tensor) -> Tensor:
            shares = []
            for start in range(0, rows, step):
                at = slice(start, start + step)
                inputs = {name: value[at] if value.dim() else value for name, value in prepared.items()}
                shares.append(trainer._compute_loss(GivenModel(theta_BT[at], entropy_BT[at]), inputs))
            return torch.stack(shares).sum()

        return loss_and_gradient(batch, total)

    return side


def advantages(options: TrlOptions) -> Side:
    """The advantages that GRPOTrainer._generate_and_score_completions makes of the rewards."""

    def side(batch: Batch) -> Outcome:
        return Outcome(value=_prepare(_grpo(batch, options), batch)["advantages"])

    return side


def rloo_advantages(*, beta: float = 0.0) -> Side:
    """The advantages of RLOOTrainer, with its divergence in the reward."""

    def side(batch: Batch) -> Outcome:
        trainer = _rloo(batch, beta=beta)
        # RLOO has no tool mask: what does not count is handed over with no difference to the reference.
        gap_BT = torch.where(batch.mask_BT, batch.reference_BT - batch.proximal_BT, 0.0)
        trainer.ref_model = GivenModel(batch.proximal_BT + gap_BT, batch.entropy_BT)
        return Outcome(value=_prepare(trainer, batch)["advantages"])

    return side


def rloo_loss() -> Side:
    """RLOOTrainer._compute_loss: one ratio a row, the product."""

    def side(batch: Batch) -> Outcome:
        trainer = _rloo(batch, beta=0.0)
        ones_B1 = torch.ones_like(batch.mask_BT[:, :1], dtype=torch.long)
        inputs = {
            "prompt_ids": ones_B1,
            "prompt_mask": ones_B1,
            "completion_ids": torch.ones_like(batch.mask_BT, dtype=torch.long),
            "completion_mask": batch.mask_BT.long(),
            "old_logps": (batch.behaviour_BT * batch.mask_BT).sum(dim=1),
            "advantages": batch.advantages,
        }
        return loss_and_gradient(
            batch,
            lambda theta_BT, entropy_BT: trainer._compute_loss(GivenModel(theta_BT, entropy_BT), inputs),
        )

    return side


def _prepare(trainer: Any, batch: Batch) -> dict[str, Tensor]:
    with _default_dtype(batch.rewards_B.dtype):
        prompts = [{"prompt": str(group)} for group in batch.group_B.tolist()]
        prepared = trainer._generate_and_score_completions(prompts)
    return {name: value for name, value in prepared.items() if isinstance(value, Tensor)}


def _grpo(batch: Batch, options: TrlOptions, *, micro_batches: int = 1) -> Any:
    trainer = _stub(GRPOTrainer, batch, micro_batches, beta=options.beta)
    lengths = _lengths(batch)
    use_vllm = options.vllm_importance_sampling_mode is not None
    sampled = [row[:length].tolist() for row, length in zip(batch.behaviour_BT, lengths, strict=True)]
    tools = [row[:length].long().tolist() for row, length in zip(batch.mask_BT, lengths, strict=True)]
    completions = [[1] * length for length in lengths]
    texts = [""] * len(lengths)
    prompt_ids = [[1]] * len(lengths)
    trainer._generate = lambda prompts: (prompt_ids, completions, tools, texts, sampled, {}, None, [])
    trainer.args.delta = options.delta
    trainer.args.use_bias_correction_kl = options.use_bias_correction_kl
    settings = {
        "loss_type": options.loss_type,
        "importance_sampling_level": options.importance_sampling_level,
        "epsilon_low": options.epsilon,
        "epsilon_high": options.epsilon_high,
        "max_completion_length": options.max_completion_length,
        "scale_rewards": options.scale_rewards,
        "multi_objective_aggregation": "sum_then_normalize",
        "use_vllm": use_vllm,
        "vllm_importance_sampling_correction": use_vllm,
        "vllm_importance_sampling_mode": options.vllm_importance_sampling_mode,
        "vllm_importance_sampling_clip_min": options.clip_min,
        "vllm_importance_sampling_clip_max": options.clip_max,
        "entropy_coef": options.entropy_coef,
        "_entropy_bonus_enabled": options.entropy_coef > 0,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
    }
    for name, value in settings.items():
        setattr(trainer, name, value)
    return trainer


def _rloo(batch: Batch, *, beta: float) -> Any:
    trainer = _stub(RLOOTrainer, batch, 1, beta=beta)
    completions = [[1] * length for length in _lengths(batch)]
    prompt_ids = [[1]] * len(completions)
    trainer._generate = lambda prompts: (prompt_ids, completions, [""] * len(completions))
    trainer.epsilon_low = trainer.epsilon_high = 0.2
    trainer.normalize_advantages = False
    trainer.reward_clip_range = None
    return trainer


def _stub(kind: type, batch: Batch, micro_batches: int, *, beta: float) -> Any:
    """A trainer without __init__: one process, one prompt token, one reward function, no tools or images."""
    rows = len(batch.mask_BT)
    trainer: Any = object.__new__(kind)
    attributes = {
        "model": GivenModel(batch.proximal_BT, batch.entropy_BT),
        "ref_model": GivenModel(batch.reference_BT, batch.entropy_BT),
        "beta": beta,
        "num_generations": batch.group_size,
        "num_iterations": 1,
        "state": SimpleNamespace(global_step=0),
        "current_gradient_accumulation_steps": micro_batches,
        "args": SimpleNamespace(
            steps_per_generation=micro_batches,
            gradient_accumulation_steps=micro_batches,
            per_device_train_batch_size=rows,
            gradient_checkpointing_kwargs=None,
            report_to=[],
        ),
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            is_main_process=True,
            sync_gradients=True,
            autocast=contextlib.nullcontext,
            gather=lambda tensor: tensor,
            gather_for_metrics=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
        ),
        "_calculate_rewards": lambda *_: batch.rewards_B[:, None].clone(),
        "reward_weights": torch.ones(1, dtype=batch.rewards_B.dtype),
        "reward_funcs": [None],
        "reward_func_names": ["reward"],
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "aux_loss_enabled": False,
        "log_multimodal": False,
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def _lengths(batch: Batch) -> list[int]:
    """Tokens of each row up to the last counted one; the whole width in the longest, so that padding matches."""
    width = batch.mask_BT.shape[1]
    last_B = (batch.mask_BT * torch.arange(1, width + 1)).amax(dim=1).clamp(min=1)
    lengths = last_B.tolist()
    lengths[0] = width
    return lengths


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """TRL builds tensors from lists of numbers: they get the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
