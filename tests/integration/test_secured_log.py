"""The real client against a broker with TLS, passwords and access rules: what is refused, in which words, how soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from driftlog.__main__ import main
from driftlog.broker_access import running_bootstrap
from driftlog.joining import join
from driftlog.run_directory import RunDirectory
from infra.access_rights import RIGHTS, Role
from infra.clock import SystemClock
from infra.config import load_config
from infra.kafka_admin import KafkaLogAdmin, TopicLimits
from infra.kafka_clients import KafkaSettings
from infra.kafka_group_reader import KafkaGroupReader
from infra.kafka_reader import KafkaEventReader
from infra.kafka_transactions import KafkaTransactionalWriter
from infra.kafka_writer import KafkaEventWriter
from infra.local_broker import BrokerHandle
from infra.ports import Message
from schemas.errors import EnvironmentMissing, LogUnavailable
from schemas.ids import RunId
from schemas.topics import MAX_MESSAGE_BYTES, TOPICS, TopicName, topic
from tests.fakes.secured_broker import ADMIN, NOBODY, SecuredBroker, password_of, secured_broker

pytestmark = [pytest.mark.integration, pytest.mark.kafka]
RUN = RunId("secured")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0
"""generous: a refusal takes a third of a second where nobody else works"""


@pytest.fixture(scope="module")
def secured(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """With the topics of one run, and each role's user in its rights."""
    with secured_broker(tmp_path_factory.mktemp("secured"), kafka_jars) as broker:
        with closing(KafkaLogAdmin(broker.settings())) as admin:
            admin.create_topics(RUN)
        broker.grant(RUN)
        yield broker


def name(of: TopicName) -> str:
    return topic(RUN, of)


def message(of: TopicName) -> Message:
    return Message(topic=name(of), key=b"k", value=b"v", headers=(), partition=0)


