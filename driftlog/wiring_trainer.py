"""Builds the trainer from a configuration. Imports torch: only the trainer's own process imports this module."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import torch

from consumers.objective.advantages import group_advantages
from consumers.objective.settings import PRESETS, ObjectiveSettings, preset
from consumers.objective.shapes import InvalidSetting
from consumers.trainer.admission import AdmissionRules
from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.pacing import PacingRules
from consumers.trainer.publication import Publication
from consumers.trainer.requests import RequestRules
from consumers.trainer.selection import SelectionRules
from consumers.trainer.service import TrainerService
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.step import AgeWeights, StepMaker
from driftlog.policies import initial_policy
from driftlog.wiring import KeptReader, Site, open_follower, open_reader, open_store
from infra.clock import SystemClock
from infra.config import Config
from infra.kafka_transactions import KafkaTransactionalWriter
from infra.model import load_policy
from infra.prompt_sources import countdown_source
from infra.revision import code_revision
from infra.runner import Assembly
from schemas.errors import ConfigError
from schemas.topics import TopicName
from schemas.trajectory import Sampling
from schemas.trajectory_codec import TrajectoryLimits


def build_trainer(at: Site) -> Assembly:
    """The trainer."""
    config, run, clock = at.config, at.run_id, SystemClock()
    directory = initial_policy(config, at.run)
    learner = HfLearner(learner_settings(config, str(directory)), clock.monotonic_s)
    learner.restore(directory, with_state=False)
    policy = load_policy(directory, config.model.dtype)
    revision, digest = code_revision(), config.digest()
    pacing = PacingRules(
        groups_per_step=config.trainer.groups_per_step,
        run_ahead=config.trainer.effective_run_ahead,
        last_step=config.run.versions,
    )
    with ExitStack() as stack:
        policy_reader = KeptReader(stack)
        writer = KafkaTransactionalWriter(at.kafka, f"{run}-trainer")
        stack.callback(writer.close)
        trajectories = open_reader(at, TopicName.TRAJECTORIES)
        stack.callback(trajectories.close)
        ports = TrainerPorts(
            writer=writer,
            open_policy=lambda: open_follower(at, policy_reader),
            open_ledger=lambda: open_reader(at, TopicName.LEDGER),
            trajectories=trajectories,
            deadletters=KeptReader(stack).put(open_reader(at, TopicName.DEADLETTERS)),
            learner=learner,
            publication=Publication(
                run=run,
                store=open_store(config, at.run),
                learner=learner,
                clock=clock,
                new_attempt_id=lambda: uuid.uuid4().hex,
                config_digest=digest,
                code_revision=revision,
            ),
            step_maker=StepMaker(
                clock=clock,
                advantages=advantages_of(objective_settings(config)),
                age_weights=AgeWeights(max_lag=config.trainer.max_lag),
            ),
            prompts=countdown_source(policy.encode, config.run.seed),
            clock=clock,
        )
        settings = TrainerSettings(
            run=run,
            requests=RequestRules(
                run=run,
                group_size=config.task.group_size,
                max_lag=config.trainer.max_lag,
                max_attempts=config.trainer.max_attempts,
                sampling=Sampling(
                    temperature=config.task.temperature,
                    max_tokens=config.task.max_tokens,
                    stop_token_ids=(policy.eos_token_id,),
                    seed=config.run.seed,
                ),
                pacing=pacing,
            ),
            selection=SelectionRules(
                groups_per_step=config.trainer.groups_per_step,
                order=config.trainer.order,
                min_group=config.trainer.min_group,
                filter_zero_variance=config.trainer.filter_zero_variance,
                admission=AdmissionRules(
                    max_lag=config.trainer.max_lag,
                    barrier=config.coordinator.mode == "barrier",
                    tokenizer_digest=policy.tokenizer_digest,
                ),
            ),
            limits=TrajectoryLimits(vocabulary_size=learner.vocabulary_size()),
            config_digest=digest,
            code_revision=revision,
            group_timeout_s=config.trainer.group_timeout_s,
            step_tries=config.trainer.step_tries,
        )
        service = TrainerService(settings, ports)
        return Assembly(service=service, wakeup=at.wakeup, resources=stack.pop_all())
    raise AssertionError("unreachable: ExitStack swallows nothing")


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
    except InvalidSetting as error:
        raise ConfigError(f"objective.overrides: {error}") from error


def learner_settings(config: Config, initial_directory: str) -> LearnerSettings:
    """The learner's part of the configuration. ConfigError where optimizer or objective contradict themselves."""
    trainer = config.trainer
    objective = objective_settings(config)
    settings = LearnerSettings(
        objective=objective,
        max_lag=trainer.max_lag,
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        schedule=trainer.schedule,
        total_steps=config.run.versions if trainer.schedule != "constant" else None,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        micro_batch_tokens=trainer.micro_batch_tokens,
        logprob_chunk=trainer.logprob_chunk,
        dtype=config.model.dtype,
        threads=trainer.threads,
        seed=config.run.seed,
        reference_directory=Path(initial_directory) if objective.kl_coefficient > 0 else None,
    )
    settings.check_objective()
    return settings


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
