"""The tables of the configuration that decide what and how is learnt, and which of their keys contradict each other.

Values only: whether the objective itself is legal is judged by the maths (`driftlog train` and `up` ask it before
anything starts).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from infra.config_section import Section

StaleAction = Literal["drop", "down_weight", "wait"]


class TrainerSection(Section):
    """[trainer]"""

    groups_per_step: int = Field(default=16, ge=1)
    max_lag: int = Field(default=2, ge=0)
    """policy lag above which no token is trained (with down_weight: is trained with less weight), training steps"""
    run_ahead: int | None = Field(default=None, ge=0)
    """how many training steps generation may run ahead; unset: min(1, max_lag)"""
    stale_action: StaleAction = "drop"
    """drop: no token above max_lag is trained; down_weight: up to hard_max_lag, with less weight; wait: a step is held
    until the groups it would make too old are in"""
    hard_max_lag: int | None = Field(default=None, ge=0)
    """with down_weight: policy lag above which nothing is trained, training steps"""
    stale_decay: float = Field(default=0.5, gt=0, le=1)
    """with down_weight: row weight = stale_decay ^ (policy lag - max_lag)"""
    order: Literal["issue", "ready"] = "issue"
    """issue: a batch waits for the oldest open groups; ready: complete groups as they come"""
    group_timeout_s: float = Field(default=60.0, gt=0)
    """from a group's issue to its drop as incomplete or lost"""
    max_attempts: int = Field(default=3, ge=1)
    """times one prompt is issued in one pass before it is given up"""
    min_group: int = Field(default=2, ge=2)
    """usable rewards a group needs"""
    filter_zero_variance: bool = False
    """replace groups whose rewards are all equal"""
    refill_rounds: int = Field(default=3, ge=0)
    """times a step's zero-variance groups are replaced; then it takes a smaller batch"""
    step_tries: int = Field(default=3, ge=1)
    """times a failed step (out of memory) is tried with the same input"""
    overlap_publication: bool = False
    """checkpoint and transaction of a version run while the next step computes, at most one step behind; costs a copy
    of weights and optimizer state in memory"""

    epochs: int = Field(default=1, ge=1)
    """passes over the batch of a training step"""
    minibatches: int = Field(default=1, ge=1)
    """optimizer steps of one pass"""
    mask_truncated: bool = False
    """rows cut off by task.max_tokens keep their reward in the baseline and leave the loss (overlong masking)"""
    learning_rate: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine reach zero with the last configured version"""
    warmup_steps: int = Field(default=0, ge=0)
    """optimizer steps of linear rise"""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    """of AdamW, each in [0, 1)"""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_bad_steps: int = Field(default=5, ge=1)
    """optimizer steps in a row that could not be made (gradient not finite, everything masked) before the run stops"""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """token budget of one forward and backward pass"""
    logprob_chunk: int = Field(default=2048, ge=1)
    """tokens a log-probability chunk; changes the last bits, so the manifest records it"""
    gradient_checkpointing: bool = False
    """hold fewer activations and compute them again: less memory, a third more time"""
    device: str = "cpu"
    """cpu or cuda; under torchrun each rank takes the accelerator of its local rank"""
    threads: int = Field(default=1, ge=1)
    """torch threads"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """under torchrun: ddp: every rank holds the whole model; fsdp: a share of it (FSDP2)"""
    rank_timeout_s: float = Field(default=300.0, gt=0)
    """longest wait for another rank of torchrun; then every rank ends and the supervisor starts them again"""

    @property
    def effective_run_ahead(self) -> int:
        """run_ahead with its default filled in."""
        return min(1, self.max_lag) if self.run_ahead is None else self.run_ahead

    @property
    def largest_lag(self) -> int:
        """Policy lag above which nothing is trained: max_lag, or hard_max_lag where down-weighting is on."""
        if self.stale_action == "down_weight" and self.hard_max_lag is not None:
            return self.hard_max_lag
        return self.max_lag

    @property
    def decay(self) -> float:
        """Row weight a training step above max_lag."""
        return self.stale_decay if self.stale_action == "down_weight" else 1.0


class ReplaySection(Section):
    """[replay]; off by default"""

    steps: int = Field(default=0, ge=0)
    """a group may be used again within that many training steps after its first use; 0: no replay"""
    groups_per_step: int = Field(default=0, ge=0)
    """at most that many replayed groups a step, on top of trainer.groups_per_step"""
    max_use: int = Field(default=2, ge=2)
    """uses of one group, the first one included"""


class ReferenceSection(Section):
    """[reference]; the frozen policy of the KL term"""

    directory: str = ""
    """a model directory with the same tokenizer; empty: the initial policy"""
    refresh_every: int = Field(default=0, ge=0)
    """versions after which the newest weights become the reference; 0: frozen for the whole run"""


class ObjectiveSection(Section):
    """[objective]; formulas and legal combinations are in docs/objectives.md"""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "decoupled"] = "grpo"
    overrides: dict[str, Any] = Field(default_factory=dict)
    """single settings changed against the preset, e.g. clip_high = 0.28"""

    @property
    def uses_kl(self) -> bool:
        """A KL term is on: every preset has it off."""
        return bool(self.overrides.get("kl_coefficient", 0.0))

    @property
    def kl_in_reward(self) -> bool:
        """The KL term changes the reward, so advantages do not follow from the stored rewards alone."""
        return self.uses_kl and self.overrides.get("kl_placement") == "reward"


class AlarmsSection(Section):
    """[alarms]; shown by `driftlog status` and the live view, never acted on"""

    window_steps: int = Field(default=10, ge=1)
    """latest training steps an alarm looks at"""
    ess_low: float = Field(default=0.5, ge=0, le=1)
    """mean effective sample size of the ratio below this: the data is too old or the engines disagree"""
    entropy_low: float = Field(default=0.02, ge=0)
    """mean entropy below this, nats: the policy has collapsed onto single answers"""
    entropy_fall: float = Field(default=0.8, gt=0, le=1)
    """share of the window's first entropy lost within it"""
    clip_fraction_high: float = Field(default=0.3, ge=0, le=1)
    """mean share of clipped tokens above this: most of the gradient is cut away"""
    grad_norm_high: float = Field(default=100.0, gt=0)
    """mean gradient norm before clipping above this: steps are all direction, no size"""
    zero_variance_high: float = Field(default=0.9, ge=0, le=1)
    """mean share of groups whose rewards are all equal above this: next to nothing is learnt"""


