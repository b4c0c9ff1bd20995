"""How a configuration becomes the trainer's settings."""

from __future__ import annotations

import math

import pytest

from consumers.objective.options import AdvantageEstimator, CorrectionKind, RatioDenominator
from driftlog.wiring import flat_settings, mlflow_uri
from driftlog.wiring_trainer import advantages_of, learner_settings, objective_settings
from infra.config import Config, parse_config
from schemas.errors import ConfigError


def _config(**sections: dict[str, object]) -> Config:
    return parse_config(sections, "test")


def test_words_of_the_file_become_the_choices_they_name() -> None:
    objective = objective_settings(
        _config(objective={"preset": "decoupled", "overrides": {"correction": "icepop", "clip_high": 0.28}})
    )

    assert objective.denominator is RatioDenominator.PROXIMAL
    assert objective.correction is CorrectionKind.ICEPOP
    assert objective.clip_high == 0.28


@pytest.mark.parametrize(
    ("overrides", "word"),
    [({"correction": "wishful"}, "correction"), ({"no_such": 1}, "no_such"), ({"clip_low": 2.0}, "clip_low")],
)
def test_an_impossible_override_is_named(overrides: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        objective_settings(_config(objective={"overrides": overrides}))


def test_settings_that_contradict_each_other_are_refused() -> None:
    config = _config(objective={"overrides": {"correction": "token_tis"}})

    with pytest.raises(ConfigError, match="objective"):
        learner_settings(config, "unused")


def test_dr_grpo_takes_its_constant_length_from_the_longest_completion() -> None:
    objective = objective_settings(_config(objective={"preset": "dr_grpo"}, task={"max_tokens": 12}))

    assert objective.constant_length == 12
    assert objective.advantage is AdvantageEstimator.MEAN_ONLY


def test_a_schedule_ends_with_the_run() -> None:
    settings = learner_settings(_config(trainer={"schedule": "linear"}, run={"versions": 40}), "unused")

    assert settings.total_steps == 40


def test_advantages_keep_the_shape_of_their_groups() -> None:
    compute = advantages_of(objective_settings(_config()))

    found = compute([[0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0]])

    assert [len(group) for group in found] == [2, 3, 4]
    assert found[1] == [0.0, 0.0, 0.0]
    assert found[0][1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert found[0][0] == -found[0][1]


def test_mlflow_lies_beside_the_runs_unless_the_environment_names_another_place() -> None:
    config = _config(run={"directory": "/data/runs"})

    assert mlflow_uri(config, {}) == "sqlite:////data/runs/mlflow.db"
    assert mlflow_uri(config, {"MLFLOW_TRACKING_URI": "http://there"}) == "http://there"


def test_parameters_for_the_tracker_hold_no_secrets() -> None:
    config = _config(kafka={"security": {"sasl_plain_username": "hush"}})

    settings = flat_settings(config)

    assert settings["trainer.max_lag"] == "2"
    assert "hush" not in str(settings)
