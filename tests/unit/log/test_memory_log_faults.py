"""What the in-memory log does beyond the contract: faults, time, crashes. The simulator stands on these."""

from __future__ import annotations

import pytest
from kafka.partitioner.default import murmur2 as client_murmur2

from infra.ports import Message
from schemas.errors import DeliveryFailed, Fenced, IllegalState, LogUnavailable, TransactionFailed
from tests.fakes.memory_log import Crash, MemoryLog, Phase, murmur2
from tests.fakes.virtual_clock import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def log(clock: VirtualClock) -> MemoryLog:
    made = MemoryLog(clock)
    made.create_topic("t", 1)
    return made


def message(text: str, topic: str = "t", partition: int = 0) -> Message:
    return Message(topic=topic, key=text.encode(), value=text.encode(), partition=partition)


def seen(log: MemoryLog, topic: str = "t", partitions: int = 1) -> list[bytes | None]:
    return [r.value for r in log.client("check").reader({topic: partitions}, "beginning").poll(1_000)]


class DieAt:
    """A hook that crashes the process at one call."""

    def __init__(self, name: str, phase: Phase) -> None:
        self._at = (name, phase)
        self.calls: list[tuple[str, Phase]] = []

    def __call__(self, name: str, phase: Phase) -> None:
        self.calls.append((name, phase))
        if (name, phase) == self._at:
            raise Crash


@pytest.mark.parametrize("key", [b"", b"a", b"ab", b"abc", b"abcd", b"demo/p000017/e0/a1", bytes(range(256))])
def test_keys_hash_as_in_the_client(key: bytes) -> None:
    assert murmur2(key) & 0x7FFFFFFF == client_murmur2(key) & 0x7FFFFFFF


def test_time_moves_only_forward_and_stamps_records(log: MemoryLog, clock: VirtualClock) -> None:
    clock.advance(1.5)
    log.client("p").writer().send(message("a"))
    (record,) = log.client("p").reader({"t": 1}, "beginning").poll(1)
    assert record.timestamp_ms == clock.now_us() // 1000
    assert clock.monotonic_s() == 1.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


@pytest.mark.parametrize(("fate", "written"), [("lost", []), ("lost_ack", [b"a"])])
def test_a_failed_delivery_may_or_may_not_have_been_written(log: MemoryLog, fate: str, written: list[bytes]) -> None:
    log.next_send = fate  # type: ignore[assignment]
    writer = log.client("p").writer()
    with pytest.raises(DeliveryFailed):
        writer.send(message("a")).result(1)
    assert seen(log) == written
    writer.send(message("b")).result(1)


@pytest.mark.parametrize(("fate", "written"), [("aborted", []), ("committed", [b"a"])])
def test_a_transaction_of_unknown_outcome_needs_init(log: MemoryLog, fate: str, written: list[bytes]) -> None:
    writer = log.client("p").transactional_writer("id")
    writer.init()
    log.next_commit = fate  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(TransactionFailed):
            writer.commit([message("a")])
    assert seen(log) == written
    writer.init()
    writer.commit([message("b")])
    assert seen(log) == [*written, b"b"]


def test_a_crash_before_the_end_leaves_the_transaction_open_until_the_broker_gives_it_up(
    log: MemoryLog, clock: VirtualClock
) -> None:
    hook = DieAt("transaction.end", "before")
    writer = log.client("p", on_call=hook).transactional_writer("id")
    writer.init()
    with pytest.raises(Crash):
        writer.commit([message("a")], group="g", offsets={("t", 0): 1})
    log.client("q").writer().send(message("behind"))
    assert seen(log) == []
    clock.advance(9.9)
    assert seen(log) == []
    clock.advance(0.1)
    assert seen(log) == [b"behind"]
    assert log.committed("g") == {}
    assert hook.calls[-1] == ("transaction.end", "before")


def test_a_crash_after_the_end_has_committed_everything(log: MemoryLog) -> None:
    writer = log.client("p", on_call=DieAt("transaction.end", "after")).transactional_writer("id")
    writer.init()
    with pytest.raises(Crash):
        writer.commit([message("a")], group="g", offsets={("t", 0): 1})
    assert seen(log) == [b"a"]
    assert log.committed("g") == {("t", 0): (1, "")}


def test_a_transaction_that_outlives_its_time_is_failed_and_not_fenced(log: MemoryLog, clock: VirtualClock) -> None:
    def stall(name: str, phase: Phase) -> None:
        if (name, phase) == ("transaction.end", "before"):
            clock.advance(20)

    writer = log.client("p", on_call=stall).transactional_writer("id")
    writer.init()
    with pytest.raises(TransactionFailed, match="aborted from outside"):
        writer.commit([message("a")])
    assert seen(log) == []