def trainer_problems(
    trainer: TrainerSection, replay: ReplaySection, reference: ReferenceSection, objective: ObjectiveSection
) -> Iterator[str]:
    """Every combination inside these tables that cannot work, in words that say the way out."""
    yield from _lag_problems(trainer)
    yield from _replay_problems(trainer, replay)
    if not all(0 <= beta < 1 for beta in trainer.betas):
        yield f"trainer.betas = {list(trainer.betas)}: each must be in [0, 1)"
    if reference.refresh_every and not objective.uses_kl and not reference.directory:
        yield (
            f"reference.refresh_every = {reference.refresh_every} with objective.overrides.kl_coefficient = 0: there "
            "is no reference to refresh; set kl_coefficient or reference.directory"
        )


def _lag_problems(trainer: TrainerSection) -> Iterator[str]:
    if trainer.effective_run_ahead > trainer.max_lag:
        yield (
            f"trainer.run_ahead = {trainer.run_ahead} > trainer.max_lag = {trainer.max_lag}: generation would run "
            "further ahead than may be trained; lower run_ahead or raise max_lag"
        )
    weighing = trainer.stale_action == "down_weight"
    if weighing and trainer.hard_max_lag is None:
        yield (
            'trainer.stale_action = "down_weight" without trainer.hard_max_lag: rows of any age would be trained; '
            "set hard_max_lag"
        )
    if not weighing and trainer.hard_max_lag is not None:
        yield (
            f'trainer.hard_max_lag = {trainer.hard_max_lag} with trainer.stale_action = "{trainer.stale_action}": it '
            'has no effect; set stale_action = "down_weight", or leave hard_max_lag out'
        )
    if weighing and trainer.hard_max_lag is not None and trainer.hard_max_lag < trainer.max_lag:
        yield (
            f"trainer.hard_max_lag = {trainer.hard_max_lag} < trainer.max_lag = {trainer.max_lag}: rows that are fresh "
            "would be dropped; raise hard_max_lag"
        )
    if trainer.stale_action == "wait" and trainer.max_lag == 0:
        yield (
            'trainer.stale_action = "wait" with trainer.max_lag = 0: a step always waits for its own groups; '
            'use "drop", or raise max_lag'
        )


def _replay_problems(trainer: TrainerSection, replay: ReplaySection) -> Iterator[str]:
    if bool(replay.steps) != bool(replay.groups_per_step):
        yield (
            f"replay.steps = {replay.steps} with replay.groups_per_step = {replay.groups_per_step}: replay needs both "
            "above 0, or both 0"
        )
    elif replay.steps and trainer.effective_run_ahead >= trainer.largest_lag:
        yield (
            f"replay.steps = {replay.steps} with trainer.run_ahead = {trainer.effective_run_ahead} >= the largest lag "
            f"that is trained, {trainer.largest_lag}: groups reach their first use as old as allowed, none could be "
            "used again; lower run_ahead or raise max_lag"
        )
