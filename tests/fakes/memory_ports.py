"""The ports of one process on the in-memory log. Every call passes through the process's hook.

Hook names: reader.*, group.*, writer.*, transaction.init, transaction.commit, admin.*; and `transaction.end`,
whose "before" sees all records written but undecided, whose "after" sees them committed with nobody told yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from infra.ports import Message, Placed, Record
from infra.wakeup import Wakeup
from schemas.errors import (
    BudgetExhausted,
    DriftlogError,
    IllegalState,
    LogUnavailable,
    MessageTooLarge,
    RangeMissing,
)
from schemas.ids import RunId
from schemas.topics import MAX_MESSAGE_BYTES, TOPICS, topic
from tests.fakes.memory_groups import Committed, Member, checked
from tests.fakes.memory_log import Arrivals, Hook, MemoryLog, Place, Sent, message_bytes
from tests.fakes.memory_transactions import MemoryTransactionalWriter


class _Call:
    """A port call as a context. A class: a generator here costs the simulator a tenth of its time."""

    __slots__ = ("_log", "_name", "_on_call")

    def __init__(self, name: str, log: MemoryLog, on_call: Hook | None) -> None:
        self._name = name
        self._log = log
        self._on_call = on_call

    def __enter__(self) -> None:
        if self._on_call is not None:
            self._on_call(self._name, "before")
        self._log.settle()

    def __exit__(self, kind: type[BaseException] | None, error: object, where: object) -> None:
        if kind is None and self._on_call is not None:
            self._on_call(self._name, "after")


class MemoryClient:
    """What one process holds of the log."""

    def __init__(
        self, log: MemoryLog, process: str, *, on_call: Hook | None, arrivals: Arrivals | None, in_flight_bytes: int
    ) -> None:
        self.log = log
        self.process = process
        self.in_flight_bytes = in_flight_bytes
        self.subject = ""
        """what the call at hand is about: a topic, where it is about one"""
        self.sending: Message | None = None
        """the last record that was to be sent"""
        self._on_call = on_call
        self._arrivals = arrivals

    def call(self, name: str, subject: str = "") -> _Call:
        """One port call: the hook, what time made due, the work, the hook."""
        self.subject = subject
        return _Call(name, self.log, self._on_call)

    def require_reachable(self, what: str) -> None:
        """LogUnavailable while this process does not reach the broker."""
        self.log.require_reachable(what, self.process)

    def reaches(self) -> bool:
        """The broker is there for this process."""
        return self.log.reaches(self.process)

    def arrived(self, place: Place, wanted: int) -> int:
        """How many records of a partition this poll may bring."""
        return wanted if self._arrivals is None else min(wanted, self._arrivals(*place))

    def reader(
        self,
        topics: Mapping[str, int],
        start: Mapping[Place, int] | Literal["beginning", "end"],
        wakeup: Wakeup | None = None,
    ) -> MemoryEventReader:
        """An EventReader."""
        return MemoryEventReader(self, topics, start)

    def group_reader(self, group: str, topic_name: str) -> MemoryGroupReader:
        """A GroupReader."""
        return MemoryGroupReader(self, group, topic_name)

    def writer(self) -> MemoryEventWriter:
        """An EventWriter."""
        return MemoryEventWriter(self)

    def transactional_writer(self, transactional_id: str) -> MemoryTransactionalWriter:
        """A TransactionalWriter."""
        return MemoryTransactionalWriter(self, transactional_id)

    def admin(self) -> MemoryLogAdmin:
        """A LogAdmin."""
        return MemoryLogAdmin(self)


class MemoryEventReader:
    """The EventReader port."""

    def __init__(
        self, client: MemoryClient, topics: Mapping[str, int], start: Mapping[Place, int] | Literal["beginning", "end"]
    ) -> None:
        self._client = client
        self._log = client.log
        for name, count in topics.items():
            self._log.partition(name, 0)
            check_partitions(name, self._log.topics[name], count)
        places = [(name, partition) for name, count in topics.items() for partition in range(count)]
        at_end = start == "end"
        first = {p: self._log.stable_end(p) if at_end else self._log.partition(*p).start for p in places}
        named = {} if isinstance(start, str) else start
        self._positions = first | {place: named[place] for place in places if place in named}
        self._error: DriftlogError | None = None
        self._about = next(iter(topics), "")

    def poll(self, max_records: int) -> Sequence[Record]:
        records: list[Record] = []
        with self._client.call("reader.poll", self._about):
            if self._error is not None:
                raise self._error
            if not self._client.reaches():
                return records
            for place, position in self._positions.items():
                self._error = position_error(self._log, place, position)
                if self._error is not None:
                    raise self._error
            for place, position in self._positions.items():
                limit = self._client.arrived(place, max_records - len(records))
                found, self._positions[place] = self._log.read(place, position, limit)
                records += found
        return records

    def positions(self) -> Mapping[Place, int]:
        return dict(self._positions)

    def end_offsets(self) -> Mapping[Place, int]:
        with self._client.call("reader.end_offsets"):
            self._client.require_reachable("end offsets")
            return {place: self._log.stable_end(place) for place in self._positions}

    def high_watermarks(self) -> Mapping[Place, int]:
        with self._client.call("reader.high_watermarks"):
            self._client.require_reachable("high watermarks")
            return {place: self._log.partition(*place).end for place in self._positions}

    def seek(self, topic: str, partition: int, offset: int) -> None:
        with self._client.call("reader.seek"):
            if (topic, partition) not in self._positions:
                raise ValueError(f"seek: {topic}[{partition}] is not read here")
            self._positions[topic, partition] = offset
            self._error = None

    def close(self) -> None:
        with self._client.call("reader.close"):
            pass


class MemoryGroupReader:
    """The GroupReader port."""

    def __init__(self, client: MemoryClient, group: str, topic_name: str) -> None:
        self._client = client
        self._topic = topic_name
        self._group = client.log.group(group)
        self._member: Member | None = None
        self._known: dict[int, int] = {}
        """partition -> assignment number whose position we hold"""
        self._positions: dict[int, int] = {}
        self._committed: dict[int, Committed | None] = {}
        self._queued: dict[int, Committed] = {}
        """commits that the broker has not got yet: repeated until it does, or the partition goes"""
        self.rejoin()

    def poll(self, max_records: int) -> Sequence[Record]:
        records: list[Record] = []
        with self._client.call("group.poll"):
            self._sync()
            if not self._client.reaches():
                return records
            for partition, position in self._positions.items():
                error = position_error(self._client.log, (self._topic, partition), position)
                if error is not None:
                    raise error
            for partition in sorted(self._positions):
                place = (self._topic, partition)
                limit = self._client.arrived(place, max_records - len(records))
                found, self._positions[partition] = self._client.log.read(place, self._positions[partition], limit)
                records += found
        return records

    def assignment(self) -> frozenset[int]:
        self._client.log.settle()
        self._sync()
        return frozenset(self._positions)

    def committed(self, partition: int) -> Committed | None:
        self._client.log.settle()
        self._sync()
        return self._committed.get(partition)

    def commit(self, offsets: Mapping[int, Committed]) -> None:
        with self._client.call("group.commit"):
            self._queued |= {partition: checked(value) for partition, value in offsets.items()}
            self._sync()

    def leave(self) -> None:
        with self._client.call("group.leave"):
            self._sync()
            if self._member is not None:
                if self._client.reaches():  # otherwise nobody hears it: the session runs out
                    self._group.leave(self._member)
                self._member = None
            self._sync()
            if not self._client.reaches():
                self._known, self._positions, self._committed, self._queued = {}, {}, {}, {}

    def rejoin(self) -> None:
        with self._client.call("group.rejoin"):
            self._rejoin()

    def _rejoin(self) -> None:
        if self._member is None:
            self._member = Member(process=self._client.process, topic=self._topic)
            self._group.join(self._member, self._client.log.topics[self._topic])

    def close(self) -> None:
        with self._client.call("group.close"):
            if self._member is not None:
                self._group.leave(self._member)
                self._member = None

    def _sync(self) -> None:
        """Forget what was revoked; place what is new at its committed offset."""
        if not self._client.reaches():
            return  # what goes on in the group is not known here
        if self._member is not None and self._member not in self._group.members:
            self._member = None  # the session ran out while nobody heard of us; the client joins again
            self._rejoin()
        owned = self._member.owned if self._member is not None else {}
        for partition in list(self._known):
            if owned.get(partition) != self._known[partition]:
                del self._known[partition], self._positions[partition], self._committed[partition]
        for partition, value in self._queued.items():
            if partition in self._known:
                self._group.offsets[self._topic, partition] = value
        self._queued = {}
        for partition, serial in owned.items():
            if partition not in self._known:
                committed = self._group.offsets.get((self._topic, partition))
                start = self._client.log.partition(self._topic, partition).start
                self._known[partition] = serial
                if committed is not None and committed[0] < start:
                    committed = None  # retention removed what it points at
                self._positions[partition] = committed[0] if committed is not None else start
                self._committed[partition] = committed


class MemoryDelivery:
    """The Delivery port."""

    def __init__(self, log: MemoryLog, sent: Sent) -> None:
        self._log = log
        self._sent = sent

    def done(self) -> bool:
        self._log.settle()
        return self._sent.result is not None

    def result(self, timeout_s: float) -> Placed:
        self._log.settle()
        result = self._sent.result
        if result is None:
            raise LogUnavailable(f"{self._sent.message.topic}: not acknowledged within {timeout_s:g} s")
        if isinstance(result, Placed):
            return result
        raise result


class MemoryEventWriter:
    """The EventWriter port."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client
        self._sent: list[Sent] = []
        self._closed = False

    def send(self, message: Message) -> MemoryDelivery:
        self._client.sending = message
        with self._client.call("writer.send", message.topic):
            if self._closed:
                raise LogUnavailable("the writer is closed")
            size = message_bytes(message)
            if size > MAX_MESSAGE_BYTES + 64 * 1024:
                raise MessageTooLarge(f"{message.topic} key {message.key!r} ({size} bytes): no setting lets it pass")
            self._client.log.place_of(message)
            if self.in_flight_bytes() + size > self._client.in_flight_bytes:
                raise BudgetExhausted(f"{message.topic} key {message.key!r}: wait for deliveries")
            now_s = self._client.log.clock.monotonic_s()
            sent = Sent(process=self._client.process, message=message, size=size, sent_s=now_s)
            self._sent.append(sent)
            self._client.log.send(sent)
            return MemoryDelivery(self._client.log, sent)

    def in_flight_bytes(self) -> int:
        self._client.log.settle()
        self._sent = [sent for sent in self._sent if sent.result is None]
        return sum(sent.size for sent in self._sent)

    def close(self, timeout_s: float) -> int:
        with self._client.call("writer.close"):
            if self._closed:
                return 0
            self._closed = True
            self.in_flight_bytes()
            self._client.log.forget_pending(self._client.process)
            return len(self._sent)


