"""A run is tied to its prompts; the trainer asks from them; what judges is what the configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driftlog.run_directory import RunDirectory
from driftlog.task_wiring import open_scorer, training_prompts, with_checked_task, with_prompts_digest
from infra.config import Config, parse_config
from infra.model import Policy, load_policy
from infra.prompt_sources import countdown_source
from infra.rewards import ScoredAtOnce
from schemas.errors import ConfigError
from tests.fakes.policy_rows import tiny_directory


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(tiny_directory())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"1,{n}={n + 1}:", "task": "ab"[n % 2]}) + "\n" for n in range(1, 6)))
    return path


def config_of(prompts: Path, **task: Any) -> Config:
    own = {"kind": "prompts", "prompts": str(prompts), "reward": "length"}
    return parse_config({"task": own | task}, "test")


def other_config(prompts: Path, other: dict[str, Any]) -> Config:
    return parse_config({"task": other}, "test") if "kind" in other else config_of(prompts, **other)


def test_the_digest_of_the_prompts_is_part_of_what_is_stored(prompts: Path) -> None:
    config = config_of(prompts)

    pinned = with_prompts_digest(config)

    assert 64 == len(pinned.task.prompts_sha256)
    assert config.digest() != pinned.digest()
    assert pinned == with_prompts_digest(pinned)
    assert parse_config({}, "test") == with_prompts_digest(parse_config({}, "test"))


def test_a_run_goes_on_only_with_the_prompts_it_began_with(prompts: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs", "demo")
    begun = with_prompts_digest(config_of(prompts))
    run.adopt(begun, accept_changes=False)
    prompts.rename(tmp_path / "moved.jsonl")
    moved = with_prompts_digest(config_of(tmp_path / "moved.jsonl"))
    assert [] == run.adopt(moved, accept_changes=False)  # another place is no change

    (tmp_path / "moved.jsonl").write_text('{"prompt": "1"}\n')

    with pytest.raises(ConfigError, match=r"moved.jsonl is not what run 'demo' began with \(sha256 .*--run NAME"):
        run.adopt(with_prompts_digest(config_of(tmp_path / "moved.jsonl")), accept_changes=True)
    with pytest.raises(ConfigError, match="is not what run 'demo' began with"):
        with_prompts_digest(moved)  # a stored configuration, taken up again


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"mixture": {"a": 2}}, r"task.mixture = \{\}, now it is \{'a': 2\}"),
        ({"kind": "countdown"}, "was begun with task.kind = 'prompts'"),
    ],
)
def test_prompts_may_not_change_places_under_a_run(prompts: Path, tmp_path: Path, other: Any, words: str) -> None:
    run = RunDirectory(tmp_path / "runs", "demo")
    run.adopt(with_prompts_digest(config_of(prompts)), accept_changes=False)

    with pytest.raises(ConfigError, match=words):
        run.adopt(with_prompts_digest(other_config(prompts, other)), accept_changes=True)


def test_a_broken_file_is_found_before_anything_is_started(prompts: Path) -> None:
    prompts.write_text(prompts.read_text() + "{")

    with pytest.raises(ConfigError, match="prompts.jsonl:6: broken line"):
        with_checked_task(config_of(prompts))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("nothing", "use one of countdown"),
        ("nowhere.py:score", "cannot be imported: FileNotFoundError: no file nowhere.py"),
    ],
)
def test_a_reward_that_cannot_be_is_found_before_anything_is_started(prompts: Path, reward: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_checked_task(config_of(prompts, reward=reward))


def test_the_trainer_asks_from_the_file_in_the_order_of_the_seed(prompts: Path, policy: Policy) -> None:
    source = training_prompts(config_of(prompts, mixture={"b": 2}), policy)

    assert 8 == len(source)
    again = training_prompts(config_of(prompts, mixture={"b": 2}), policy)
    assert [source.at(c)[0].text for c in range(16)] == [again.at(c)[0].text for c in range(16)]


def test_the_demo_asks_what_it_always_asked(policy: Policy) -> None:
    source, expected = training_prompts(parse_config({}, "test"), policy), countdown_source(policy.encode, 0)

    assert [expected.at(c)[0].prompt_id for c in range(200)] == [source.at(c)[0].prompt_id for c in range(200)]


def test_shipped_rewards_stay_in_the_process_and_ones_own_do_not(prompts: Path) -> None:
    shipped = open_scorer(parse_config({}, "test").task)
    assert isinstance(shipped, ScoredAtOnce)
    assert "countdown@1" == shipped.name
    assert 0 == config_of(prompts).task.worker_processes
    assert 1 == config_of(prompts, reward="a.b:c").task.worker_processes
    assert 3 == config_of(prompts, reward_processes=3).task.worker_processes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": {"kind": "prompts"}}, "needs task.prompts"),
        ({"task": {"prompts": "a.jsonl"}}, 'write kind = "prompts"'),
        ({"task": {"mixture": {"a": 1}}}, "task.mixture goes with"),
        ({"task": {"kind": "prompts", "prompts": "a", "mixture": {"a": -1}}}, "0 or more"),
        ({"task": {"reward": "length", "rewards": [{"name": "exact"}]}}, "are both set"),
        ({"task": {"rewards": [{"name": "exact"}, {"name": "exact"}]}}, "names one reward twice"),
        ({"task": {"rewards": [{"nmae": "exact"}]}}, "task.rewards.0"),
        ({"task": {"reward": "a:b", "reward_timeout_s": 30}}, "would be given up while its reward may still answer"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(settings, "test")
