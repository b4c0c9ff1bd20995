"""From [task] of the configuration to who plays: an engine alone and a reward, or an engine with an environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from driftlog.task_wiring import open_scorer
from infra.config_task import TaskSection
from infra.environment import AskedAtOnce, EnvironmentPort, EpisodeRewards
from infra.environment_loading import load_environment
from infra.model import LOCAL_ONLY, transformers_module
from infra.observation_template import observation_encoder
from infra.ports import GenerationEngine, RewardScorer
from infra.reward_processes import ProcessEnvironment, RewardProcessSettings
from producers.episodes import EpisodeEngine, EpisodeSettings


def open_players(
    engine: GenerationEngine,
    task: TaskSection,
    directory: Path,
    on_done: Callable[[], None] = lambda: None,
    *,
    in_step: bool,
) -> tuple[GenerationEngine, RewardScorer]:
    """What samples and what rewards. `directory`: a model directory, for its tokenizer.

    `in_step`: the members of a group take their turns together (EpisodeSettings). Closing both frees everything.
    """
    environment = open_environment(task, on_done)
    if environment is None:
        return engine, open_scorer(task, on_done)
    tokenizer = transformers_module().AutoTokenizer.from_pretrained(directory, **LOCAL_ONLY)
    encode = observation_encoder(tokenizer, task.observation_template)
    settings = EpisodeSettings(max_turns=task.max_turns, in_step=in_step)
    return EpisodeEngine(engine, environment, encode, settings), EpisodeRewards(environment.name)


def open_environment(task: TaskSection, on_done: Callable[[], None] = lambda: None) -> EnvironmentPort | None:
    """In this process where it is ours, in processes of their own where it is the user's; None: there is none."""
    entry = task.environment_entry()
    if entry is None:
        return None
    if task.worker_processes == 0:
        return AskedAtOnce(load_environment(entry))
    settings = RewardProcessSettings(
        environment=entry, processes=task.worker_processes, timeout_s=task.reward_timeout_s
    )
    return ProcessEnvironment(settings, on_done)
