"""Builds the trainer from a configuration. Imports torch: only the trainer's own process imports this module."""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import ExitStack
from functools import partial

from consumers.trainer.branching import BranchWish
from consumers.trainer.decoding import read_group
from consumers.trainer.learner import HfLearner
from consumers.trainer.pacing import PacingRules
from consumers.trainer.publication import Publication
from consumers.trainer.ranks import OneRank, Ranks, placement
from consumers.trainer.replay import ReplayRules
from consumers.trainer.requests import RequestRules
from consumers.trainer.selection import SelectionRules
from consumers.trainer.service import TrainerService
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.step import AgeWeights, StepMaker
from driftlog.learning_settings import admission_rules, advantages_of, learner_settings, objective_settings
from driftlog.policies import initial_policy
from driftlog.run_directory import RunDirectory
from driftlog.taps import tapped_transactions
from driftlog.task_wiring import training_prompts, with_prompts_digest
from driftlog.wiring import KeptReader, Site, open_follower, open_reader, open_store
from infra.clock import SystemClock
from infra.config import Config
from infra.kafka_transactions import KafkaTransactionalWriter
from infra.logs import event
from infra.model import load_policy
from infra.revision import code_revision
from infra.runner import Assembly, RingingExecutor
from schemas.ids import RunId
from schemas.topics import TopicName
from schemas.trajectory import Sampling
from schemas.trajectory_codec import TrajectoryLimits

__all__ = ["advantages_of", "build_trainer", "learner_settings", "objective_settings", "serve_rank"]

log = logging.getLogger(__name__)


def build_trainer(at: Site, *, branch: BranchWish | None = None) -> Assembly:
    """The trainer; under torchrun, its rank 0. `branch`: go on from an older version, once."""
    config, run, clock = with_prompts_digest(at.config), at.run_id, SystemClock()
    directory = initial_policy(config, at.run)
    revision, digest = code_revision(), config.digest()
    with ExitStack() as stack:
        ranks = _ranks(config)
        stack.callback(ranks.close)
        learner = _learner(config, at.run, ranks)
        stack.callback(learner.close)
        for warning in learner.warnings:
            event(log, "objective_warning", level=logging.WARNING, words=warning)
        learner.restore(directory, with_state=False)
        policy = load_policy(directory, config.model.dtype)
        policy_reader = KeptReader(stack)
        writer = KafkaTransactionalWriter(at.kafka, f"{run}-trainer")
        stack.callback(writer.close)
        limits = TrajectoryLimits(vocabulary_size=learner.vocabulary_size())
        # The service seeks before it reads: from the beginning a long run would be read, and decoded, for nothing.
        decode = partial(read_group, limits=limits)
        trajectories = open_reader(at, TopicName.TRAJECTORIES, start="end", prepare=decode)
        stack.callback(trajectories.close)
        executor = None
        if config.trainer.overlap_publication:
            # Closed before the writer that its thread uses.
            executor = stack.enter_context(RingingExecutor(1, at.wakeup))
        ports = TrainerPorts(
            writer=tapped_transactions(writer, at.taps),
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
                age_weights=AgeWeights(max_lag=config.trainer.max_lag, decay=config.trainer.decay),
                penalties=learner.reward_penalties if config.objective.kl_in_reward else None,
            ),
            prompts=training_prompts(config, policy),
            clock=clock,
            executor=executor,
        )
        settings = _trainer_settings(config, learner, limits, policy.eos_token_id, revision, branch)
        service = TrainerService(settings, ports)
        return Assembly(service=service, wakeup=at.wakeup, resources=stack.pop_all())
    raise AssertionError("unreachable: ExitStack swallows nothing")


def _trainer_settings(
    config: Config,
    learner: HfLearner,
    limits: TrajectoryLimits,
    eos_token_id: int,
    revision: str,
    branch: BranchWish | None = None,
) -> TrainerSettings:
    """Everything the service decides by."""
    return TrainerSettings(
        run=RunId(config.run.name),
        requests=RequestRules(
            run=RunId(config.run.name),
            group_size=config.task.group_size,
            max_lag=config.trainer.max_lag,
            max_attempts=config.trainer.max_attempts,
            sampling=Sampling(
                temperature=config.task.temperature,
                max_tokens=config.task.max_tokens,
                stop_token_ids=(eos_token_id,),
                seed=config.run.seed,
            ),
            pacing=PacingRules(
                groups_per_step=config.trainer.groups_per_step,
                run_ahead=config.trainer.effective_run_ahead,
                last_step=config.run.versions,
            ),
        ),
        selection=SelectionRules(
            groups_per_step=config.trainer.groups_per_step,
            order=config.trainer.order,
            min_group=config.trainer.min_group,
            filter_zero_variance=config.trainer.filter_zero_variance,
            admission=admission_rules(config, learner.fingerprint()),
            hold_for_in_flight=config.trainer.stale_action == "wait",
            run_ahead=config.trainer.effective_run_ahead,
        ),
        limits=limits,
        config_digest=config.digest(),
        code_revision=revision,
        group_timeout_s=config.trainer.group_timeout_s,
        step_tries=config.trainer.step_tries,
        state_every=config.checkpoints.state_every,
        branch=branch,
        refill_rounds=config.trainer.refill_rounds,
        replay=ReplayRules(
            steps=config.replay.steps,
            groups_per_step=config.replay.groups_per_step,
            max_use=config.replay.max_use,
        ),
    )


def serve_rank(config: Config, run: RunDirectory) -> None:
    """A rank of torchrun that is not the trainer: computes its share until rank 0 sends it home."""
    ranks = _ranks(config)
    try:
        _learner(config, run, ranks).serve()
    finally:
        ranks.close()


def _ranks(config: Config) -> Ranks:
    """What torchrun started, joined; or this process alone."""
    here = placement(os.environ)
    if here.count == 1:
        return OneRank()
    from consumers.trainer.ranks_torch import ranks_from_environment

    return ranks_from_environment(here, device=_device(config), timeout_s=config.trainer.rank_timeout_s)


def _learner(config: Config, run: RunDirectory, ranks: Ranks) -> HfLearner:
    directory = initial_policy(config, run)
    settings = learner_settings(config, str(directory), device=_device(config))
    return HfLearner(settings, SystemClock().monotonic_s, ranks)


def _device(config: Config) -> str:
    """Each rank of one machine takes an accelerator of its own."""
    local_rank = placement(os.environ).local_rank
    return f"cuda:{local_rank}" if config.trainer.device == "cuda" else config.trainer.device