def test_a_successor_in_mid_transaction_fences(log: MemoryLog) -> None:
    successor = log.client("q").transactional_writer("id")

    def interrupt(name: str, phase: Phase) -> None:
        if (name, phase) == ("transaction.end", "before"):
            successor.init()

    writer = log.client("p", on_call=interrupt).transactional_writer("id")
    writer.init()
    with pytest.raises(Fenced):
        writer.commit([message("a")])
    assert seen(log) == []


def test_every_port_call_passes_the_hook_before_and_after(log: MemoryLog) -> None:
    hook = DieAt("never", "before")
    client = log.client("p", on_call=hook)
    reader, writer = client.reader({"t": 1}, "beginning"), client.writer()
    writer.send(message("a"))
    reader.poll(1)
    assert hook.calls == [
        ("writer.send", "before"),
        ("writer.send", "after"),
        ("reader.poll", "before"),
        ("reader.poll", "after"),
    ]


def test_while_the_broker_is_away_sends_wait_and_questions_fail(log: MemoryLog, clock: VirtualClock) -> None:
    client = log.client("p")
    reader, writer, transactions = (
        client.reader({"t": 1}, "beginning"),
        client.writer(),
        client.transactional_writer("i"),
    )
    transactions.init()
    log.available = False
    early = writer.send(message("early"))
    clock.advance(20)
    late = writer.send(message("late"))
    assert reader.poll(10) == []
    for question in (reader.end_offsets, reader.high_watermarks, client.admin().existing_topics):
        with pytest.raises(LogUnavailable):
            question()
    with pytest.raises(TransactionFailed):
        transactions.commit([message("x")])
    with pytest.raises(LogUnavailable):
        transactions.init()
    clock.advance(15)
    with pytest.raises(DeliveryFailed):
        early.result(0)
    log.available = True
    assert late.result(0).offset == 0
    assert seen(log) == [b"late"]


def test_a_crash_loses_what_its_process_had_not_sent(log: MemoryLog) -> None:
    log.deferred = True
    log.client("p").writer().send(message("lost"))
    log.client("q").writer().send(message("kept"))
    log.crash("p")
    log.deferred = False
    log.settle()
    assert seen(log) == [b"kept"]


def test_a_crashed_member_keeps_its_partitions_until_its_session_ends(log: MemoryLog, clock: VirtualClock) -> None:
    log.create_topic("g", 4)
    first, second = (log.client(name).group_reader("group", "g") for name in ("p", "q"))
    assert (first.assignment(), second.assignment()) == ({0, 1}, {2, 3})
    log.crash("p")
    clock.advance(5.9)
    assert second.assignment() == {2, 3}
    clock.advance(0.1)
    assert second.assignment() == {0, 1, 2, 3}


def test_a_join_moves_as_few_partitions_as_it_can(log: MemoryLog) -> None:
    log.create_topic("g", 16)
    readers = [log.client(f"p{i}").group_reader("group", "g") for i in range(3)]
    before = [reader.assignment() for reader in readers]
    assert [len(owned) for owned in before] == [6, 5, 5]
    fourth = log.client("p3").group_reader("group", "g")
    assert len(fourth.assignment()) == 4
    assert all(reader.assignment() < owned for reader, owned in zip(readers, before, strict=True))


def test_arrivals_decide_what_a_poll_brings(log: MemoryLog) -> None:
    writer = log.client("w").writer()
    for text in ("a", "b", "c"):
        writer.send(message(text))
    arrived = iter([0, 2, 9])
    reader = log.client("p", arrivals=lambda topic, partition: next(arrived)).reader({"t": 1}, "beginning")
    assert [[r.value for r in reader.poll(10)] for _ in range(3)] == [[], [b"a", b"b"], [b"c"]]


def test_compaction_leaves_gaps_and_the_newest_of_each_key(log: MemoryLog) -> None:
    writer = log.client("w").writer()
    for key, value in ((b"k", b"5"), (b"k", b"6"), (b"o", b"x"), (b"k", b"9"), (b"o", None)):
        writer.send(Message(topic="t", key=key, value=value, partition=0))
    log.compact("t")
    reader = log.client("p").reader({"t": 1}, "beginning")
    assert [(r.offset, r.value) for r in reader.poll(10)] == [(3, b"9"), (4, None)]
    assert reader.positions() == reader.end_offsets() == {("t", 0): 5}


def test_an_error_in_one_partition_loses_nothing_of_the_others(log: MemoryLog) -> None:
    log.create_topic("two", 2)
    writer = log.client("w").writer()
    for partition in (0, 1):
        for text in ("a", "b"):
            writer.send(message(text, "two", partition))
    log.drop_before("two", 1, 1)
    reader = log.client("p").reader({"two": 2}, {("two", 0): 0, ("two", 1): 0})
    for _ in range(2):
        with pytest.raises(IllegalState, match=r"two\[1\]: records 0-0 are no longer"):
            reader.poll(10)
    reader.seek("two", 1, 1)
    assert [(r.partition, r.value) for r in reader.poll(10)] == [(0, b"a"), (0, b"b"), (1, b"b")]
