"""What every adapter of the log promises, as test classes. Subclasses name the adapter with a `harness` fixture.

A harness makes topics and ports, and does to the log what its users can not: hold a transaction open, drop
old records, freeze the broker. Nothing here sleeps: `until` asks again each time something arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

import pytest

from infra.ports import EventReader, EventWriter, GroupReader, LogAdmin, Message, Record, TransactionalWriter
from schemas.errors import (
    BudgetExhausted,
    EnvironmentMissing,
    Fenced,
    IllegalState,
    LogUnavailable,
    MessageTooLarge,
    RangeMissing,
    TransactionFailed,
)
from schemas.topics import TOPICS, TopicName

Place = tuple[str, int]
LIMIT_S = 10.0


class LogHarness(Protocol):
    """What a contract test asks of an adapter."""

    def topic(self, partitions: int = 1, max_message_bytes: int = 16 * 1024 * 1024) -> str: ...
    def reader(
        self, topics: Mapping[str, int], start: Mapping[Place, int] | Literal["beginning", "end"] = "beginning"
    ) -> EventReader: ...
    def group_reader(self, group: str, topic: str) -> GroupReader: ...
    def writer(self, in_flight_bytes: int = 64 * 1024 * 1024) -> EventWriter: ...
    def transactional_writer(self, transactional_id: str) -> TransactionalWriter: ...
    def admin(self) -> LogAdmin: ...
    def name(self, word: str) -> str:
        """A group or transactional id of this test's own."""
        ...

    def hold_open(self, transactional_id: str, messages: Iterable[Message]) -> None:
        """Write in a transaction and die before its end."""
        ...

    def drop_before(self, topic: str, partition: int, offset: int) -> None: ...
    def committed(self, group: str) -> dict[Place, int]: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def wait(self) -> None:
        """Let something arrive, at most a moment."""
        ...


def message(topic: str, text: str, *, partition: int | None = 0, key: str = "k") -> Message:
    return Message(topic=topic, key=key.encode(), value=text.encode(), partition=partition)


def texts(records: Iterable[Record]) -> list[str]:
    return [(record.value or b"").decode() for record in records]


