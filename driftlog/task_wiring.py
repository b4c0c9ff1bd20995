"""From [task] of the configuration to the prompts that are trained and the rewards that judge.

Owns what ties a run to its prompts: their digest is stored with the configuration when the run begins, and another
file under the same run is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.config import Config
from infra.config_task import TaskSection
from infra.ports import RewardScorer
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.model import Policy
    from infra.prompt_rows import ModelLimits
    from infra.prompt_sources import ShuffledPrompts


def with_prompts_digest(config: Config) -> Config:
    """The configuration with task.prompts_sha256 filled in. ConfigError when it names other bytes than there are."""
    if config.task.kind != "prompts":
        return config
    from infra.prompt_files import prompts_sha256

    found = prompts_sha256(Path(config.task.prompts))
    if config.task.prompts_sha256 not in ("", found):
        raise _other_prompts(config, config.task.prompts_sha256, found)
    return config.model_copy(update={"task": config.task.model_copy(update={"prompts_sha256": found})})


def check_same_prompts(stored: Config, config: Config) -> None:
    """A run goes on with the prompts it began with, whatever changes are accepted: its group ids are made of them."""
    if stored.task.kind != config.task.kind:
        raise ConfigError(
            f"run {config.run.name!r} was begun with task.kind = {stored.task.kind!r}: start another one (--run NAME)"
        )
    if stored.task.prompts_sha256 != config.task.prompts_sha256:
        raise _other_prompts(config, stored.task.prompts_sha256, config.task.prompts_sha256)
    if stored.task.mixture != config.task.mixture:
        raise ConfigError(
            f"run {config.run.name!r} was begun with task.mixture = {stored.task.mixture}, now it is "
            f"{config.task.mixture}: prompts would change places under the same group ids; start another run (--run)"
        )


def with_checked_task(config: Config) -> Config:
    """As with_prompts_digest, after every row was read, without a tokenizer, and the rewards were loaded once, where
    the generators load them. Left for the trainer to find out: whether each prompt fits the model.
    """
    # Later it would be found out by a generator, beside a trainer that has begun the run under that name.
    from driftlog.episode_wiring import open_environment

    (open_environment(config.task) or open_scorer(config.task)).close()
    if config.task.kind == "prompts":
        from infra.prompt_files import prompt_rows
        from infra.prompt_rows import check_rows

        check_rows(prompt_rows(Path(config.task.prompts)), config.task)
    return with_prompts_digest(config)


def training_prompts(config: Config, policy: Policy) -> ShuffledPrompts:
    """The source the trainer asks from."""
    from infra.prompt_sources import ShuffledPrompts, countdown_source

    if config.task.kind == "countdown":
        return countdown_source(policy.encode, config.run.seed)
    from infra.prompt_files import prompt_rows
    from infra.prompt_rows import model_limits, own_prompts

    limits = model_limits(
        policy.tokenizer,
        vocabulary_size=policy.vocabulary_size,
        context_tokens=_context_tokens(policy.model.config),
    )
    return ShuffledPrompts(own_prompts(prompt_rows(Path(config.task.prompts)), config.task, limits), config.run.seed)


def limits_of_directory(directory: Path) -> ModelLimits:
    """From a model directory, its weights unread. ConfigError or EnvironmentMissing say what is missing."""
    from infra.model import LOCAL_ONLY, transformers_module
    from infra.prompt_rows import model_limits

    transformers = transformers_module()
    try:
        model = transformers.AutoConfig.from_pretrained(directory, **LOCAL_ONLY)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **LOCAL_ONLY)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model directory {directory} cannot be loaded: {error}") from error
    size = getattr(model.get_text_config(), "vocab_size", None)
    if size is None:
        raise ConfigError(f"{directory / 'config.json'} states no vocab_size: it is no language model")
    return model_limits(tokenizer, vocabulary_size=int(size), context_tokens=_context_tokens(model))


def open_scorer(task: TaskSection, on_done: Callable[[], None] = lambda: None) -> RewardScorer:
    """What judges: in this process where the rewards are ours, in processes of their own where one is the user's."""
    if task.worker_processes == 0:
        from infra.reward_loading import load_rewards
        from infra.rewards import ScoredAtOnce

        return ScoredAtOnce(load_rewards(task.reward_entries()))
    from infra.reward_processes import ProcessScorer, RewardProcessSettings

    settings = RewardProcessSettings(
        entries=tuple(task.reward_entries()), processes=task.worker_processes, timeout_s=task.reward_timeout_s
    )
    return ProcessScorer(settings, on_done)


def _context_tokens(model_config: Any) -> int | None:
    found = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def _other_prompts(config: Config, stored: str, found: str) -> ConfigError:
    return ConfigError(
        f"task.prompts: {config.task.prompts} is not what run {config.run.name!r} began with (sha256 {stored[:12]}..., "
        f"now {found[:12]}...): its group ids are made of prompt indices. Put the old file back, or start another "
        "run (--run NAME)"
    )