class MemoryLogAdmin:
    """The LogAdmin port."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client

    def create_topics(self, run: str) -> None:
        with self._client.call("admin.create_topics"):
            log = self._client.log
            self._client.require_reachable("create topics")
            for name, spec in TOPICS.items():
                full = topic(RunId(run), name)
                if full not in log.topics:
                    log.create_topic(full, spec.partitions)
                check_partitions(full, log.topics[full], spec.partitions)

    def existing_topics(self) -> frozenset[str]:
        with self._client.call("admin.existing_topics"):
            self._client.require_reachable("list topics")
            return frozenset(self._client.log.topics)

    def close(self) -> None:
        pass


def check_partitions(name: str, found: int, expected: int) -> None:
    """IllegalState when a topic was made with another number of partitions."""
    if found != expected:
        raise IllegalState(f"topic {name} has {found} partitions, this project expects {expected}")


def position_error(log: MemoryLog, place: Place, position: int) -> IllegalState | None:
    """The missing range of a position outside the log."""
    held = log.partition(*place)
    if position < held.start:
        words = f"{place[0]}[{place[1]}]: records {position}-{held.start - 1} are no longer in the log"
        return RangeMissing(words, {place: held.start})
    if position > held.end:
        return IllegalState(f"{place[0]}[{place[1]}]: position {position} is beyond the end {held.end}")
    return None
