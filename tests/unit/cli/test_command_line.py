"""The command line: help with an example for every verb, one message for a mistake, nothing heavy loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from driftlog.__main__ import HIDDEN, VERBS, main
from driftlog.commands.doctor import examine, java_version

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "mlflow", "kafka", "rich", "pyarrow")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])

    assert ended.value.code == 0
    assert f"driftlog {verb}" in capsys.readouterr().out.partition("example:")[2]


def test_the_list_of_verbs_shows_all_but_the_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f"  {verb}" not in shown] == sorted(HIDDEN)


def test_without_a_verb_it_shows_help_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: driftlog" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--config", "no/such.toml"], ("no/such.toml", "no such file")),
        (["up", "--set", "trainer.max_lagg=1"], ("trainer.max_lagg", "trainer.max_lag")),
        (["train", "--set", "oops"], ("oops", "section.key=value")),
        (["init-policy", "huge", "--out", "x"], ("huge", "countdown-tiny")),
        (["broker", "status", "--run", "No Name"], ("No Name",)),
        (["samples", "--limit", "0"], ("--limit 0",)),
        (["export"], ("--out DIR", "--cache")),
        (["export", "--out", "x", "--tables", "rollouts"], ("rollouts", "trajectories")),
        (["down", "--run", "ghost", "--directory", "no/where"], ("ghost",)),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    for word in words:
        assert word in said.err


def test_nothing_heavy_is_loaded_to_read_the_command_line_or_to_wire_what_needs_no_torch() -> None:
    script = (
        "import json, sys\n"
        "from driftlog.__main__ import _parser\n"
        "import driftlog.launch, driftlog.wiring, driftlog.run_reading\n"
        "_parser()\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) <= {"pyarrow"}


def test_coordinator_and_offline_tools_never_load_torch_or_mlflow() -> None:
    script = (
        "import sys\n"
        "import consumers.coordinator, consumers.offline.audit, consumers.offline.status, consumers.offline.trace\n"
        "import consumers.offline.samples, consumers.offline.summary, infra.kafka_reader, infra.kafka_transactions\n"
        "import infra.checkpoint_store\n"
        "assert not {'torch', 'transformers', 'mlflow'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.12" 2024-07-16', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("command not found", None),
    ],
)
def test_java_version_is_read_from_what_java_says(text: str, version: int | None) -> None:
    assert java_version(text) == version


def test_doctor_names_java_when_it_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    java = next(finding for finding in examine(tmp_path) if finding.name == "java")

    assert (java.ok, java.needed) == (False, True)
    assert "kafka.bootstrap_servers" in java.advice
