"""The queue between a reader thread and its service."""

from __future__ import annotations

import threading

import pytest

from infra.ports import Record
from infra.record_queue import RecordQueue
from infra.wakeup import Wakeup
from schemas.errors import IllegalState

A, B = ("t", 0), ("t", 1)


def record(offset: int, place: tuple[str, int] = A, size: int = 10) -> Record:
    return Record(
        topic=place[0], partition=place[1], offset=offset, key=None, value=bytes(size), headers=(), timestamp_ms=0
    )


def queue(max_records: int = 100, max_bytes: int = 1_000, wakeup: Wakeup | None = None) -> RecordQueue:
    return RecordQueue(max_records=max_records, max_bytes=max_bytes, wakeup=wakeup or Wakeup())


def offsets(records: list[Record]) -> list[int]:
    return [one.offset for one in records]


def test_a_position_arrives_only_behind_the_records_below_it() -> None:
    q = queue()
    epoch = q.start_at(A, 5)
    q.put(A, epoch, [record(5), record(6)], position=9)
    assert q.positions() == {A: 5}
    assert offsets(q.take(1)) == [5]
    assert q.positions() == {A: 6}
    assert offsets(q.take(1)) == [6]
    assert q.positions() == {A: 9}


def test_markers_alone_move_the_position() -> None:
    q = queue()
    q.put(A, q.start_at(A, 0), [], position=3)
    assert q.take(10) == []
    assert q.positions() == {A: 3}


def test_an_unmoved_position_queues_nothing_and_rings_nobody() -> None:
    bell = Wakeup()
    q = queue(wakeup=bell)
    epoch = q.start_at(A, 4)
    q.put(A, epoch, [], position=4)
    assert not bell.wait(0)
    q.put(A, epoch, [record(4)], position=5)
    assert bell.wait(0)
    assert not bell.wait(0)


def test_starting_a_partition_anew_forgets_its_records_only() -> None:
    q = queue()
    old = q.start_at(A, 0)
    q.put(A, old, [record(0)], position=1)
    q.put(B, q.start_at(B, 0), [record(0, B)], position=1)
    q.start_at(A, 7)
    q.put(A, old, [record(1)], position=2)
    assert [(r.partition, r.offset) for r in q.take(10)] == [(1, 0)]
    assert q.positions() == {A: 7, B: 1}


def test_a_forgotten_partition_takes_nothing_more() -> None:
    q = queue()
    epoch = q.start_at(A, 0)
    q.put(A, epoch, [record(0)], position=1)
    q.forget(A)
    q.put(A, epoch, [record(1)], position=2)
    assert q.take(10) == []
    assert q.positions() == {}
    assert q.epoch(A) is None
    assert q.snapshot() == {"records": 0, "bytes": 0}


def test_room_is_bounded_by_records() -> None:
    q = queue(max_records=3)
    epoch = q.start_at(A, 0)
    q.put(A, epoch, [record(0), record(1)], position=2)
    assert q.room() == 1
    q.put(A, epoch, [record(2)], position=3)
    assert q.wait_for_room(0) == 0
    q.take(2)
    assert q.room() == 2


def test_room_is_bounded_by_bytes() -> None:
    q = queue(max_bytes=25)
    epoch = q.start_at(A, 0)
    q.put(A, epoch, [record(0), record(1)], position=2)
    assert q.room() > 0
    q.put(A, epoch, [record(2)], position=3)
    assert q.room() == 0
    q.take(1)
    assert q.room() > 0


def test_a_reader_that_waits_for_room_goes_on_when_the_service_takes() -> None:
    q = queue(max_records=1)
    q.put(A, q.start_at(A, 0), [record(0)], position=1)
    rooms: list[int] = []
    thread = threading.Thread(target=lambda: rooms.append(q.wait_for_room(10)))
    thread.start()
    q.take(1)
    thread.join(10)
    assert rooms == [1]


def test_all_is_taken_when_no_record_is_left_whatever_positions_are() -> None:
    q = queue()
    epoch = q.start_at(A, 0)
    q.put(A, epoch, [], position=4)
    assert q.wait_until_taken(0)
    q.put(A, epoch, [record(4), record(5)], position=6)
    q.take(1)
    assert not q.wait_until_taken(0)
    q.take(1)
    assert q.wait_until_taken(0)


@pytest.mark.parametrize("how", ["take", "start_at", "forget"])
def test_a_reader_that_waits_until_all_is_taken_goes_on_at_once(how: str) -> None:
    q = queue()
    q.put(A, q.start_at(A, 0), [record(0)], position=1)
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(q.wait_until_taken(10)))
    thread.start()
    {"take": lambda: q.take(1), "start_at": lambda: q.start_at(A, 0), "forget": lambda: q.forget(A)}[how]()
    thread.join(5)
    assert taken == [True]


def test_an_error_is_raised_at_every_take_until_a_partition_starts_anew() -> None:
    bell = Wakeup()
    q = queue(wakeup=bell)
    q.put(A, q.start_at(A, 0), [record(0)], position=1)
    q.fail(IllegalState("gone"))
    assert bell.wait(0)
    for _ in range(2):
        with pytest.raises(IllegalState, match="gone"):
            q.take(1)
    assert q.failed()
    q.start_at(A, 3)
    assert not q.failed()
    assert q.take(1) == []
