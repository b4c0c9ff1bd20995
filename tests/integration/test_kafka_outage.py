"""A broker that goes away under running clients: nothing hangs, nothing is lost unnoticed, all come back."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType

from infra import local_broker
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings, build, common_config
from infra.kafka_group_reader import KafkaGroupReader
from infra.kafka_reader import KafkaEventReader
from infra.kafka_transactions import KafkaTransactionalWriter
from infra.kafka_writer import KafkaEventWriter
from infra.local_broker import BrokerHandle
from infra.ports import Message
from infra.wakeup import Wakeup
from schemas.errors import DeliveryFailed, LogUnavailable, MessageTooLarge, TransactionFailed

pytestmark = [
    pytest.mark.kafka,
    # The client leaves the socket of a refused connection to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
POLICY = "demo.policy"


@pytest.fixture(scope="module")
def broker(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerHandle]:
    """A broker of this module's own: it is killed."""
    data_dir = tmp_path_factory.mktemp("outage")
    handle = local_broker.start(data_dir, jars=kafka_jars)
    admin = KafkaLogAdmin(settings(handle))
    admin.create_topics("demo")
    admin.close()
    yield handle
    local_broker.stop(data_dir)


@pytest.fixture(autouse=True)
def sockets_are_collected_here() -> Iterator[None]:
    yield
    gc.collect()


def settings(broker: BrokerHandle) -> KafkaSettings:
    """Short limits: an outage of seconds passes all of them."""
    return KafkaSettings(
        bootstrap_servers=broker.bootstrap_servers,
        request_timeout_s=1.5,
        delivery_timeout_s=2.0,
        transaction_timeout_s=3.0,
        init_timeout_s=20.0,
    )


def message(text: str) -> Message:
    return Message(topic=POLICY, key=b"k", value=text.encode())


def until(bell: Wakeup, condition: Callable[[], bool], what: str) -> None:
    for _ in range(400):
        if condition():
            return
        bell.wait(0.1)
    raise AssertionError(f"never happened: {what}")


def sends(writer: KafkaEventWriter, text: str) -> bool:
    """Sent, or the client is still being replaced."""
    try:
        writer.send(message(text)).result(10)
    except LogUnavailable:
        return False
    return True


def test_all_clients_come_back_after_an_outage_and_report_what_was_lost(broker: BrokerHandle, kafka_jars: Path) -> None:
    limits, bell = settings(broker), Wakeup()
    reader = KafkaEventReader(limits, {POLICY: 1}, "beginning", bell)
    group = KafkaGroupReader(limits, "workers", "demo.prompts", bell)
    writer = KafkaEventWriter(limits)
    trainer = KafkaTransactionalWriter(limits, "demo-trainer")
    trainer.init()
    writer.send(message("1")).result(10)
    trainer.commit([message("2")])
    until(bell, lambda: len(group.assignment()) == 16, "the group is complete")

    os.kill(broker.pid, signal.SIGKILL)
    assert local_broker.wait_for_end(broker.pid, timeout_s=10)
    lost = writer.send(message("lost"))
    with pytest.raises(TransactionFailed, match="init, then re-read"):
        trainer.commit([message("lost too")], group="g", offsets={(POLICY, 0): 1})
    with pytest.raises(DeliveryFailed, match="Expiring 1 record"):
        lost.result(10)
    with pytest.raises(LogUnavailable, match="being replaced"):
        writer.send(message("not queued"))
    with pytest.raises(LogUnavailable):
        reader.end_offsets()
    assert writer.in_flight_bytes() == 0

    local_broker.start(Path(broker.data_dir), jars=kafka_jars, port=broker.port)
    trainer.init()
    trainer.commit([message("3")], group="g", offsets={(POLICY, 0): 1})
    until(bell, lambda: sends(writer, "4"), "the writer is replaced")
    got: list[bytes | None] = []
    until(bell, lambda: bool(got.extend(r.value for r in reader.poll(10))) or got[-1:] == [b"4"], "the reader is back")
    assert got == [b"1", b"2", b"3", b"4"]
    until(bell, lambda: len(group.assignment()) == 16, "the group is back")
    for client in (group, reader, trainer):
        client.close()
    assert writer.close(5) == 0


def test_a_limit_lowered_behind_our_back_blames_the_large_record_and_heals(
    broker: BrokerHandle, kafka_jars: Path
) -> None:
    limits, bell = settings(local_broker.start(Path(broker.data_dir), jars=kafka_jars)), Wakeup()
    writer = KafkaEventWriter(limits)
    writer.send(message("the limit is asked for now")).result(10)
    topic = ConfigResource(ConfigResourceType.TOPIC, POLICY, {"max.message.bytes": "20000"})
    admin = build(KafkaAdminClient, limits, common_config(limits))
    admin.alter_configs([topic])
    noise = b"".join(i.to_bytes(4, "little") for i in range(1, 2_000_000, 131))
    with pytest.raises((MessageTooLarge, DeliveryFailed), match="MESSAGE|Size|larger"):
        writer.send(Message(topic=POLICY, key=b"k", value=noise)).result(10)
    until(bell, lambda: sends(writer, "fine"), "the writer is replaced")
    admin.reset_configs([topic])
    admin.close()
    assert writer.close(5) == 0


def test_close_with_the_broker_away_is_quick_and_counts(broker: BrokerHandle, kafka_jars: Path) -> None:
    handle = local_broker.start(Path(broker.data_dir), jars=kafka_jars)
    limits = settings(handle)
    writer = KafkaEventWriter(limits)
    reader = KafkaEventReader(limits, {POLICY: 1}, "beginning")
    group = KafkaGroupReader(limits, "workers", "demo.prompts")
    writer.send(message("x")).result(10)
    os.kill(handle.pid, signal.SIGKILL)
    assert local_broker.wait_for_end(handle.pid, timeout_s=10)
    for _ in range(100):
        writer.send(message("unsent"))
    assert writer.close(0.5) == 100
    reader.close()
    group.close()
