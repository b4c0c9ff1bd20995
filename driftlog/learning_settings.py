"""From the configuration to the learner's settings; refuses here, before anything starts, what the maths refuses.

Imports torch: `up` calls it only where something differs from a preset, which is legal by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import torch

from consumers.objective.advantages import group_advantages
from consumers.objective.legality import check_legal
from consumers.objective.settings import PRESETS, ObjectiveSettings, preset
from consumers.objective.shapes import IllegalCombination, InvalidSetting
from consumers.trainer.admission import AdmissionRules
from consumers.trainer.learner_settings import LearnerSettings, LoraSettings
from infra.config import Config
from infra.config_lora import ALL_LINEAR
from schemas.errors import ConfigError


def objective_settings(config: Config) -> ObjectiveSettings:
    """The preset with its overrides; words of the file become the choices they name. ConfigError names the key."""
    overrides = dict(config.objective.overrides)
    plain = PRESETS[config.objective.preset]
    kinds = {item.name: type(getattr(plain, item.name)) for item in fields(plain)}
    for name, value in overrides.items():
        kind = kinds.get(name, str)
        if issubclass(kind, StrEnum) and value in list(kind):
            overrides[name] = kind(value)
    overrides.setdefault("min_group", config.trainer.min_group)
    if plain.constant_length is None and config.objective.preset == "dr_grpo":
        overrides.setdefault("constant_length", config.task.max_tokens)
    try:
        return preset(config.objective.preset, **overrides)
    except (InvalidSetting, TypeError) as error:
        raise ConfigError(f"objective.overrides: {error}") from error


def learner_settings(config: Config, initial_directory: str, *, device: str | None = None) -> LearnerSettings:
    """The learner's part of the configuration. ConfigError where optimizer or objective contradict themselves.

    `initial_directory`: the initial policy, which is the reference, and the base of adapters, where no other is named;
    `device`: of this rank, where it is not the one of the configuration."""
    trainer, reference = config.trainer, config.reference
    objective = objective_settings(config)
    wanted = objective.kl_coefficient > 0 or bool(reference.directory)
    settings = LearnerSettings(
        objective=objective,
        max_lag=trainer.largest_lag,
        fingerprint_differs=generators_differ(config),
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        schedule=trainer.schedule,
        total_steps=_total_steps(config) if trainer.schedule != "constant" else None,
        weight_decay=trainer.weight_decay,
        betas=trainer.betas,
        adam_epsilon=trainer.adam_epsilon,
        max_grad_norm=trainer.max_grad_norm,
        max_bad_steps=trainer.max_bad_steps,
        epochs=trainer.epochs,
        minibatches=trainer.minibatches,
        micro_batch_tokens=trainer.micro_batch_tokens,
        logprob_chunk=trainer.logprob_chunk,
        mask_truncated=trainer.mask_truncated,
        gradient_checkpointing=trainer.gradient_checkpointing,
        dtype=config.model.dtype,
        device=device or trainer.device,
        threads=trainer.threads,
        seed=config.run.seed,
        reference_directory=Path(reference.directory or initial_directory) if wanted else None,
        # The initial policy is version 0; another directory is of no version of this run.
        reference_version=0 if wanted and not reference.directory else None,
        reference_refresh_every=reference.refresh_every,
        parallel=trainer.parallel,
        lora=lora_settings(config, initial_directory),
    )
    settings.check_objective()
    return settings


def lora_settings(config: Config, base_directory: str) -> LoraSettings | None:
    """The adapters to train, on that base; None: whole weights."""
    lora = config.lora
    if not lora.rank:
        return None
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=ALL_LINEAR if lora.target_modules == ALL_LINEAR else tuple(lora.target_modules),
        publish=lora.publish,
        base_directory=Path(base_directory),
    )


def generators_differ(config: Config) -> bool:
    """Generators compute other numbers than the trainer: another engine, or half precision (which the trainer keeps
    out of its weights and logits, and an engine does not)."""
    return config.generator.engine != "hf" or config.model.dtype != "float32"


def admission_rules(config: Config, fingerprint: Mapping[str, str]) -> AdmissionRules:
    """What a trajectory must be like. `fingerprint`: of the trainer."""
    objective = objective_settings(config)
    try:
        check_legal(
            objective,
            epochs_times_minibatches=config.trainer.epochs * config.trainer.minibatches,
            max_lag=config.trainer.largest_lag,
            fingerprint_differs=True,
        )
        takes_other_numbers = True
    except IllegalCombination:
        takes_other_numbers = False
    return AdmissionRules(
        max_lag=config.trainer.largest_lag,
        barrier=config.coordinator.mode == "barrier",
        tokenizer_digest=fingerprint["tokenizer_digest"],
        fingerprint=fingerprint,
        takes_other_numbers=takes_other_numbers,
    )


def check_learning(config: Config) -> None:
    """ConfigError for what the maths refuses, without a model; the presets as they are need no look."""
    if config.objective.overrides or config.trainer.schedule != "constant":
        learner_settings(config, "the initial policy")
    if config.reference.directory and not (Path(config.reference.directory) / "config.json").is_file():
        raise ConfigError(
            f"reference.directory = {config.reference.directory!r} is not the directory of a Hugging Face model"
        )


def advantages_of(objective: ObjectiveSettings) -> Callable[[Sequence[Sequence[float]]], list[list[float]]]:
    """The objective's advantage estimator over lists: rewards of each group -> advantages in the same shape."""

    def compute(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        flat = [reward for group in rewards for reward in group]
        numbers = [place for place, group in enumerate(rewards) for _ in group]
        values = iter(
            group_advantages(
                torch.tensor(flat, dtype=torch.float64),
                torch.tensor(numbers, dtype=torch.int64),
                objective.advantage,
                std_kind=objective.std_kind,
                min_group=objective.min_group,
                epsilon=objective.advantage_epsilon,
                zero_variance_tolerance=objective.zero_variance_tolerance,
            ).advantages_N.tolist()
        )
        return [[next(values) for _ in group] for group in rewards]

    return compute


def _total_steps(config: Config) -> int:
    """Optimizer steps of the whole run."""
    return config.run.versions * config.trainer.epochs * config.trainer.minibatches
