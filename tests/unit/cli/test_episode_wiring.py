"""From the configuration to who plays: an engine and a reward, or an engine with an environment."""

from __future__ import annotations

import pytest

from driftlog.episode_wiring import open_players
from driftlog.task_wiring import with_checked_task
from infra.config import parse_config
from infra.config_task import TaskSection
from infra.environment import EpisodeRewards
from infra.model import load_policy
from infra.ports import EngineRequest
from infra.rewards import ScoredAtOnce
from producers.engines.hf import HfEngine, HfEngineSettings
from producers.episodes import EpisodeEngine
from schemas.errors import ConfigError
from schemas.trajectory import Sampling
from tests.fakes.policy_rows import request_of, tiny_directory
from tests.fakes.virtual_clock import VirtualClock


def engine() -> HfEngine:
    made = HfEngine(HfEngineSettings(threads=1), VirtualClock())
    made.load(tiny_directory(), 3)
    made.set_proof(30)
    return made


def test_without_an_environment_the_engine_plays_alone() -> None:
    alone = engine()

    playing, scorer = open_players(alone, TaskSection(), tiny_directory(), in_step=True)

    assert playing is alone
    assert isinstance(scorer, ScoredAtOnce)


def test_an_environment_plays_with_the_tokenizer_of_the_model_and_rewards_itself() -> None:
    task = TaskSection(
        environment="guess", environment_arguments={"highest": 3}, max_turns=2, observation_template="({observation})"
    )
    playing, scorer = open_players(engine(), task, tiny_directory(), in_step=True)
    policy = load_policy(tiny_directory())
    sampling = Sampling(max_tokens=30, stop_token_ids=(policy.eos_token_id,))
    request = request_of(policy, "1,2=3:", size=96, sampling=sampling)

    playing.submit(EngineRequest(request=request, rng_seed=3))
    done = []
    while playing.running_groups():
        done += playing.poll()
    rewards = scorer.submit(request, done).result(0.0)
    playing.close()

    assert isinstance(playing, EpisodeEngine) and isinstance(scorer, EpisodeRewards)
    assert 'guess{"highest": 3}@1' == scorer.name
    assert set(range(96)) == {completion.index_in_group for completion in done}
    assert all(reward.value is not None and reward.parts["turns"] >= 1 for reward in rewards)
    observed = {
        policy.decode_all([completion.token_ids[~completion.loss_mask].tolist()])[0]
        for completion in done
        if completion.loss_mask is not None
    }
    assert {""} < observed <= {"", "(+)", "(-)"}


def test_an_environment_that_is_not_there_ends_the_start_with_its_name() -> None:
    config = parse_config({"task": {"environment": "chess"}}, "x")

    with pytest.raises(ConfigError, match="environment 'chess': use one of calculator, guess"):
        with_checked_task(config)
