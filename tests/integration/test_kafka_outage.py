"""A broker that goes away under running clients: nothing hangs, nothing is lost unnoticed, all come back."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka.admin import ConfigResource, ConfigResourceType

from infra import kafka_group_reader, kafka_reader, local_broker
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings, build, common_config
from infra.kafka_group_reader import KafkaGroupReader
from infra.kafka_reader import KafkaEventReader
from infra.kafka_silence import Silence
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


def deafen(consumer: KafkaConsumer, monkeypatch: pytest.MonkeyPatch, bell: Wakeup) -> None:
    """From now on it hears nothing, as after an outage that it did not get over."""
    is_deaf = threading.Event()

    def hears_nothing(**_: object) -> dict[object, object]:
        is_deaf.set()
        threading.Event().wait(0.02)
        return {}

    monkeypatch.setattr(consumer, "poll", hears_nothing)
    until(bell, is_deaf.is_set, "the poll that was under way comes back")


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


def test_a_client_that_reads_nothing_although_records_lie_there_is_replaced(
    broker: BrokerHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_reader, "LOOK_S", 0.3)
    bell, writer = Wakeup(), KafkaEventWriter(settings(broker))
    writer.send(message("before")).result(10)
    reader = KafkaEventReader(settings(broker), {POLICY: 1}, "beginning", bell)
    got: list[bytes] = []
    until(bell, lambda: bool(got.extend(r.value for r in reader.poll(100)) or b"before" in got), "the first record")
    deaf = reader._consumer
    deafen(deaf, monkeypatch, bell)
    writer.send(message("behind its back")).result(10)

    until(bell, lambda: bool(got.extend(r.value for r in reader.poll(100)) or b"behind its back" in got), "the second")

    assert got.count(b"before") == got.count(b"behind its back") == 1
    assert reader._consumer is not deaf
    assert [record.args for record in caplog.records if "reader_replaced" in record.getMessage()]
    reader.close()
    writer.close(5.0)


def test_a_client_that_has_read_everything_is_left_alone(broker: BrokerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Wakeup()
    looks: list[int] = []
    reader = KafkaEventReader(settings(broker), {POLICY: 1}, "beginning", bell)

    def is_at_the_end() -> bool:
        reader.poll(100)
        return reader.positions() == reader.end_offsets()

    until(bell, is_at_the_end, "the end")
    monkeypatch.setattr(reader, "_new_consumer", lambda: pytest.fail("there is nothing to read"))
    ends = reader._offsets.stable_ends
    monkeypatch.setattr(reader._offsets, "stable_ends", lambda places: (looks.append(1), ends(places))[1])
    monkeypatch.setattr(reader, "_silence", Silence(0.0))
    until(bell, lambda: len(looks) >= 5, "a few looks")

    assert reader.positions() == reader.end_offsets()
    reader.close()


@pytest.mark.parametrize("fault", ["it reads nothing", "it waits for its group for ever"])
def test_a_group_member_that_hears_nothing_any_more_is_replaced_and_reads_on(
    fault: str, broker: BrokerHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads_nothing = fault == "it reads nothing"
    monkeypatch.setattr(kafka_group_reader, "LOOK_S", 0.3 if reads_nothing else 600.0)
    monkeypatch.setattr(kafka_group_reader, "JOIN_LIMIT_S", 600.0 if reads_nothing else 1.5)
    bell, writer = Wakeup(), KafkaEventWriter(settings(broker))
    writer.send(message(f"before {fault}")).result(10)
    reader = KafkaGroupReader(settings(broker), f"group-{len(fault)}", POLICY, bell)
    got: list[bytes] = []

    def has(text: str) -> bool:
        got.extend(record.value for record in reader.poll(100))
        return text.encode() in got

    until(bell, lambda: has(f"before {fault}"), "the first record")
    deaf = reader._consumer
    deafen(deaf, monkeypatch, bell)
    if not reads_nothing:
        monkeypatch.setattr(deaf._coordinator, "stable", lambda: False)
    writer.send(message(f"after {fault}")).result(10)

    until(bell, lambda: has(f"after {fault}"), "the second")

    assert reader._consumer is not deaf
    assert [record for record in caplog.records if "group_member_replaced" in record.getMessage()]
    reader.close()
    writer.close(5.0)


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
