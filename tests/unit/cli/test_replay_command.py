"""What the command refuses before it looks at a run, and which configuration a step is trained under."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlog.__main__ import main
from driftlog.wiring_replay import config_of
from infra.config import Config, parse_config
from infra.runner import ExitCode
from schemas.errors import ConfigError


def test_neither_verify_nor_out_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--version", "1"]) == ExitCode.USAGE
    assert "--verify compares, --out DIR writes the model" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("mine")

    assert main(["replay", "--version", "1", "--out", str(tmp_path)]) == ExitCode.USAGE
    assert "is not an empty folder" in capsys.readouterr().err


def test_each_step_is_trained_under_the_configuration_of_its_digest() -> None:
    first, second = Config(), parse_config({"trainer": {"learning_rate": 0.5}}, "test")

    both = {config.digest(): config for config in (first, second)}
    assert config_of(both, first.digest()) == (first, ())
    assert config_of(both, second.digest()) == (second, ())


def test_a_digest_that_this_build_spells_otherwise_is_told_where_one_configuration_is_stored() -> None:
    config, (difference,) = config_of({Config().digest(): Config()}, "0" * 64)

    assert config == Config()
    assert (difference.part, difference.subject) == ("environment", "configuration")


def test_an_unknown_digest_among_several_configurations_is_refused() -> None:
    stored = (Config(), parse_config({"trainer": {"learning_rate": 0.5}}, "test"))
    others = {config.digest(): config for config in stored}

    with pytest.raises(ConfigError, match="none of the 2 stored with the run"):
        config_of(others, "0" * 64)
