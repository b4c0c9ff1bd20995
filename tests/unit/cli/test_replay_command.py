"""What the command refuses before it looks at a run, and which configuration a step is trained under."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consumers.offline.replay import OpenRetrainer
from driftlog.__main__ import main
from driftlog.commands import replay as command
from driftlog.wiring_replay import config_of
from infra.config import Config, parse_config
from infra.runner import ExitCode
from schemas.errors import ConfigError
from schemas.topics import TopicName
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_forge import Forge


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


# ---------------------------------------------------------------------- a log that cannot answer


def _newer_decisions(run: SimulatedRun) -> None:
    Forge(run).newer(TopicName.LEDGER, b"decisions/2.0")  # type: ignore[arg-type]


def _policy_without_its_beginning(run: SimulatedRun) -> None:
    run.log.drop_before("sim.policy", 0, 3)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_newer_decisions, "this build knows decisions/1.x; upgrade the reader"),
        (_policy_without_its_beginning, "sim.policy[0]: records 0-2 are no longer in the log (retention)"),
    ],
)
def test_a_log_that_cannot_answer_is_one_message_nothing_is_trained_and_nothing_written(
    damage: Callable[[SimulatedRun], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = SimulatedRun(tmp_path / "run", versions=1)
    damage(run)
    at = SimpleNamespace(log=run.run_log, store=run.world.store)

    @contextmanager
    def opened_run(options: Any) -> Iterator[Any]:
        yield at

    def no_learner(*arguments: Any) -> OpenRetrainer:
        return lambda config_digest, threads: pytest.fail("a learner was asked for")

    monkeypatch.setattr(command, "opened_run", opened_run)
    monkeypatch.setattr("driftlog.wiring_replay.retrainers", no_learner)
    out = tmp_path / "model"

    assert main(["replay", "--version", "1", "--out", str(out)]) == ExitCode.FAILED

    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not out.exists()
