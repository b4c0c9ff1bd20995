"""A configuration that cannot work is refused before anything starts, in words that say the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.config import (
    Config,
    changed_keys,
    known_keys,
    learning_settings,
    load_config,
    parse_config,
    problems,
)
from schemas.errors import ConfigError, UsageError

ROOT = Path(__file__).resolve().parents[2]


def refused(data: dict[str, Any] | None = None, *overrides: str) -> str:
    try:
        config = load_config(None, overrides) if data is None else parse_config(data, "run.toml")
    except ConfigError as error:
        return str(error)
    return pytest.fail(f"accepted: {config}")


def test_the_defaults_are_possible() -> None:
    config = parse_config({}, "nothing")

    assert problems(config) == []
    assert (config.trainer.max_lag, config.trainer.effective_run_ahead) == (2, 1)
    assert config.objective.preset == "grpo"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_configuration_of_the_repository_is_possible(path: Path) -> None:
    assert problems(load_config(path)) == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"trainer": {"max_lag": 1, "run_ahead": 2}}, "trainer.run_ahead = 2 > trainer.max_lag = 1"),
        ({"checkpoints": {"keep": 3}}, "checkpoints.keep = 3 < trainer.max_lag + 2 = 4"),
        ({"checkpoints": {"keep": 0}, "trainer": {"max_lag": 0}}, "checkpoints.keep = 0 < trainer.max_lag + 2 = 2"),
        ({"trainer": {"min_group": 9}, "task": {"group_size": 8}}, "trainer.min_group = 9 > task.group_size = 8"),
        ({"coordinator": {"lease_s": 11}}, "coordinator.lease_s = 11 <= kafka.transaction_timeout_s + 1 = 11"),
        (
            {"coordinator": {"switch_deadline_s": 10}},
            "coordinator.switch_deadline_s = 10 <= kafka.transaction_timeout_s + 1 = 11",
        ),
        ({"kafka": {"transaction_timeout_s": 20}}, "coordinator.lease_s = 15 <= kafka.transaction_timeout_s + 1 = 21"),
        ({"generator": {"heartbeat_s": 6}}, "generator.heartbeat_s = 6 > coordinator.lease_s / 3 = 5"),
        (
            {"trainer": {"group_timeout_s": 6}},
            "kafka.session_timeout_s = 6 >= trainer.group_timeout_s = 6",
        ),
        (
            {"checkpoints": {"garbage_grace_s": 371}},
            "checkpoints.garbage_grace_s = 371 <= trainer.rank_timeout_s + kafka.delivery_timeout_s + kafka.tran",
        ),
        (
            {"coordinator": {"switch_deadline_s": 70}},
            "generator.fetch_timeout_s + generator.drain_timeout_s = 70 >= coordinator.switch_deadline_s = 70: a",
        ),
        (
            {"generator": {"drain_timeout_s": 30.5}},
            "generator.fetch_timeout_s + generator.drain_timeout_s = 90.5 >= coordinator.switch_deadline_s = 90: a",
        ),
        (
            {"generator": {"in_flight": "keep", "fetch_timeout_s": 90}},
            "generator.fetch_timeout_s = 90 >= coordinator.switch_deadline_s = 90: a worker would be expired",
        ),
        (
            {"generator": {"park_timeout_s": 60}},
            "generator.park_timeout_s = 60 >= trainer.group_timeout_s = 60: a group would be given up",
        ),
        (
            {"task": {"reward": "a:b", "reward_timeout_s": 30}},
            "2 * task.reward_timeout_s = 60 >= trainer.group_timeout_s = 60: a group would be given up",
        ),
        ({"run": {"name": "No Spaces"}}, "run.name: run name 'No Spaces': use lower-case letters"),
    ],
)
def test_a_combination_that_cannot_work_names_both_sides_and_the_reason(data: dict[str, Any], words: str) -> None:
    assert refused(data).startswith(f"run.toml: {words}")


@pytest.mark.parametrize(
    "data",
    [
        {"trainer": {"max_lag": 2, "run_ahead": 2}},
        {"trainer": {"max_lag": 0}},
        {"checkpoints": {"keep": 4}},
        {"checkpoints": {"garbage_grace_s": 372}},
        {"trainer": {"min_group": 16}},
        {"coordinator": {"lease_s": 11.1}},
        {"generator": {"heartbeat_s": 5}},
        {"coordinator": {"switch_deadline_s": 70.1}},
        {"generator": {"in_flight": "keep", "fetch_timeout_s": 89, "drain_timeout_s": 100}},
        {"generator": {"park_timeout_s": 59.9}},
        {"task": {"reward": "a:b", "reward_timeout_s": 29.9}},
    ],
)
def test_the_last_value_that_works_is_accepted(data: dict[str, Any]) -> None:
    assert problems(parse_config(data, "x")) == []


@pytest.mark.parametrize(
    ("max_lag", "run_ahead", "expected"), [(0, None, 0), (1, None, 1), (5, None, 1), (5, 3, 3), (5, 0, 0)]
)
def test_generation_runs_one_step_ahead_unless_told_otherwise(
    max_lag: int, run_ahead: int | None, expected: int
) -> None:
    data = {"max_lag": max_lag} | ({} if run_ahead is None else {"run_ahead": run_ahead})

    assert parse_config({"trainer": data}, "x").trainer.effective_run_ahead == expected


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"trainer": {"max_lags": 2}}, "unknown key trainer.max_lags; the nearest is trainer.max_lag"),
        ({"trainer": {"lease_s": 2}}, "unknown key trainer.lease_s; the nearest is"),
        ({"traner": {}}, "unknown section [traner]; the nearest is [trainer]"),
        ({"trainer": 3}, "[trainer] must be a table of settings"),
        ({"trainer": {"max_lag": -1}}, "trainer.max_lag: Input should be greater than or equal to 0"),
        ({"trainer": {"max_lag": "many"}}, "trainer.max_lag: Input should be a valid integer"),
        ({"trainer": {"order": "any"}}, "trainer.order: Input should be 'issue' or 'ready'"),
        ({"task": {"group_size": 1}}, "task.group_size: Input should be greater than or equal to 2"),
        ({"kafka": {"session_timeout_s": 5}}, "kafka.session_timeout_s: Input should be greater than or equal to 6"),
    ],
)
def test_a_wrong_key_or_value_is_named(data: dict[str, Any], words: str) -> None:
    assert words in refused(data)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"environment_arguments": {"highest": 3}}, "need a task.environment"),
        ({"observation_template": "{observation}"}, "need a task.environment"),
        ({"environment": "guess", "reward": "exact"}, "rewards its episodes itself"),
        ({"environment": "guess", "rewards": [{"name": "exact"}]}, "rewards its episodes itself"),
        ({"environment": "guess", "observation_template": "{}"}, "write {observation} once"),
        ({"environment": "guess", "max_turns": 0}, "task.max_turns: Input should be greater"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_with_the_way_out(task: dict[str, Any], words: str) -> None:
    assert words in refused({"task": task})


@pytest.mark.parametrize(
    ("task", "processes"),
    [
        ({"environment": "guess"}, 0),
        ({"environment": "my.py:World"}, 1),
        ({"environment": "guess", "reward_processes": 2}, 2),
    ],
)
def test_only_an_environment_of_ones_own_needs_a_process(task: dict[str, Any], processes: int) -> None:
    assert processes == parse_config({"task": task}, "x").task.worker_processes


def test_settings_of_episodes_are_learning_settings_only_where_there_are_any() -> None:
    plain, episodes = (parse_config({"task": task}, "x") for task in ({}, {"environment": "guess"}))

    assert "max_turns" not in learning_settings(plain)["task"]
    assert 4 == learning_settings(episodes)["task"]["max_turns"]
    assert parse_config({"task": {"max_turns": 9}}, "x").digest() == plain.digest()


def test_overrides_go_over_the_file_and_are_typed_as_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[trainer]\nmax_lag = 1\nlearning_rate = 0.5\n[run]\nname = "a"\n')

    config = load_config(
        path, ["trainer.max_lag=4", "run.name=b", 'checkpoints.keep="all"', "objective.overrides.clip_high=0.28"]
    )

    assert (config.trainer.max_lag, config.trainer.learning_rate) == (4, 0.5)
    assert config.run.name == "b"
    assert config.objective.overrides == {"clip_high": 0.28}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_lag", "write it as section.key=value"),
        ("max_lag=2", "write it as section.key=value"),
        ("trainer.max_lagg=2", "nearest is trainer.max_lag"),
        ("trainer.max_lag.x=2", "trainer.max_lag"),
        ("trainer.max_lag=x", "trainer.max_lag: Input should be a valid integer"),
    ],
)
def test_a_wrong_override_is_named(override: str, words: str) -> None:
    assert words in refused(None, override)


@pytest.mark.parametrize(("text", "words"), [("[trainer", "not valid TOML"), ("\xff", "codec can't decode")])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named_and_configuration_errors_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_config(tmp_path / "none.toml")


def test_every_key_has_a_default_and_no_two_sections_share_a_key_by_mistake() -> None:
    keys = known_keys()

    assert len(keys) == len(set(keys))
    assert {"run.name", "trainer.max_lag", "generator.heartbeat_s", "kafka.in_flight_bytes"} <= set(keys)


def test_the_length_of_a_run_is_learnt_from_where_the_learning_rate_follows_it() -> None:
    """A run that is extended under a schedule is another experiment: each step is replayed under its own length."""
    for schedule, equal in (("constant", True), ("cosine", False)):
        short, long = (
            parse_config({"run": {"versions": n}, "trainer": {"schedule": schedule}}, "test") for n in (10, 20)
        )
        assert (short.digest() == long.digest()) is equal


def test_the_digest_covers_what_is_learnt_and_not_how_it_is_operated() -> None:
    base = Config()
    operated = parse_config({"kafka": {"port": 9999}, "run": {"versions": 9}, "coordinator": {"lease_s": 20}}, "x")
    learnt = parse_config({"trainer": {"max_lag": 1}}, "x")

    assert operated.digest() == base.digest()
    assert learnt.digest() != base.digest()
    assert changed_keys(learning_settings(base), learning_settings(learnt)) == ["trainer.max_lag: 2 -> 1"]
    assert changed_keys(learning_settings(base), learning_settings(operated)) == []


def test_a_setting_that_is_new_or_gone_is_a_change_too() -> None:
    assert changed_keys({"a": {"x": 1}}, {"a": {"y": 2}, "b": {"z": 3}}) == [
        "a.x: 1 -> None",
        "a.y: None -> 2",
        "b.z: None -> 3",
    ]


def test_the_probe_tolerance_follows_the_served_dtype_unless_set() -> None:
    generator = Config().generator

    assert (generator.tolerance("float32"), generator.tolerance("bfloat16")) == (1e-4, 0.5)
    assert parse_config({"generator": {"probe_tolerance": 0.2}}, "x").generator.tolerance("float32") == 0.2
