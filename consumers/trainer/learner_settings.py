"""What the learner can be told: optimizer, schedule, batching, precision. Values only; imports no model code."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from consumers.objective.legality import check_legal
from consumers.objective.options import KlPlacement
from consumers.objective.settings import GRPO, ObjectiveSettings
from consumers.objective.shapes import ObjectiveError
from consumers.trainer.ranks import Parallel
from schemas.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Adapters are trained in the place of whole weights."""

    rank: int
    alpha: float
    """their product counts alpha / rank times"""
    target_modules: str | tuple[str, ...] = "all-linear"
    """last parts of module names; all-linear: every linear layer but the output's"""
    publish: Literal["merged", "adapter"] = "merged"
    base_directory: Path
    """the model that the adapters are on: the initial policy"""

    def __post_init__(self) -> None:
        _require("lora.rank", self.rank, self.rank >= 1, "at least 1")
        _require("lora.alpha", self.alpha, 0 < self.alpha < math.inf, "above 0 and finite")
        _require("lora.publish", self.publish, self.publish in ("merged", "adapter"), "merged or adapter")

    @property
    def scale(self) -> float:
        """How often an adapter's product counts."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """One learner, complete. ConfigError names the key that is out of range."""

    objective: ObjectiveSettings = field(default_factory=lambda: GRPO)
    max_lag: int = 2
    """largest policy lag that is trained (hard_max_lag where down-weighting is on); some objectives need 0"""
    fingerprint_differs: bool = False
    """generators use another precision or engine than the trainer"""

    learning_rate: float = 1e-6
    warmup_steps: int = 10
    """optimizer steps of linear rise"""
    schedule: Schedule = "constant"
    total_steps: int | None = None
    """optimizer steps at which linear and cosine reach zero"""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    max_bad_steps: int = 5
    """optimizer steps in a row that could not be made (gradient not finite, nothing counted) before the run stops"""

    epochs: int = 1
    minibatches: int = 1
    """optimizer steps of a training step = epochs x minibatches"""
    micro_batch_tokens: int = 16384
    """padded tokens of one forward pass"""
    logprob_chunk: int = 512
    """tokens whose logits are held at a time; decides the last bits of gradients, so it is in the manifest"""
    mask_truncated: bool = False
    """rows cut off by max_tokens keep their reward in the baseline and leave the loss"""
    gradient_checkpointing: bool = False

    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the forward pass; master weights and logits are float32 always"""
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    reference_directory: Path | None = None
    """reference policy, for KL; None: none"""
    reference_version: int | None = None
    """version whose weights that directory holds; None: none of this run"""
    reference_refresh_every: int = 0
    """versions after which the newest weights become the reference; 0: never"""
    parallel: Parallel = "ddp"
    """what several ranks do: each holds the whole model, or a share of it"""
    lora: LoraSettings | None = None
    """None: every weight is trained"""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "max_grad_norm", "adam_epsilon")
        for name in positive:
            _require(name, getattr(self, name), 0 < getattr(self, name) < math.inf, "above 0 and finite")
        at_least_one = ("epochs", "minibatches", "micro_batch_tokens", "logprob_chunk", "threads", "max_bad_steps")
        for name in at_least_one:
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "weight_decay", "max_lag", "reference_refresh_every"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "0 or above")
        _require("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "in [0, 1)")
        _require(
            "schedule", self.schedule, self.schedule in ("constant", "linear", "cosine"), "constant, linear or cosine"
        )
        _require("parallel", self.parallel, self.parallel in ("ddp", "fsdp"), "ddp or fsdp")
        _require("dtype", self.dtype, self.dtype in ("float32", "bfloat16"), "float32 or bfloat16")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ConfigError(
                f"learner.total_steps = {self.total_steps}: schedule {self.schedule} needs more than warmup_steps"
            )
        if self.lora is not None and self.parallel == "fsdp":
            raise ConfigError('learner.parallel = "fsdp": adapters are not sharded; use "ddp"')
        if self.objective.kl_coefficient > 0 and self.reference_directory is None:
            raise ConfigError("learner.reference_directory is unset: kl_coefficient > 0 needs a reference policy")

    @property
    def kl_in_reward(self) -> bool:
        """The divergence from the reference is taken off the rewards."""
        return self.objective.kl_coefficient > 0 and self.objective.kl_placement is KlPlacement.REWARD

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one training step."""
        return self.epochs * self.minibatches

    def check_objective(self) -> tuple[str, ...]:
        """Refuse objective settings that contradict each other (ConfigError); warnings, one sentence each."""
        try:
            return check_legal(
                self.objective,
                epochs_times_minibatches=self.optimizer_steps,
                max_lag=self.max_lag,
                fingerprint_differs=self.fingerprint_differs,
            )
        except ObjectiveError as error:
            raise ConfigError(f"objective: {error}") from error


def learning_rate_at(settings: LearnerSettings, optimizer_step: int) -> float:
    """Learning rate of the optimizer step with this index, from 0. A pure function: there is no schedule state.

    >>> learning_rate_at(LearnerSettings(learning_rate=1.0, warmup_steps=4), 1)
    0.5
    """
    if optimizer_step < settings.warmup_steps:
        return settings.learning_rate * (optimizer_step + 1) / settings.warmup_steps
    if settings.schedule == "constant" or settings.total_steps is None:
        return settings.learning_rate
    span = settings.total_steps - settings.warmup_steps
    done = min(1.0, (optimizer_step - settings.warmup_steps) / span)
    factor = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate * factor


def _require(name: str, value: object, holds: bool, meaning: str) -> None:
    if not holds:
        raise ConfigError(f"learner.{name} = {value!r}: must be {meaning}")
