"""Kafka in memory, for the contract suite and the simulator: no threads, no randomness, time from a clock.

It keeps what the services depend on: offsets that count transaction markers, the last stable offset, aborted
records, fencing by epoch, groups with rebalances, retention, compaction gaps, size limits. Faults are asked
for by name. `client(process)` gives the ports of one process; they live in tests/fakes/memory_ports.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from infra.ports import Clock, Message, Placed, Record
from schemas.errors import DeliveryFailed, EnvironmentMissing, Fenced, LogError, LogUnavailable, MessageTooLarge
from schemas.topics import MAX_MESSAGE_BYTES
from tests.fakes.memory_groups import Committed, MemoryGroup

if TYPE_CHECKING:
    from tests.fakes.memory_ports import MemoryClient

Place = tuple[str, int]
Phase = Literal["before", "after"]
Hook = Callable[[str, Phase], None]
Arrivals = Callable[[str, int], int]
"""(topic, partition) -> how many records of it one poll may bring: what has arrived so far"""


class Crash(BaseException):
    """The process died here. Not an Exception: no handler of a service may survive its own death."""


@dataclass(slots=True, eq=False)
class OpenTransaction:
    """Records that lie in the log undecided."""

    begun_s: float
    outcome: Literal["open", "committed", "aborted"] = "open"
    first: dict[Place, int] = field(default_factory=dict)
    """its first offset in each partition it touched"""
    offsets: dict[str, dict[Place, Committed]] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    record: Record | None
    """None: a marker, or a record that compaction removed"""
    transaction: OpenTransaction | None = None


@dataclass(slots=True)
class MemoryPartition:
    """One partition: entry i lies at offset i."""

    max_message_bytes: int
    entries: list[_Entry] = field(default_factory=list)
    start: int = 0
    """retention removed what lies below"""

    @property
    def end(self) -> int:
        """The high watermark."""
        return len(self.entries)


@dataclass(slots=True)
class _Identity:
    epoch: int = 0
    open: OpenTransaction | None = None


@dataclass(slots=True, eq=False)
class Sent:
    """One record handed to a writer, and what became of it."""

    process: str
    message: Message
    size: int
    sent_s: float
    result: Placed | LogError | None = None


class MemoryLog:
    """All topics, groups and identities of one broker."""

    def __init__(
        self,
        clock: Clock,
        *,
        transaction_timeout_s: float = 10.0,
        session_timeout_s: float = 6.0,
        delivery_timeout_s: float = 30.0,
    ) -> None:
        self.clock = clock
        self.transaction_timeout_s = transaction_timeout_s
        self.delivery_timeout_s = delivery_timeout_s
        self._session_timeout_s = session_timeout_s
        self._partitions: dict[Place, MemoryPartition] = {}
        self.topics: dict[str, int] = {}
        self._identities: dict[str, _Identity] = {}
        self._groups: dict[str, MemoryGroup] = {}
        self._pending: list[Sent] = []
        self.available = True
        """False: the broker is away; readers get nothing, questions fail, sends wait"""
        self.cut: set[str] = set()
        """processes that live but do not reach the broker"""
        self._settled_at_us: int | None = None
        self.deferred = False
        """True: sends wait in their process until this is False again; a crash loses them"""
        self.next_send: Literal["lost", "lost_ack"] | None = None
        """what becomes of the next record: not written, or written; reported as failed in both cases"""
        self.next_commit: Literal["aborted", "committed"] | None = None
        """what becomes of the next transaction, reported as of unknown outcome in both cases"""

    def client(
        self, process: str, *, on_call: Hook | None = None, arrivals: Arrivals | None = None,
        in_flight_bytes: int = 64 * 1024 * 1024,
    ) -> MemoryClient:  # fmt: skip
        """The ports of one process. `on_call` sees every call before and after; it may raise Crash."""
        from tests.fakes.memory_ports import MemoryClient

        return MemoryClient(self, process, on_call=on_call, arrivals=arrivals, in_flight_bytes=in_flight_bytes)

    # ------------------------------------------------------------ what a test does to the log

    def create_topic(self, name: str, partitions: int, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Make one topic."""
        self.topics[name] = partitions
        for partition in range(partitions):
            self._partitions[name, partition] = MemoryPartition(max_message_bytes=max_message_bytes)

    def crash(self, process: str) -> None:
        """The process is gone: its unsent records are lost, its group memberships run out."""
        self._pending = [sent for sent in self._pending if sent.process != process]
        for group in self._groups.values():
            group.silence(process, self.clock.monotonic_s())

    def silence(self, process: str) -> None:
        """The process stands still, or is cut off: its group memberships run out unless it speaks again in time."""
        for group in self._groups.values():
            group.silence(process, self.clock.monotonic_s())

    def speak(self, process: str) -> None:
        """The end of `silence`; what ran out meanwhile stays lost."""
        self.settle()
        for group in self._groups.values():
            group.speak(process)

    def drop_before(self, topic: str, partition: int, offset: int) -> None:
        """Retention: what lies below is gone."""
        held = self.partition(topic, partition)
        held.start = max(held.start, min(offset, held.end))

    def compact(self, topic: str) -> None:
        """Keep the last record of each key; offsets stay, with gaps."""
        for partition in range(self.topics[topic]):
            entries = self.partition(topic, partition).entries
            last = {entry.record.key: i for i, entry in enumerate(entries) if entry.record is not None}
            for i, entry in enumerate(entries):
                if entry.record is not None and last[entry.record.key] != i:
                    entry.record = None

    def committed(self, group: str) -> dict[Place, Committed]:
        """Offsets and metadata of a group."""
        return dict(self.group(group).offsets)

    def settle(self) -> None:
        """Do what time has made due. Every port call does this first."""
        now_us = self.clock.now_us()
        if now_us == self._settled_at_us and not self._pending:
            return
        self._settled_at_us, now_s = now_us, self.clock.monotonic_s()
        for identity in self._identities.values():
            if identity.open is not None and now_s - identity.open.begun_s >= self.transaction_timeout_s:
                identity.epoch += 1  # as the broker does: the writer that took too long can not go on
                self.end_transaction(identity, "aborted")
        for group in self._groups.values():
            group.expire(now_s)
        for sent in self._pending:
            if now_s - sent.sent_s >= self.delivery_timeout_s:
                sent.result = DeliveryFailed(f"{sent.message.topic}: not acknowledged in {self.delivery_timeout_s} s")
        waiting = [sent for sent in self._pending if sent.result is None]
        self._pending = waiting
        if self.available and not self.deferred:
            self._pending = [sent for sent in waiting if sent.process in self.cut]
            for sent in waiting:
                if sent.process not in self.cut:
                    self._write(sent)

    # ------------------------------------------------------------ what the ports do

    def partitions(self) -> list[MemoryPartition]:
        """All of them."""
        return list(self._partitions.values())

    def partition(self, topic: str, partition: int) -> MemoryPartition:
        """One partition; EnvironmentMissing when there is none."""
        try:
            return self._partitions[topic, partition]
        except KeyError:
            raise EnvironmentMissing(f"no such topic or partition: {topic}[{partition}]") from None

    def reaches(self, process: str) -> bool:
        """The broker is there for this process."""
        return self.available and process not in self.cut

    def require_reachable(self, what: str, process: str) -> None:
        """LogUnavailable while the broker is away, or the process cut off."""
        if not self.reaches(process):
            raise LogUnavailable(f"{what}: the broker is away")

    def stable_end(self, place: Place) -> int:
        """The last stable offset: the first undecided record, or the end."""
        opens = [i.open.first[place] for i in self._identities.values() if i.open is not None and place in i.open.first]
        return min(opens, default=self.partition(*place).end)

    def read(self, place: Place, position: int, max_records: int) -> tuple[list[Record], int]:
        """Committed records from `position`, and the position behind them: over markers and aborted ones."""
        held = self.partition(*place)
        records: list[Record] = []
        if position >= len(held.entries):
            return records, position
        end = self.stable_end(place)
        while position < end:
            entry = held.entries[position]
            seen = entry.record is not None and (entry.transaction is None or entry.transaction.outcome == "committed")
            if seen and len(records) == max_records:
                break
            position += 1
            if seen and entry.record is not None:
                records.append(entry.record)
        return records, position

    def place_of(self, message: Message) -> Place:
        """Where a message goes."""
        count = self.topics.get(message.topic, 0)
        partition = message.partition
        if partition is None and count:
            partition = (murmur2(message.key) & 0x7FFFFFFF) % count
        if partition is None or not 0 <= partition < count:
            raise EnvironmentMissing(f"no such topic or partition: {message.topic}[{message.partition}]")
        return message.topic, partition

    def append(self, message: Message, transaction: OpenTransaction | None = None) -> Placed:
        """Write one record; MessageTooLarge when the topic refuses it."""
        place = self.place_of(message)
        held = self.partition(*place)
        if len(message.key) + len(message.value or b"") > held.max_message_bytes:
            raise MessageTooLarge(f"{message.topic} key {message.key!r}: larger than {held.max_message_bytes} bytes")
        if transaction is not None:
            transaction.first.setdefault(place, held.end)
        record = Record(
            topic=place[0], partition=place[1], offset=held.end, key=message.key, value=message.value,
            headers=tuple(message.headers), timestamp_ms=self.clock.now_us() // 1000,
        )  # fmt: skip
        held.entries.append(_Entry(record=record, transaction=transaction))
        return Placed(partition=place[1], offset=record.offset)

    def send(self, sent: Sent) -> None:
        """Queue one record of a writer."""
        self._pending.append(sent)
        self.settle()

    def forget_pending(self, process: str) -> None:
        """A closed writer's unsent records."""
        self._pending = [sent for sent in self._pending if sent.process != process]

    def identity(self, transactional_id: str) -> _Identity:
        """The transaction coordinator's state of one id."""
        return self._identities.setdefault(transactional_id, _Identity())

    def take_over(self, transactional_id: str) -> int:
        """A new writer: its predecessor's open transaction is aborted, its epoch is past. Returns the epoch."""
        identity = self.identity(transactional_id)
        if identity.open is not None:
            self.end_transaction(identity, "aborted")
        identity.epoch += 1
        return identity.epoch

    def begin(self, transactional_id: str, epoch: int) -> OpenTransaction:
        """Fenced when a newer writer took over."""
        identity = self.identity(transactional_id)
        if identity.epoch != epoch:
            raise Fenced(f"{transactional_id}: epoch {epoch} is past, {identity.epoch} owns it; stop for good")
        identity.open = OpenTransaction(begun_s=self.clock.monotonic_s())
        return identity.open

    def end_transaction(self, identity: _Identity, outcome: Literal["committed", "aborted"]) -> None:
        """Decide, and write a marker into every partition that was touched."""
        transaction, identity.open = identity.open, None
        assert transaction is not None
        transaction.outcome = outcome
        for place in transaction.first:
            self.partition(*place).entries.append(_Entry(record=None))
        if outcome == "committed":
            for group, offsets in transaction.offsets.items():
                self.group(group).offsets.update(offsets)

    def group(self, name: str) -> MemoryGroup:
        """A consumer group."""
        return self._groups.setdefault(name, MemoryGroup(session_timeout_s=self._session_timeout_s))

    def _write(self, sent: Sent) -> None:
        fate, self.next_send = self.next_send, None
        try:
            placed = None if fate == "lost" else self.append(sent.message)
        except LogError as error:
            sent.result = error
            return
        failed = DeliveryFailed(f"{sent.message.topic}: no acknowledgement")
        sent.result = placed if placed is not None and fate is None else failed


def message_bytes(message: Message) -> int:
    """What a message weighs in the in-flight budget."""
    size = len(message.key) + len(message.value or b"")
    return size + sum(len(name) + len(value) for name, value in message.headers)


def murmur2(data: bytes) -> int:
    """The hash by which every Kafka client maps keys to partitions."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)
