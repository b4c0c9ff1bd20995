"""The reader of a run: what it hands out, where it stops, and that it never waits for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from consumers.offline.run_log import RunLog
from infra.ports import EventReader, Message, Record
from schemas import policy_events as ev
from schemas.errors import LogUnavailable
from schemas.ledger import LedgerEnded, Settled, StepCompleted
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName, topic
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN


class _SlowReader:
    """Hands out one record a poll, after two empty ones."""

    def __init__(self, inner: EventReader) -> None:
        self._inner = inner
        self._calls = 0

    def poll(self, max_records: int) -> Sequence[Record]:
        self._calls += 1
        return self._inner.poll(1) if self._calls % 3 == 0 else ()

    def positions(self) -> Mapping[tuple[str, int], int]:
        return self._inner.positions()

    def end_offsets(self) -> Mapping[tuple[str, int], int]:
        return self._inner.end_offsets()

    def high_watermarks(self) -> Mapping[tuple[str, int], int]:
        return self._inner.high_watermarks()

    def seek(self, topic: str, partition: int, offset: int) -> None:
        self._inner.seek(topic, partition, offset)

    def close(self) -> None:
        self._inner.close()


def test_every_topic_is_read_typed_and_whole(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    log = run.run_log()
    fold = PolicyFold()

    events = list(log.policy(fold))

    assert all(entry.is_legal and not entry.is_damaged for entry in events)
    assert (fold.live, fold.newest, fold.ended) == (3, 3, True)
    kinds = [type(t.control) for t in log.transactions()]
    assert kinds == [Settled, Settled, StepCompleted, StepCompleted, StepCompleted, LedgerEnded]
    assert len([entry for entry in log.requests() if entry.request is not None]) == 9
    entries = list(log.trajectories())
    assert [len(entry.rows) for entry in entries].count(2) == 7
    assert [str(entry.error)[:16] for entry in entries if entry.error] == ["no_schema_header"]
    assert len(list(log.heartbeats())) == 6
    assert [(letter.topic, letter.code) for letter in log.dead_letters()] == [("tiny.trajectories", "no_schema_header")]


def test_a_reader_that_hands_out_little_at_a_time_gives_the_same(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    slow = RunLog(RUN, lambda topics: _SlowReader(run.open_reader(topics)), clock=run.clock, pause=run.clock.advance)

    assert list(slow.transactions()) == list(run.run_log().transactions())


def test_what_is_written_later_is_not_seen(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    log = run.run_log()
    before = len(list(log.policy()))

    run.append_event(ev.WorkerLeft(run=RUN, at_us=1, worker="g0", incarnation="i1", reason="late"))

    assert len(list(log.policy())) == before
    assert len(list(run.run_log().policy())) == before + 1


def test_reading_can_begin_at_an_offset(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    log = run.run_log()
    every = list(log.trajectories())
    last = max(entry.offset for entry in every if entry.partition == every[0].partition)

    tail = [e for e in log.trajectories(start={every[0].partition: last}) if e.partition == every[0].partition]

    assert [entry.offset for entry in tail] == [last]


def test_a_log_that_gives_nothing_is_an_error_within_the_limit(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    log = run.run_log()
    run.log.available = False

    with pytest.raises(LogUnavailable, match=r"nothing was read for 60 s: .*tiny.ledger"):
        list(log.transactions())


def test_records_of_a_transaction_that_never_commits_are_waited_for_and_not_seen(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    before = len(list(run.run_log().policy()))
    open_transaction = run.log.begin("zombie", run.log.take_over("zombie"))
    name = topic(RUN, TopicName.POLICY)
    run.log.append(Message(topic=name, key=b"x", value=b"never committed"), open_transaction)
    log = run.run_log()

    assert log.ends[name, 0] == run.log.partition(name, 0).end
    assert len(list(log.policy())) == before


def test_a_control_record_that_cannot_be_read_ends_its_transaction(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    record = run.records(TopicName.LEDGER)[0]
    Forge(run).rewrite(record, value=b"{}")

    transactions = list(run.run_log().transactions())

    assert transactions[0].control is None
    assert [problem.offset for problem in transactions[0].problems] == [record.offset, record.offset]
    assert len(transactions) == 6


def test_broken_heartbeats_are_left_out(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    Forge(run).rewrite(run.records(TopicName.WORKERS)[0], value=b"?")

    assert len(list(run.run_log().heartbeats())) == 5
