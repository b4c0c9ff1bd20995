"""Builds the learners a replay trains with, one a configuration of the run. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from consumers.offline.replay import OpenRetrainer, Retrainer
from consumers.offline.replay.report import Difference, Environment
from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.step import AgeWeights
from driftlog.learning_settings import advantages_of, learner_settings
from driftlog.policies import initial_policy
from driftlog.run_reading import OpenedRun
from infra.clock import SystemClock
from infra.config import Config
from infra.model import library_versions
from infra.ports import CheckpointStore
from infra.revision import code_revision
from schemas.errors import CheckpointError, ConfigError
from schemas.policy_fold import PolicyFold


def retrainers(at: OpenedRun, fold: PolicyFold, store: CheckpointStore, tell: Callable[[str], None]) -> OpenRetrainer:
    """Learners by the config digest of a step, with the threads its manifest names."""
    configs = at.run.configs_by_digest()
    revision = code_revision()

    def open_retrainer(config_digest: str, threads: int | None) -> Retrainer:
        config, notices = config_of(configs, config_digest)
        settings = learner_settings(config, _reference(config, at, fold, store), device=_device(config))
        settings = settings if threads is None else replace(settings, threads=threads)
        learner = HfLearner(settings, SystemClock().monotonic_s)
        tell(f"training with {settings.threads} torch thread{'s' * (settings.threads > 1)}{_whose(threads)}")
        return Retrainer(
            learner=learner,
            advantages=advantages_of(settings.objective),
            age_weights=AgeWeights(max_lag=config.trainer.max_lag, decay=config.trainer.decay),
            kl_in_reward=config.objective.kl_in_reward,
            environment=_environment(settings, revision),
            notices=notices,
        )

    return open_retrainer


def config_of(configs: Mapping[str, Config], config_digest: str) -> tuple[Config, tuple[Difference, ...]]:
    """The stored configuration of that digest. ConfigError where several are stored and none of them is it."""
    if config_digest in configs:
        return configs[config_digest], ()
    different = {config.digest(): config for config in configs.values()}
    if len(different) != 1:
        raise ConfigError(
            f"a step was trained under configuration {config_digest[:12]}..., which is none of the {len(different)} "
            "stored with the run: replay with the code the manifest names"
        )
    # One configuration is stored, so it is the one; a build with other keys gives it another digest.
    [(digest, config)] = different.items()
    words = f"digest {config_digest[:12]}... when it was trained, this build reads {digest[:12]}..."
    return config, (Difference(part="environment", subject="configuration", detail=words),)


def _whose(threads: int | None) -> str:
    return ", as the configuration says (no manifest is left)" if threads is None else ", as the manifest records"


def _environment(settings: LearnerSettings, revision: str) -> Environment:
    """As it is now: what torch made of the threads, not what was asked for."""
    return Environment(
        library_versions=dict(library_versions()),
        threads=torch.get_num_threads(),
        ranks=1,
        device_type=torch.device(settings.device).type,
        logprob_chunk=settings.logprob_chunk,
        code_revision=revision,
    )


def _device(config: Config) -> str:
    """The trainer's; the CPU where its accelerator is not here, which is told as a difference."""
    wanted = config.trainer.device
    return "cpu" if wanted.startswith("cuda") and not torch.cuda.is_available() else wanted


def _reference(config: Config, at: OpenedRun, fold: PolicyFold, store: CheckpointStore) -> str:
    """The initial policy, for a KL term: version 0 of the store, or the directory it was made from; adapters are on the
    latter, whose weights are those of version 0."""
    if config.lora.rank:
        return str(initial_policy(config, at.run))
    if config.reference.directory or not config.objective.uses_kl:
        return ""
    first = fold.versions.get(0)
    if first is not None:
        try:
            directory, _ = store.fetch(first.event.manifest_uri, first.event.manifest_sha256)
        except CheckpointError:
            return str(initial_policy(config, at.run))  # retired: the run's own copy has the same weights
        return str(Path(directory))
    return str(initial_policy(config, at.run))
