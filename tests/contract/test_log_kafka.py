"""The log's contract on a real broker."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import pytest
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor

from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings, abandon, build, common_config, producer_config
from infra.kafka_group_reader import KafkaGroupReader
from infra.kafka_reader import POLL_MS, KafkaEventReader
from infra.kafka_transactions import KafkaTransactionalWriter
from infra.kafka_writer import KafkaEventWriter
from infra.local_broker import BrokerHandle
from infra.ports import Message, Record
from infra.wakeup import Wakeup
from schemas.errors import IllegalState
from tests.contract.log_contract import (
    AdminContract,
    Place,
    ReaderContract,
    TransactionContract,
    WriterContract,
    message,
    read_to_end,
    texts,
    until,
    write,
)
from tests.contract.log_group_contract import GroupContract

pytestmark = pytest.mark.kafka


class KafkaHarness:
    """LogHarness on a broker; closes what it made."""

    def __init__(self, broker: BrokerHandle) -> None:
        self._broker = broker
        self._settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
        self._unique = uuid.uuid4().hex[:8]
        self._serial = 0
        self._wakeup = Wakeup()
        self._made: list[Any] = []
        self._raw = build(KafkaAdminClient, self._settings, common_config(self._settings))

    def topic(self, partitions: int = 1, max_message_bytes: int = 16 * 1024 * 1024) -> str:
        self._serial += 1
        name = f"r{self._unique}{self._serial}.policy"
        config = {"max.message.bytes": str(max_message_bytes)}
        self._raw.create_topics(
            {name: {"num_partitions": partitions, "replication_factor": 1, "configs": config}}, wait_for_metadata=True
        )
        return name

    def reader(
        self,
        topics: Mapping[str, int],
        start: Mapping[Place, int] | Literal["beginning", "end"] = "beginning",
        prepare: Callable[[Record], Record] | None = None,
    ) -> KafkaEventReader:
        return self._keep(KafkaEventReader(self._settings, topics, start, self._wakeup, prepare))

    def group_reader(self, group: str, topic: str) -> KafkaGroupReader:
        return self._keep(KafkaGroupReader(self._settings, group, topic, self._wakeup))

    def writer(self, in_flight_bytes: int = 64 * 1024 * 1024) -> KafkaEventWriter:
        return self._keep(KafkaEventWriter(replace(self._settings, in_flight_bytes=in_flight_bytes)))

    def transactional_writer(self, transactional_id: str) -> KafkaTransactionalWriter:
        return self._keep(KafkaTransactionalWriter(self._settings, transactional_id))

    def admin(self) -> KafkaLogAdmin:
        return self._keep(KafkaLogAdmin(self._settings))

    def name(self, word: str) -> str:
        return f"{word}-{self._unique}"

    def hold_open(self, transactional_id: str, messages: Iterable[Message]) -> None:
        config = producer_config(self._settings) | {"transactional_id": transactional_id}
        producer = build(KafkaProducer, self._settings, config)
        producer.init_transactions()
        producer.begin_transaction()
        for one in messages:
            producer.send(one.topic, one.value, one.key, partition=one.partition).get(timeout=10)
        abandon(producer, limit_s=2.0)

    def drop_before(self, topic: str, partition: int, offset: int) -> None:
        self._raw.delete_records({TopicPartition(topic, partition): offset})

    def change_topic(self, topic: str, config: Mapping[str, str]) -> None:
        self._raw.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=dict(config))])

    def committed(self, group: str) -> dict[Place, int]:
        answer = self._raw.list_group_offsets({group: None})[group]
        return {(tp.topic, tp.partition): found.offset for tp, found in answer.items() if found.offset >= 0}

    def freeze(self) -> None:
        os.kill(self._broker.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._broker.pid, signal.SIGCONT)

    def wait(self) -> None:
        self._wakeup.wait(0.05)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.thaw()
        for made in self._made:
            if isinstance(made, KafkaEventWriter):
                made.close(0.1)
            else:
                made.close()
        self._raw.close()

    def _keep(self, made: Any) -> Any:
        self._made.append(made)
        return made


@pytest.fixture
def harness(kafka_broker: BrokerHandle) -> Iterator[KafkaHarness]:
    made = KafkaHarness(kafka_broker)
    yield made
    made.close()


class TestKafkaReader(ReaderContract): ...


class TestKafkaWriter(WriterContract): ...


class TestKafkaTransactions(TransactionContract): ...


class TestKafkaGroups(GroupContract): ...


class TestKafkaAdmin(AdminContract): ...


def test_a_join_that_outlives_a_poll_is_taken_up_again(harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """New metadata calls for a join, and a poll ends in its midst: the client alone would never end it."""
    assign = CooperativeStickyAssignor.assign
    joins: list[int] = []

    def slow_assign(*arguments: Any) -> Any:
        joins.append(1)
        time.sleep(2 * POLL_MS / 1000)  # a busy machine: longer than a poll
        return assign(*arguments)

    monkeypatch.setattr(CooperativeStickyAssignor, "assign", slow_assign)
    reader = harness.group_reader(harness.name("slow"), harness.topic(partitions=3))
    until(harness, lambda: reader.assignment() == {0, 1, 2}, "the first join")
    before = len(joins)
    coordinator = reader._consumer._coordinator
    coordinator._assignment_snapshot = {}  # as when the partitions had become known only after the first join
    until(harness, lambda: len(joins) > before, "the second join")
    until(harness, lambda: not coordinator.rejoining, "its end")
    assert coordinator.stable()
    assert reader.assignment() == {0, 1, 2}


def test_a_history_that_somebody_made_compacted_is_refused_by_name(harness: KafkaHarness) -> None:
    """C70: a log that forgets cannot be audited; the run does not start on it."""
    run = harness.name("run")
    admin = harness.admin()
    admin.create_topics(run)
    harness.change_topic(f"{run}.ledger", {"cleanup.policy": "compact"})
    until(harness, lambda: "compact" in str(refusal(admin, run)), "the broker to apply it")
    assert "ledger has cleanup.policy 'compact', this project expects 'delete'" in str(refusal(admin, run))


def refusal(admin: KafkaLogAdmin, run: str) -> IllegalState | None:
    try:
        admin.create_topics(run)
    except IllegalState as error:
        return error
    return None


def test_the_readers_thread_prepares_every_record_and_what_it_raises_is_heard(harness: KafkaHarness) -> None:
    topic, asked_on = harness.topic(), set[str]()

    def prepare(record: Record) -> Record:
        asked_on.add(threading.current_thread().name)
        if record.value == b"bad":
            raise IllegalState("planted")
        return replace(record, value=b"prepared " + (record.value or b""))

    write(harness, message(topic, "one"))
    reader = harness.reader({topic: 1}, prepare=prepare)
    assert texts(read_to_end(harness, reader)) == ["prepared one"]
    assert asked_on == {f"reader-{topic}"}
    write(harness, message(topic, "bad"))
    with pytest.raises(IllegalState, match="planted"):
        until(harness, lambda: bool(reader.poll(10)), "the error")
