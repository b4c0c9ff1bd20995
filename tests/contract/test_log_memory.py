"""The log's contract on the in-memory adapter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Literal

import pytest

from infra.ports import EventReader, EventWriter, GroupReader, LogAdmin, Message, TransactionalWriter
from tests.contract.log_contract import (
    AdminContract,
    Place,
    ReaderContract,
    TransactionContract,
    WriterContract,
)
from tests.contract.log_group_contract import GroupContract
from tests.fakes.memory_log import Crash, MemoryLog, Phase
from tests.fakes.virtual_clock import VirtualClock


class MemoryHarness:
    """LogHarness in memory."""

    def __init__(self) -> None:
        self.log = MemoryLog(VirtualClock())
        self._serial = itertools.count()

    def topic(self, partitions: int = 1, max_message_bytes: int = 16 * 1024 * 1024) -> str:
        name = f"r{next(self._serial)}.policy"
        self.log.create_topic(name, partitions, max_message_bytes=max_message_bytes)
        return name

    def reader(
        self, topics: Mapping[str, int], start: Mapping[Place, int] | Literal["beginning", "end"] = "beginning"
    ) -> EventReader:
        return self.log.client("reader").reader(topics, start)

    def group_reader(self, group: str, topic: str) -> GroupReader:
        return self.log.client("group").group_reader(group, topic)

    def writer(self, in_flight_bytes: int = 64 * 1024 * 1024) -> EventWriter:
        return self.log.client("writer", in_flight_bytes=in_flight_bytes).writer()

    def transactional_writer(self, transactional_id: str) -> TransactionalWriter:
        return self.log.client("trainer").transactional_writer(transactional_id)

    def admin(self) -> LogAdmin:
        return self.log.client("admin").admin()

    def name(self, word: str) -> str:
        return word

    def hold_open(self, transactional_id: str, messages: Iterable[Message]) -> None:
        def die(call: str, phase: Phase) -> None:
            if (call, phase) == ("transaction.end", "before"):
                raise Crash

        writer = self.log.client("dies", on_call=die).transactional_writer(transactional_id)
        writer.init()
        with suppress(Crash):
            writer.commit(list(messages))

    def drop_before(self, topic: str, partition: int, offset: int) -> None:
        self.log.drop_before(topic, partition, offset)

    def committed(self, group: str) -> dict[Place, int]:
        return {place: offset for place, (offset, _) in self.log.committed(group).items()}

    def freeze(self) -> None:
        self.log.deferred = True

    def thaw(self) -> None:
        self.log.deferred = False

    def wait(self) -> None:
        pass


@pytest.fixture
def harness() -> MemoryHarness:
    return MemoryHarness()


class TestMemoryReader(ReaderContract): ...


class TestMemoryWriter(WriterContract): ...


class TestMemoryTransactions(TransactionContract): ...


class TestMemoryGroups(GroupContract): ...


class TestMemoryAdmin(AdminContract): ...
