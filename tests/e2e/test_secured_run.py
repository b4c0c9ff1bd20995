"""The demo with TLS, a password and a user of its own for each service; nothing that it writes holds a password."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from driftlog.__main__ import main
from driftlog.run_directory import RunDirectory
from infra.access_rights import Role
from infra.kafka_reader import KafkaEventReader
from infra.ports import Record
from schemas.ids import RunId
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory_codec import TrajectoryLimits, decode_group
from tests.e2e.driving import Site, command, driftlog, environment, make_site, wait_until
from tests.fakes.secured_broker import USERS, SecuredBroker, password_of, secured_broker

pytestmark = pytest.mark.long

RUN = "tiny"
SETTINGS = ("run.versions=2", "generator.keep_text=false")
SERVICES = {
    Role.TRAINER: ("train",),
    Role.COORDINATOR: ("coordinate",),
    Role.GENERATOR: ("generate", "--worker", "g0"),
}
LIMIT_S = 150.0


def test_the_demo_runs_with_a_user_for_each_service_and_writes_no_password_anywhere(
    tmp_path: Path, kafka_jars: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path / "site")
    with secured_broker(tmp_path / "secured", kafka_jars) as broker:
        broker.grant(RUN)
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        prepared = driftlog("prepare", "--config", str(site.config), *sets, env=broker.environment(Role.OPERATOR))
        assert prepared.returncode == 0, prepared.stderr

        with ExitStack() as stack:
            going = {role: stack.enter_context(service(site, broker, role, words)) for role, words in SERVICES.items()}
            wait_until(lambda: all(one.poll() is not None for one in going.values()), "the run to end", LIMIT_S)
        said = words_of(site)
        assert {role: one.returncode for role, one in going.items()} == dict.fromkeys(SERVICES, 0), said

        for variable, value in broker.environment(Role.READER, by_file=True).items():
            monkeypatch.setenv(variable, value)
        assert main(["audit", "--directory", str(site.runs)]) == 0
        records = everything(broker)

    kept = [text for record in records if record.topic.endswith("trajectories") for text in texts(record)]
    assert len(kept) > 0
    assert set(kept) == {None}

    assert "group_started" in said  # a line of DEBUG: what follows looks at everything that is ever said
    printed = said + prepared.stderr + prepared.stdout + "".join(capsys.readouterr())
    for user in USERS:
        secret = password_of(user).encode()
        assert [str(path) for path in files_of(site.folder) if secret in path.read_bytes()] == []
        assert [str(r.topic) for r in records if secret in b"".join([r.key or b"", r.value or b"", headers(r)])] == []
        assert secret.decode() not in printed
        log = tmp_path / "secured" / "broker" / "server.log"
        assert secret not in log.read_bytes()


@contextmanager
def service(site: Site, broker: SecuredBroker, role: Role, words: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """One service under its own user; its password is in a file, as a container's would be."""
    named: Mapping[str, str] = broker.environment(role, by_file=True)
    with (site.folder / f"{role}.txt").open("w") as stream:
        process = subprocess.Popen(
            command(*words, "--config", str(site.run(RUN).path), "--log-level", "DEBUG"),
            env=environment({**named, "OMP_NUM_THREADS": "1"}), stdout=stream, stderr=stream, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)


def words_of(site: Site) -> str:
    """What the services said."""
    return "".join((site.folder / f"{role}.txt").read_text() for role in SERVICES)


def files_of(folder: Path) -> list[Path]:
    """All that a run wrote: configuration, logs, checkpoints."""
    run = RunDirectory(folder / "runs", RUN)
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert run.path / "config.json" in found
    return found


def everything(broker: SecuredBroker) -> list[Record]:
    """Every committed record of the run."""
    topics = {topic(RunId(RUN), name): spec.partitions for name, spec in TOPICS.items()}
    found: list[Record] = []
    with closing(KafkaEventReader(broker.settings(Role.READER), topics, "beginning")) as reader:
        ends = reader.end_offsets()

        def read() -> bool:
            found.extend(reader.poll(1_000))
            positions = reader.positions()
            return all(positions[place] >= end for place, end in ends.items())

        wait_until(read, "the whole log", 30.0)
        found.extend(reader.poll(10_000))
    silent = {TopicName.DEADLETTERS, TopicName.EVALUATIONS}
    assert {record.topic for record in found} == {topic(RunId(RUN), name) for name in TopicName if name not in silent}
    return found


def headers(record: Record) -> bytes:
    return b"".join(name.encode() + value for name, value in record.headers)


def texts(record: Record) -> list[str | None]:
    """The answers of one group as text."""
    decoded = decode_group(record.value, record.headers, TrajectoryLimits(vocabulary_size=1_000_000))
    return [row.trajectory.text for row in decoded if row.trajectory is not None]
