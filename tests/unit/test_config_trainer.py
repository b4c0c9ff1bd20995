"""Learning settings that contradict each other are refused before anything starts; the others reach the learner."""

from __future__ import annotations

from typing import Any

import pytest

from consumers.objective.options import KlPlacement, Objective
from consumers.offline.audit.index import rules_from_configs
from driftlog.learning_settings import admission_rules, check_learning, generators_differ, learner_settings
from infra.config import Config, parse_config
from schemas.errors import ConfigError

IN_REWARD = {"overrides": {"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}}


def config_of(**sections: dict[str, Any]) -> Config:
    return parse_config(sections, "run.toml")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainer": {"stale_action": "down_weight"}}, 'stale_action = "down_weight" without trainer.hard_max_lag'),
        ({"trainer": {"hard_max_lag": 4}}, 'trainer.hard_max_lag = 4 with trainer.stale_action = "drop"'),
        (
            {"trainer": {"stale_action": "down_weight", "hard_max_lag": 1}},
            "trainer.hard_max_lag = 1 < trainer.max_lag = 2",
        ),
        ({"trainer": {"stale_action": "wait", "max_lag": 0}}, 'stale_action = "wait" with trainer.max_lag = 0'),
        ({"trainer": {"betas": [0.9, 1.0]}}, "trainer.betas = [0.9, 1.0]: each must be in [0, 1)"),
        ({"replay": {"steps": 2}}, "replay.steps = 2 with replay.groups_per_step = 0: replay needs both"),
        (
            {"replay": {"steps": 1, "groups_per_step": 2}, "trainer": {"max_lag": 1}},
            "replay.steps = 1 with trainer.run_ahead = 1 >= the largest lag that is trained, 1",
        ),
        (
            {"replay": {"steps": 1, "groups_per_step": 2}, "trainer": {"max_lag": 0}},
            "replay.steps = 1 with trainer.run_ahead = 0 >= the largest lag that is trained, 0",
        ),
        (
            {"reference": {"refresh_every": 5}},
            "reference.refresh_every = 5 with objective.overrides.kl_coefficient = 0",
        ),
        (
            {"checkpoints": {"keep": 4}, "trainer": {"stale_action": "down_weight", "hard_max_lag": 4}},
            "checkpoints.keep = 4 < trainer.hard_max_lag + 2 = 6",
        ),
    ],
)
def test_settings_that_cannot_work_together_are_refused_with_the_way_out(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(**sections)

    assert words in str(refused.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"stale_action": "down_weight", "hard_max_lag": 4}},
        {"trainer": {"stale_action": "wait", "order": "ready"}},
        {"replay": {"steps": 2, "groups_per_step": 2}},
        {"replay": {"steps": 1, "groups_per_step": 1}, "trainer": {"max_lag": 1, "run_ahead": 0}},
        {"reference": {"refresh_every": 5}, "objective": {"overrides": {"kl_coefficient": 0.1}}},
    ],
)
def test_the_next_possible_setting_is_accepted(sections: dict[str, Any]) -> None:
    config_of(**sections)


def test_every_learner_option_is_reached_from_the_file() -> None:
    settings = learner_settings(
        config_of(
            trainer={
                "epochs": 2, "minibatches": 3, "betas": [0.8, 0.95], "adam_epsilon": 1e-6, "max_bad_steps": 7,
                "mask_truncated": True, "gradient_checkpointing": True, "parallel": "fsdp", "schedule": "cosine",
                "stale_action": "down_weight", "hard_max_lag": 5,
            },
            run={"versions": 10}, model={"dtype": "bfloat16"}, objective=IN_REWARD,
            reference={"refresh_every": 4},
        ),
        "initial",
    )  # fmt: skip

    assert (settings.epochs, settings.minibatches, settings.total_steps) == (2, 3, 60)
    assert (settings.betas, settings.adam_epsilon, settings.max_bad_steps) == ((0.8, 0.95), 1e-6, 7)
    assert settings.mask_truncated and settings.gradient_checkpointing
    assert (settings.parallel, settings.dtype, settings.max_lag) == ("fsdp", "bfloat16", 5)
    assert settings.objective.kl_placement is KlPlacement.REWARD and settings.kl_in_reward
    assert str(settings.reference_directory) == "initial"
    assert (settings.reference_version, settings.reference_refresh_every) == (0, 4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"correction": "token_tis"}, "cannot go with correction token_tis"),
        ({"objective": "reinforce", "dual_clip": None}, "stored behaviour log-probabilities unused"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_placement loss cannot go with kl_estimator k1"),
    ],
)
def test_what_the_maths_refuses_is_refused_before_anything_starts(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_learning(config_of(objective={"overrides": overrides}))


def test_a_reference_that_is_no_model_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="reference.directory = 'nowhere' is not the directory"):
        check_learning(config_of(reference={"directory": "nowhere"}))


def test_another_precision_or_engine_needs_an_objective_that_allows_for_it() -> None:
    fingerprint = {"tokenizer_digest": "t", "dtype": "float32", "engine": "hf", "engine_version": "1"}
    fresh_only = {"overrides": {"objective": "reinforce", "dual_clip": None}}
    on_policy = {"max_lag": 0}

    assert not generators_differ(config_of())
    assert generators_differ(config_of(model={"dtype": "bfloat16"}))
    assert admission_rules(config_of(), fingerprint).takes_other_numbers
    config = config_of(objective=fresh_only, trainer=on_policy)
    assert learner_settings(config, "x").objective.objective is Objective.REINFORCE
    assert not admission_rules(config, fingerprint).takes_other_numbers
    with pytest.raises(ConfigError, match="differing fingerprints"):
        learner_settings(config_of(objective=fresh_only, trainer=on_policy, model={"dtype": "bfloat16"}), "x")


def test_the_audit_knows_the_limits_of_down_weighting_replay_and_penalties() -> None:
    config = config_of(
        trainer={"stale_action": "down_weight", "hard_max_lag": 4, "stale_decay": 0.5},
        replay={"steps": 2, "groups_per_step": 1, "max_use": 3},
        objective=IN_REWARD,
    )
    plain = config_of()

    rules = rules_from_configs([config, plain], advantages=lambda rewards: rewards)

    weighed, other = rules[config.digest()], rules[plain.digest()]
    assert (weighed.max_lag, weighed.max_use, weighed.advantages) == (4, 3, None)
    assert [weighed.weight(lag) for lag in (0, 2, 3, 4)] == [1.0, 1.0, 0.5, 0.25]
    assert (other.max_lag, other.max_use, other.weight(2)) == (2, 1, 1.0)
    assert other.advantages is not None


def test_alarm_limits_may_change_when_a_run_is_resumed() -> None:
    assert config_of().digest() == config_of(alarms={"ess_low": 0.1}).digest()
    assert config_of().digest() != config_of(replay={"steps": 1, "groups_per_step": 1}).digest()
