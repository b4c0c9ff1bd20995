"""When the reader's thread asks for more: at once when all was taken, slowly behind a service that is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition

from infra import kafka_reader
from infra.kafka_clients import KafkaSettings
from infra.kafka_reader import KafkaEventReader
from infra.wakeup import Wakeup

LIMIT_S = 10.0
A = TopicPartition("r.t", 0)


class Consumer:
    """Gives one record a poll, up to three of them."""

    def __init__(self) -> None:
        self.given = 0
        self.third_was_asked_for = threading.Event()

    def assign(self, places: list[TopicPartition]) -> None: ...

    def seek(self, place: TopicPartition, offset: int) -> None: ...

    def position(self, place: TopicPartition, timeout_ms: int) -> int:
        return self.given

    def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        if self.given == 3:
            return {}
        self.given += 1
        if self.given == 3:
            self.third_was_asked_for.set()
        record = SimpleNamespace(
            topic=A.topic, partition=0, offset=self.given - 1, key=b"k", value=b"v", headers=(), timestamp=1
        )
        return {A: [record]}

    def close(self, autocommit: bool, timeout_ms: int) -> None: ...


class Offsets:
    def __init__(self, settings: KafkaSettings) -> None: ...

    def beginnings(self, places: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(places, 0)

    def close(self) -> None: ...


Start = Callable[[], tuple[KafkaEventReader, Consumer, Wakeup]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[KafkaEventReader] = []
    consumer, bell = Consumer(), Wakeup()
    monkeypatch.setattr(kafka_reader, "_check_topics", lambda settings, topics: None)
    monkeypatch.setattr(kafka_reader, "KafkaOffsets", Offsets)
    monkeypatch.setattr(kafka_reader, "build", lambda kind, settings, config: consumer)

    def begin() -> tuple[KafkaEventReader, Consumer, Wakeup]:
        started.append(KafkaEventReader(KafkaSettings(bootstrap_servers="h:1"), {A.topic: 1}, "beginning", bell))
        return started[0], consumer, bell

    yield begin
    for reader in started:
        reader.close()


def test_nothing_more_is_asked_for_while_the_service_has_not_taken_what_is_queued(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_reader, "BUSY_S", LIMIT_S)
    reader, consumer, bell = start()

    for number in range(3):
        assert bell.wait(LIMIT_S)
        assert consumer.given == number + 1
        assert [record.offset for record in reader.poll(10)] == [number]


def test_the_queue_fills_up_behind_a_service_that_is_away(start: Start) -> None:
    reader, consumer, _ = start()

    assert consumer.third_was_asked_for.wait(LIMIT_S)
    assert reader.positions() == {tuple(A): 0}
