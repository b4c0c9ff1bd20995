"""`driftlog prepare` against a real broker: what it leaves, that repeating it is harmless, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftlog.__main__ import main
from driftlog.run_directory import RunDirectory
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings
from infra.local_broker import BrokerHandle
from schemas.topics import TOPICS

pytestmark = [pytest.mark.integration, pytest.mark.kafka]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Enough of a model directory for those that do not load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def prepare(tmp_path: Path, model: Path, broker: BrokerHandle, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setenv("DRIFTLOG_KAFKA", broker.bootstrap_servers)
    settings = (f'run.directory="{tmp_path / "runs"}"', f'model.init="{model}"', *more)
    options = [word for setting in settings for word in ("--set", setting)]
    return main(["prepare", "--run", "prepared", "--json", *options])


def test_a_prepared_run_has_topics_and_a_configuration_and_may_be_prepared_again(
    tmp_path: Path,
    model: Path,
    kafka_broker: BrokerHandle,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prepare(tmp_path, model, kafka_broker, monkeypatch) == 0
    said = json.loads(capsys.readouterr().out)
    assert prepare(tmp_path, model, kafka_broker, monkeypatch, "run.versions=400") == 0

    admin = KafkaLogAdmin(KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers))
    try:
        topics = {name for name in admin.existing_topics() if name.startswith("prepared.")}
    finally:
        admin.close()
    stored = RunDirectory(tmp_path / "runs", "prepared").stored_config()
    assert len(topics) == len(TOPICS)
    assert said["config"] == str(tmp_path / "runs" / "prepared" / "config.json")
    assert stored is not None
    assert stored.run.versions == 400


def test_other_learning_settings_are_refused_by_key(
    tmp_path: Path,
    model: Path,
    kafka_broker: BrokerHandle,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prepare(tmp_path, model, kafka_broker, monkeypatch) == 0

    assert prepare(tmp_path, model, kafka_broker, monkeypatch, "trainer.learning_rate=0.5") == 2
    assert "trainer.learning_rate" in capsys.readouterr().err


def test_without_a_broker_it_gives_up_after_its_limit(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = BrokerHandle(port=1, pid=0, data_dir="")
    monkeypatch.setenv("DRIFTLOG_KAFKA", nobody.bootstrap_servers)
    options = ["--set", f'run.directory="{tmp_path / "runs"}"', "--set", f'model.init="{model}"', "--wait-s", "0"]

    assert main(["prepare", "--run", "prepared", *options]) == 1

    assert "no Kafka broker reachable" in capsys.readouterr().err
    assert RunDirectory(tmp_path / "runs", "prepared").stored_config() is None