def until(harness: LogHarness, condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, boundedly."""
    for _ in range(400):
        if condition():
            return
        harness.wait()
    raise AssertionError(f"never happened: {what}")


def read_to_end(harness: LogHarness, reader: EventReader) -> list[Record]:
    """Everything up to the last stable offsets of now."""
    ends = reader.end_offsets()
    records: list[Record] = []

    def at_end() -> bool:
        records.extend(reader.poll(100))
        positions = reader.positions()
        return all(positions[place] >= end for place, end in ends.items())

    until(harness, at_end, f"positions reach {ends}")
    return records


def write(harness: LogHarness, *messages: Message) -> None:
    """Write and wait for the acknowledgements."""
    writer = harness.writer()
    for delivery in [writer.send(one) for one in messages]:
        delivery.result(LIMIT_S)
    assert writer.close(LIMIT_S) == 0


class ReaderContract:
    """EventReader."""

    def test_records_come_in_offset_order_with_all_their_parts(self, harness: LogHarness) -> None:
        topic = harness.topic()
        first = Message(topic=topic, key=b"a", value=b"one", headers=(("h", b"1"), ("h", b"2")), partition=0)
        write(harness, first, message(topic, "two"))
        records = read_to_end(harness, harness.reader({topic: 1}))
        assert [(r.offset, r.key, r.value) for r in records] == [(0, b"a", b"one"), (1, b"k", b"two")]
        assert records[0].header("h") == b"2"
        assert records[0].timestamp_ms > 0

    def test_keys_find_the_same_partition_in_every_adapter(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=4)
        write(harness, *(message(topic, key, key=key, partition=None) for key in ("", "a", "run/p000017/e0/a1", "xyz")))
        placed = {(r.value or b"").decode(): r.partition for r in read_to_end(harness, harness.reader({topic: 4}))}
        assert placed == {"": 1, "a": 0, "run/p000017/e0/a1": 0, "xyz": 2}

    def test_a_poll_hands_out_no_more_than_it_was_asked_for(self, harness: LogHarness) -> None:
        topic = harness.topic()
        write(harness, *(message(topic, str(i)) for i in range(5)))
        reader = harness.reader({topic: 1})
        got: list[Record] = []

        def some() -> bool:
            got.extend(reader.poll(2))
            return len(got) >= 2

        until(harness, some, "the first records")
        assert texts(got) == ["0", "1"]
        assert reader.positions() == {(topic, 0): 2}

    def test_reading_starts_where_it_is_told_to(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=2)
        write(harness, *(message(topic, f"{p}{i}", partition=p) for p in (0, 1) for i in range(3)))
        reader = harness.reader({topic: 2}, {(topic, 0): 2})
        assert sorted(texts(read_to_end(harness, reader))) == ["02", "10", "11", "12"]

    def test_a_reader_from_the_end_hands_out_only_what_is_written_from_then_on(self, harness: LogHarness) -> None:
        topic = harness.topic()
        write(harness, message(topic, "before"))
        reader = harness.reader({topic: 1}, "end")
        assert reader.positions() == {(topic, 0): 1}
        write(harness, message(topic, "after"))
        assert texts(read_to_end(harness, reader)) == ["after"]
        reader.seek(topic, 0, 0)
        assert texts(read_to_end(harness, reader)) == ["before", "after"]

    def test_a_tombstone_is_a_record_without_value(self, harness: LogHarness) -> None:
        topic = harness.topic()
        write(harness, Message(topic=topic, key=b"k", value=None, partition=0))
        assert [r.value for r in read_to_end(harness, harness.reader({topic: 1}))] == [None]

    def test_seek_forgets_what_was_queued_and_reads_again(self, harness: LogHarness) -> None:
        topic = harness.topic()
        write(harness, *(message(topic, str(i)) for i in range(3)))
        reader = harness.reader({topic: 1})
        assert texts(read_to_end(harness, reader)) == ["0", "1", "2"]
        reader.seek(topic, 0, 1)
        assert reader.positions() == {(topic, 0): 1}
        assert texts(read_to_end(harness, reader)) == ["1", "2"]

    def test_seek_to_a_partition_that_is_not_read_is_an_error(self, harness: LogHarness) -> None:
        topic = harness.topic()
        with pytest.raises(ValueError, match="not read here"):
            harness.reader({topic: 1}).seek(topic, 7, 0)

    def test_a_position_below_the_log_names_the_missing_range_and_never_jumps(self, harness: LogHarness) -> None:
        topic = harness.topic()
        write(harness, *(message(topic, str(i)) for i in range(5)))
        harness.drop_before(topic, 0, 3)
        reader = harness.reader({topic: 1}, {(topic, 0): 1})
        with pytest.raises(RangeMissing, match=r"records 1-2 are no longer in the log") as raised:
            until(harness, lambda: bool(reader.poll(10)), "the error")
        assert raised.value.first == {(topic, 0): 3}
        reader.seek(topic, 0, 3)
        assert texts(read_to_end(harness, reader)) == ["3", "4"]

    def test_a_position_beyond_the_end_is_an_error_and_not_a_wait(self, harness: LogHarness) -> None:
        topic = harness.topic()
        reader = harness.reader({topic: 1}, {(topic, 0): 9})
        with pytest.raises(IllegalState, match="beyond the end 0"):
            until(harness, lambda: bool(reader.poll(10)), "the error")

    def test_a_topic_with_other_partitions_than_expected_is_refused(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=2)
        with pytest.raises(IllegalState, match="has 2 partitions, this project expects 3"):
            harness.reader({topic: 3})

    def test_a_topic_that_is_not_there_is_refused(self, harness: LogHarness) -> None:
        with pytest.raises(EnvironmentMissing, match="nowhere"):
            harness.reader({"nowhere": 1})

    def test_close_twice_is_fine(self, harness: LogHarness) -> None:
        reader = harness.reader({harness.topic(): 1})
        reader.close()
        reader.close()


class WriterContract:
    """EventWriter."""

    def test_an_acknowledged_record_knows_where_it_lies(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=2)
        writer = harness.writer()
        placed = [writer.send(message(topic, str(i), partition=1)).result(LIMIT_S) for i in range(2)]
        assert [(p.partition, p.offset) for p in placed] == [(1, 0), (1, 1)]
        assert writer.in_flight_bytes() == 0

    def test_a_record_no_setting_lets_pass_is_refused_at_once(self, harness: LogHarness) -> None:
        topic = harness.topic()
        big = Message(topic=topic, key=b"run/p0/e0/a0", value=bytes(17 * 1024 * 1024), partition=0)
        with pytest.raises(MessageTooLarge, match=r"run/p0/e0/a0.*17825804 bytes"):
            harness.writer().send(big)
        assert harness.writer().in_flight_bytes() == 0

    def test_a_record_the_topic_refuses_fails_alone(self, harness: LogHarness) -> None:
        topic = harness.topic(max_message_bytes=20_000)
        writer = harness.writer()
        noise = b"".join(i.to_bytes(4, "little") for i in range(1, 2_000_000, 131))  # compresses badly
        big = writer.send(Message(topic=topic, key=b"big", value=noise, partition=0))
        small = writer.send(message(topic, "small"))
        with pytest.raises(MessageTooLarge, match="big"):
            big.result(LIMIT_S)
        small.result(LIMIT_S)
        writer.send(message(topic, "later")).result(LIMIT_S)
        assert texts(read_to_end(harness, harness.reader({topic: 1}))) == ["small", "later"]

    def test_bytes_in_flight_are_bounded_and_freed_by_acknowledgements(self, harness: LogHarness) -> None:
        topic = harness.topic()
        writer = harness.writer(in_flight_bytes=2_500)
        writer.send(message(topic, "x")).result(LIMIT_S)
        harness.freeze()
        try:
            sent = [writer.send(message(topic, "y" * 1_000)) for _ in range(2)]
            with pytest.raises(BudgetExhausted):
                writer.send(message(topic, "z" * 1_000))
            assert writer.in_flight_bytes() == 2_002
            assert not sent[0].done()
            with pytest.raises(LogUnavailable):
                sent[0].result(0.01)
        finally:
            harness.thaw()
        for delivery in sent:
            delivery.result(LIMIT_S)
        assert writer.in_flight_bytes() == 0
        assert len(read_to_end(harness, harness.reader({topic: 1}))) == 3

    def test_close_counts_what_was_not_delivered(self, harness: LogHarness) -> None:
        topic = harness.topic()
        writer = harness.writer()
        writer.send(message(topic, "x")).result(LIMIT_S)
        harness.freeze()
        try:
            for _ in range(3):
                writer.send(message(topic, "y"))
            assert writer.close(0.2) == 3
            assert writer.close(0.2) == 0
        finally:
            harness.thaw()

    def test_a_closed_writer_takes_nothing(self, harness: LogHarness) -> None:
        topic = harness.topic()
        writer = harness.writer()
        assert writer.close(LIMIT_S) == 0
        with pytest.raises(LogUnavailable, match="closed"):
            writer.send(message(topic, "x"))


class TransactionContract:
    """TransactionalWriter, and what readers see of it."""

    def test_all_messages_and_offsets_commit_together(self, harness: LogHarness) -> None:
        one, two = harness.topic(partitions=2), harness.topic()
        writer = harness.transactional_writer(harness.name("t"))
        writer.init()
        messages = [message(one, "a", partition=1), message(two, "b"), message(one, "c", partition=1)]
        placed = writer.commit(messages, group=harness.name("g"), offsets={(one, 0): 42, (one, 1): 7})
        assert [(p.partition, p.offset) for p in placed] == [(1, 0), (0, 0), (1, 1)]
        assert sorted(texts(read_to_end(harness, harness.reader({one: 2, two: 1})))) == ["a", "b", "c"]
        until(harness, lambda: harness.committed(harness.name("g")) == {(one, 0): 42, (one, 1): 7}, "the offsets")

    def test_positions_step_over_markers_to_the_end(self, harness: LogHarness) -> None:
        topic = harness.topic()
        writer = harness.transactional_writer(harness.name("t"))
        writer.init()
        for text in ("a", "b"):
            writer.commit([message(topic, text)])
        reader = harness.reader({topic: 1})
        records = read_to_end(harness, reader)
        assert [(r.offset, r.value) for r in records] == [(0, b"a"), (2, b"b")]
        assert reader.positions() == reader.end_offsets() == reader.high_watermarks() == {(topic, 0): 4}

    def test_an_open_transaction_hides_what_lies_behind_it(self, harness: LogHarness) -> None:
        topic = harness.topic()
        write(harness, message(topic, "before"))
        harness.hold_open(harness.name("t"), [message(topic, "open")])
        write(harness, message(topic, "behind"))
        reader = harness.reader({topic: 1})
        assert texts(read_to_end(harness, reader)) == ["before"]
        assert reader.end_offsets() == {(topic, 0): 1}
        assert reader.high_watermarks() == {(topic, 0): 3}

    def test_init_ends_a_hanging_transaction_and_its_records_are_never_seen(self, harness: LogHarness) -> None:
        topic = harness.topic()
        harness.hold_open(harness.name("t"), [message(topic, "open"), message(topic, "too")])
        write(harness, message(topic, "behind"))
        writer = harness.transactional_writer(harness.name("t"))
        writer.init()
        writer.commit([message(topic, "again")])
        reader = harness.reader({topic: 1})
        assert texts(read_to_end(harness, reader)) == ["behind", "again"]
        assert reader.positions() == reader.high_watermarks()

    def test_a_lone_abort_marker_moves_the_position(self, harness: LogHarness) -> None:
        topic = harness.topic()
        reader = harness.reader({topic: 1})
        harness.hold_open(harness.name("t"), [message(topic, "open")])
        harness.transactional_writer(harness.name("t")).init()
        until(harness, lambda: reader.end_offsets()[topic, 0] == 2, "the abort marker")
        assert read_to_end(harness, reader) == []
        assert reader.positions() == {(topic, 0): 2}

    def test_an_older_writer_is_fenced_for_good(self, harness: LogHarness) -> None:
        topic = harness.topic()
        old, new = (harness.transactional_writer(harness.name("t")) for _ in range(2))
        old.init()
        old.commit([message(topic, "old")])
        new.init()
        with pytest.raises(Fenced, match="stop for good"):
            old.commit([message(topic, "zombie")], group=harness.name("g"), offsets={(topic, 0): 99})
        with pytest.raises(Fenced):
            old.commit([message(topic, "zombie")])
        with pytest.raises(Fenced):
            old.init()
        new.commit([message(topic, "new")])
        assert texts(read_to_end(harness, harness.reader({topic: 1}))) == ["old", "new"]
        assert harness.committed(harness.name("g")) == {}

    def test_nothing_is_committed_before_init(self, harness: LogHarness) -> None:
        topic = harness.topic()
        with pytest.raises(TransactionFailed, match="call init first"):
            harness.transactional_writer(harness.name("t")).commit([message(topic, "x")])

    def test_an_oversize_message_leaves_nothing_behind_and_the_writer_usable(self, harness: LogHarness) -> None:
        topic, strict = harness.topic(), harness.topic(max_message_bytes=20_000)
        writer = harness.transactional_writer(harness.name("t"))
        writer.init()
        noise = b"".join(i.to_bytes(4, "little") for i in range(1, 2_000_000, 131))
        for value, where in ((bytes(17 * 1024 * 1024), topic), (noise, strict)):
            with pytest.raises(MessageTooLarge, match="nothing was written"):
                writer.commit([message(topic, "a"), Message(topic=where, key=b"k", value=value, partition=0)])
        writer.commit([message(topic, "fine")])
        assert texts(read_to_end(harness, harness.reader({topic: 1, strict: 1}))) == ["fine"]

    def test_a_mistake_of_the_caller_leaves_no_transaction_open(self, harness: LogHarness) -> None:
        topic = harness.topic()
        writer = harness.transactional_writer(harness.name("t"))
        writer.init()
        with pytest.raises(ValueError, match="go together"):
            writer.commit([message(topic, "x")], group="g")
        with pytest.raises((ValueError, EnvironmentMissing), match=r"[Pp]artition"):
            writer.commit([message(topic, "x"), message(topic, "y", partition=9)])
        writer.init()
        writer.commit([message(topic, "z")])
        assert texts(read_to_end(harness, harness.reader({topic: 1}))) == ["z"]

    def test_offsets_alone_commit(self, harness: LogHarness) -> None:
        topic = harness.topic()
        writer = harness.transactional_writer(harness.name("t"))
        writer.init()
        assert writer.commit([], group=harness.name("g"), offsets={(topic, 0): 5}) == []
        # The commit is decided when it returns; the broker writes its marker into the offsets topic a moment later.
        until(harness, lambda: harness.committed(harness.name("g")) == {(topic, 0): 5}, "the offsets")


class AdminContract:
    """LogAdmin."""

    def test_the_registry_decides_names_and_partitions(self, harness: LogHarness) -> None:
        admin, run = harness.admin(), harness.name("run")
        admin.create_topics(run)
        admin.create_topics(run)
        assert {f"{run}.{name}" for name in TopicName} <= admin.existing_topics()
        harness.reader({f"{run}.{name}": spec.partitions for name, spec in TOPICS.items()}).close()

    def test_an_existing_topic_with_other_partitions_is_refused(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=3)
        run = topic.rpartition(".")[0]
        assert topic == f"{run}.policy"
        with pytest.raises(IllegalState, match=r"policy has 3 partitions, this project expects 1"):
            harness.admin().create_topics(run)
