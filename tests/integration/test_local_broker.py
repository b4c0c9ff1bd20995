"""The embedded broker: start, status, stop, and what happens when something is in the way."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from infra import local_broker
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings
from infra.kafka_reader import KafkaEventReader
from infra.kafka_writer import KafkaEventWriter
from infra.local_broker import BrokerHandle
from infra.ports import Message
from infra.wakeup import Wakeup
from schemas.errors import EnvironmentMissing
from schemas.topics import TOPICS, TopicName

REPOSITORY = Path(__file__).parents[2]


def settings(broker: BrokerHandle) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=broker.bootstrap_servers)


@pytest.mark.kafka
def test_data_and_topics_survive_a_stop_and_another_process_finds_the_broker(kafka_jars: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "broker"
    broker = local_broker.start(data_dir, jars=kafka_jars)
    try:
        assert local_broker.status(data_dir) == broker
        assert local_broker.start(data_dir, jars=kafka_jars) == broker
        admin = KafkaLogAdmin(settings(broker))
        admin.create_topics("demo")
        admin.close()
        writer = KafkaEventWriter(settings(broker))
        writer.send(Message(topic="demo.policy", key=b"k", value=b"kept")).result(10)
        assert writer.close(10) == 0
        asked = (
            f"from pathlib import Path; from infra import local_broker as b; print(b.status(Path({str(data_dir)!r})))"
        )
        said = subprocess.run(
            [sys.executable, "-c", asked], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
        )
        assert said.stdout.strip() == str(broker)
        assert local_broker.stop(data_dir)
        assert local_broker.status(data_dir) is None
        assert not local_broker.stop(data_dir)
        assert "Kafka Server started" in (data_dir / "server.log").read_text(encoding="utf-8")

        broker = local_broker.start(data_dir, jars=kafka_jars, port=broker.port)
        bell = Wakeup()
        topics = {f"demo.{TopicName.POLICY}": TOPICS[TopicName.POLICY].partitions}
        reader = KafkaEventReader(settings(broker), topics, "beginning", bell)
        assert bell.wait(20)
        assert [record.value for record in reader.poll(10)] == [b"kept"]
        reader.close()
    finally:
        local_broker.stop(data_dir)


@pytest.mark.kafka
def test_a_broker_that_is_to_die_with_its_parent_survives_no_kill_of_it(kafka_jars: Path, tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from infra import local_broker
        handle = local_broker.start(Path({str(tmp_path)!r}), jars=Path({str(kafka_jars)!r}), die_with_parent=True)
        print(handle.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    parent = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=90
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid = int(parent.stdout)
    assert local_broker.wait_for_end(pid, timeout_s=30)
    assert local_broker.status(tmp_path) is None


@pytest.mark.kafka
def test_a_broker_that_dies_at_its_start_says_why(kafka_jars: Path, tmp_path: Path) -> None:
    meta = tmp_path / "log" / "meta.properties"
    meta.parent.mkdir()
    meta.write_text("version=1\nnode.id=7\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\n", encoding="ascii")
    with pytest.raises(EnvironmentMissing, match=r"(?s)died at its start.*Stored node id 7"):
        local_broker.start(tmp_path, jars=kafka_jars)
    assert local_broker.status(tmp_path) is None


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_broker.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(local_broker, "_PORT_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EnvironmentMissing, match=f"port {port} is taken"):
            local_broker.start(tmp_path, jars=tmp_path, port=port)


def test_a_killed_broker_that_still_listens_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(local_broker.time, "sleep", lambda seconds: server.close())
        assert local_broker._claim(port) == port


def test_without_java_the_error_says_what_to_install_and_what_to_do_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_broker.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentMissing, match=r"`java`.*install a JDK.*--set kafka.bootstrap_servers=HOST:PORT"):
        local_broker.start(tmp_path, jars=tmp_path)


def test_without_maven_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_broker.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentMissing, match=r"`mvn`.*install maven.*--set kafka.bootstrap_servers=HOST:PORT"):
        local_broker.ensure_jars(tmp_path / "jars")


def test_a_failed_fetch_shows_what_maven_said_and_leaves_no_half_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maven = tmp_path / "mvn"
    maven.write_text("#!/bin/sh\necho 'no route to the repository'\nexit 1\n", encoding="ascii")
    maven.chmod(0o755)
    monkeypatch.setattr(local_broker.shutil, "which", lambda name: str(maven))
    with pytest.raises(EnvironmentMissing, match="no route to the repository"):
        local_broker.ensure_jars(tmp_path / "jars")
    assert not (tmp_path / "jars").exists()


def test_jars_are_fetched_once_and_a_complete_cache_needs_no_maven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maven = tmp_path / "mvn"
    script = 'for a; do case $a in -DoutputDirectory=*) d=${a#*=};; esac; done; mkdir -p "$d"; touch "$d/kafka_2.jar"'
    maven.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    maven.chmod(0o755)
    monkeypatch.setattr(local_broker.shutil, "which", lambda name: str(maven))
    cache = tmp_path / "jars"
    cache.mkdir()  # a half-filled directory is replaced
    (cache / "half.jar").touch()
    assert local_broker.ensure_jars(cache) == cache
    assert sorted(path.name for path in cache.iterdir()) == [".complete", "kafka_2.jar"]
    monkeypatch.setattr(local_broker.shutil, "which", lambda name: None)
    assert local_broker.ensure_jars(cache) == cache


def test_a_pid_that_now_belongs_to_another_process_is_never_stopped(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / "broker.json").write_text(
            f'{{"port": 1, "pid": {bystander.pid}, "data_dir": "{tmp_path}"}}', encoding="ascii"
        )
        assert local_broker.status(tmp_path) is None
        assert not local_broker.stop(tmp_path)
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n", timeout=10)


def test_without_a_state_file_there_is_no_broker(tmp_path: Path) -> None:
    assert local_broker.status(tmp_path) is None
    assert not local_broker.stop(tmp_path)