def polled_until_it_fails(poll: Callable[[int], object]) -> None:
    """A refusal reaches the service at a poll."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        poll(10)
        time.sleep(0.01)


# ---------------------------------------------------------------- who may not even come in


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sasl_plain_password": "wrong"}, "as user 'trainer': user name or password refused: check sasl_plain"),
        ({"sasl_plain_username": "stranger"}, "as user 'stranger': user name or password refused"),
        ({"sasl_mechanism": "SCRAM-SHA-256"}, "does not offer this sasl_mechanism"),
        ({"security_protocol": "PLAINTEXT"}, "the broker speaks TLS, this client does not"),
        ({"ssl_cafile": "strange"}, "signed by nobody known here: set ssl_cafile"),
        ({"port": "expired"}, "certificate has expired: renew it"),
        ({"port": "other host"}, "certificate is for another host"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_client_that_cannot_come_in_is_told_why_once_and_at_once(
    secured: SecuredBroker,
    change: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ports = {"expired": secured.expired_port, "other host": secured.other_host_port}
    environment = secured.environment("trainer", port=ports.get(change.get("port", "")))
    for key, value in change.items():
        if key != "port":
            shown = str(secured.strange_authority) if value == "strange" else value
            environment[f"DRIFTLOG_KAFKA_{key.upper()}"] = shown
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)

    code = main(["topics", "--run", RUN])

    said = capsys.readouterr().err
    assert code == 2
    assert said.count("\n") == 1
    assert environment["DRIFTLOG_KAFKA"] in said
    assert words in said
    assert password_of("trainer") not in said


def test_a_client_that_does_not_log_in_is_told_that_the_broker_hangs_up(secured: SecuredBroker) -> None:
    security = {"security_protocol": "SSL", "ssl_cafile": str(secured.authority)}
    settings = KafkaSettings(bootstrap_servers=f"127.0.0.1:{secured.port}", security=security, bootstrap_timeout_s=1.1)
    with pytest.raises(LogUnavailable, match="hangs up on every try: it may want another kafka.security"):
        KafkaLogAdmin(settings)


# ---------------------------------------------------------------- who may not do this


@pytest.mark.parametrize("of", [TopicName.LEDGER, TopicName.PROMPTS, TopicName.SCORES, TopicName.EVALUATIONS])
def test_a_generator_cannot_write_what_others_decide(secured: SecuredBroker, of: TopicName) -> None:
    writer = KafkaEventWriter(secured.settings(Role.GENERATOR))
    try:
        with pytest.raises(EnvironmentMissing, match=rf"{name(of)} key 'k'.*broker refuses it.*`driftlog acl`"):
            writer.send(message(of)).result(LIMIT_S)
    finally:
        writer.close(2.0)


@pytest.mark.parametrize("role", Role)
def test_each_role_reads_what_its_work_needs(secured: SecuredBroker, role: Role) -> None:
    topics = {name(of): TOPICS[of].partitions for of in RIGHTS[role].reads}
    with closing(KafkaEventReader(secured.settings(role), topics, "beginning")) as reader:
        ends = reader.end_offsets()
        deadline_s = time.monotonic() + LIMIT_S
        while not all(reader.positions()[place] >= end for place, end in ends.items()):
            reader.poll(100)
            assert time.monotonic() < deadline_s


@pytest.mark.parametrize("role", [role for role in Role if RIGHTS[role].writes and not RIGHTS[role].transactional_id])
def test_each_role_writes_what_its_work_needs(secured: SecuredBroker, role: Role) -> None:
    writer = KafkaEventWriter(secured.settings(role))
    try:
        for of in sorted(RIGHTS[role].writes):
            assert writer.send(message(of)).result(LIMIT_S).offset >= 0
    finally:
        writer.close(2.0)


@pytest.mark.parametrize("role", [role for role in Role if RIGHTS[role].transactional_id])
def test_each_role_with_an_identity_writes_in_one_transaction(secured: SecuredBroker, role: Role) -> None:
    with closing(KafkaTransactionalWriter(secured.settings(role), f"{RUN}-{RIGHTS[role].transactional_id}")) as writer:
        writer.init()
        group = RIGHTS[role].group
        offsets = None if group is None else {(name(TopicName.TRAJECTORIES), 0): 0}
        placed = writer.commit(
            [message(of) for of in sorted(RIGHTS[role].writes)],
            group=None if group is None else f"{RUN}-{group}",
            offsets=offsets,
        )
    assert len(placed) == len(RIGHTS[role].writes)


@pytest.mark.parametrize("identity", ["trainer", "coordinator"])
def test_a_generator_cannot_take_the_identity_of_another_service(secured: SecuredBroker, identity: str) -> None:
    with (
        closing(KafkaTransactionalWriter(secured.settings(Role.GENERATOR), f"{RUN}-{identity}")) as writer,
        pytest.raises(EnvironmentMissing, match=f"transactional id {RUN}-{identity}: the broker refuses it"),
    ):
        writer.init()


def test_a_generator_cannot_read_the_ledger_and_hears_it(secured: SecuredBroker) -> None:
    with (
        closing(KafkaEventReader(secured.settings(Role.GENERATOR), {name(TopicName.LEDGER): 1}, "beginning")) as reader,
        pytest.raises(EnvironmentMissing, match=f"the broker refuses it .*{name(TopicName.LEDGER)}"),
    ):
        polled_until_it_fails(reader.poll)


def test_a_generator_cannot_join_the_group_of_the_trainer(secured: SecuredBroker) -> None:
    settings = secured.settings(Role.GENERATOR)
    with (
        closing(KafkaGroupReader(settings, f"{RUN}-trainer", name(TopicName.PROMPTS))) as reader,
        pytest.raises(EnvironmentMissing, match=f"the broker refuses it .*{RUN}-trainer"),
    ):
        polled_until_it_fails(reader.poll)


def test_a_coordinator_cannot_write_the_ledger_in_its_transactions(secured: SecuredBroker) -> None:
    with closing(KafkaTransactionalWriter(secured.settings(Role.COORDINATOR), f"{RUN}-coordinator")) as writer:
        writer.init()
        with pytest.raises(EnvironmentMissing, match=f"{RUN}-coordinator: the broker refuses it .*ledger"):
            writer.commit([message(TopicName.LEDGER)])


@pytest.mark.parametrize("role", [Role.READER, Role.PROJECTOR])
def test_who_only_reads_can_write_nothing(secured: SecuredBroker, role: Role) -> None:
    writer = KafkaEventWriter(secured.settings(role))
    try:
        with pytest.raises(EnvironmentMissing, match=f"{name(TopicName.POLICY)} .*the broker refuses it"):
            writer.send(message(TopicName.POLICY)).result(LIMIT_S)
    finally:
        writer.close(2.0)


def test_a_reader_of_a_topic_that_it_may_not_see_is_told_and_not_left_waiting(secured: SecuredBroker) -> None:
    with pytest.raises(EnvironmentMissing, match=f"topic {name(TopicName.POLICY)}: .*`driftlog acl`"):
        KafkaEventReader(secured.settings(NOBODY), {name(TopicName.POLICY): 1}, "beginning")


def test_a_writer_that_may_not_ask_for_the_limit_of_a_topic_takes_the_registry_at_its_word(
    secured: SecuredBroker,
) -> None:
    assert TopicLimits(secured.settings(NOBODY)).limit(name(TopicName.LEDGER)) == MAX_MESSAGE_BYTES


def test_without_the_right_to_see_topics_a_service_says_what_to_do(
    secured: SecuredBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in secured.environment(NOBODY, by_file=True).items():
        monkeypatch.setenv(variable, value)

    with pytest.raises(EnvironmentMissing, match="`driftlog acl` lets this user see them"):
        joined(tmp_path)

    assert capsys.readouterr().err.count(password_of(NOBODY)) == 0


def joined(tmp_path: Path) -> None:
    """What every service does first."""
    config = load_config(None, [f'run.name="{RUN}"'])
    bootstrap = running_bootstrap(config, RunDirectory(tmp_path, RUN))
    join(config, bootstrap, limit_s=0.0, reopened=True, clock=SystemClock(), pause=threading.Event().wait)


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (NOBODY, f"has no topic {RUN}."),
        (Role.READER, f"transactional id {RUN}-coordinator: the broker refuses it"),
    ],
    ids=["sees-nothing", "may-only-read"],
)
def test_a_service_without_its_rights_ends_with_code_2_and_one_message(
    secured: SecuredBroker, tmp_path: Path, user: str, words: str
) -> None:
    command = ["coordinate", "--run", RUN, "--set", f'run.directory="{tmp_path}"', "--wait-s", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "driftlog", *command],
        env={**os.environ, **secured.environment(user)}, cwd=ROOT, check=False,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    (said,) = [line for line in done.stderr.splitlines() if line.startswith("driftlog: ")]
    assert done.returncode == 2
    assert words in said
    assert "`driftlog acl`" in said
    assert "Traceback" not in done.stderr
    assert password_of(user) not in done.stderr


# ---------------------------------------------------------------- the command that makes the rules


def test_the_command_makes_the_rules_once_and_tells_what_lies_beyond_them(
    secured: SecuredBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in secured.environment(ADMIN).items():
        monkeypatch.setenv(variable, value)
    command = ["acl", "create", "--run", "other", "--principal", f"evaluator=User:{NOBODY}", "--json"]

    assert main([*command, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert main([*command[:-2], f"projector=User:{NOBODY}", "--json"]) == 0
    beyond = json.loads(capsys.readouterr().out)["beyond"]

    assert planned["created"] == []
    assert planned["missing"] == made["created"] != []
    assert (again["created"], again["there"]) == ([], len(made["created"]))
    assert f"User:{NOBODY} may write topic other.evaluations" in beyond


def test_who_may_not_alter_the_cluster_cannot_make_rules(
    secured: SecuredBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in secured.environment(Role.OPERATOR).items():
        monkeypatch.setenv(variable, value)

    assert main(["acl", "create", "--run", "other", "--principal", "reader=User:me"]) == 2

    assert "list access rules at 127.0.0.1" in capsys.readouterr().err


def test_a_broker_without_an_authorizer_is_named(
    kafka_broker: BrokerHandle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRIFTLOG_KAFKA", kafka_broker.bootstrap_servers)

    assert main(["acl", "create", "--run", "other", "--principal", "reader=User:me"]) == 2

    assert "keeps no access rules, so everybody may do everything: set its authorizer.class.name" in (
        capsys.readouterr().err
    )
