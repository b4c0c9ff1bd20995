"""Reads whole topics from Kafka at explicit offsets: one thread with long polls fills a bounded queue.

Guarantees: committed records only, raw bytes only; positions advance only with what the service took, and
step over markers; a position outside the log is an IllegalState with the missing range, never a jump. A client that
reads nothing although there is something to read is replaced: its silence is no end of the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from kafka import KafkaConsumer, TopicPartition
from kafka import errors as kafka_errors

from infra.kafka_admin import KafkaLogAdmin, KafkaOffsets, check_partitions
from infra.kafka_clients import KafkaSettings, build, consumer_config, explain
from infra.kafka_silence import Silence
from infra.logs import event
from infra.ports import Record
from infra.record_queue import Place, RecordQueue
from infra.wakeup import Wakeup
from schemas.errors import DriftlogError, IllegalState, LogUnavailable, RangeMissing

_LOG = logging.getLogger(__name__)
POLL_MS = 100
"""How long the thread stays in one poll: the bound on noticing a seek, a close, or a lone marker."""
POLL_RECORDS = 64
"""Records of one poll: what may lie in memory beside the queue."""
BUSY_S = 0.02
"""How long the thread asks for nothing more while the service has not taken what is queued. Nobody waits for what comes
meanwhile, and one answer of the broker with all of it costs a fraction of one for each record. No longer than this, so
that the queue fills up behind a service that is away for seconds."""
LOOK_S = 10.0
"""Between two looks at the ends of the topics while nothing comes."""


class KafkaEventReader:
    """The EventReader port."""

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Mapping[str, int],
        start: Mapping[Place, int] | Literal["beginning", "end"],
        wakeup: Wakeup | None = None,
        prepare: Callable[[Record], Record] | None = None,
    ) -> None:
        """`topics`: name -> number of partitions (checked). Partitions not named in `start` begin at the beginning.

        `prepare`: what the thread makes of each record before it is queued, so that the service need not (decoding);
        what it raises is raised by the service's next `poll`."""
        self._settings = settings
        self._prepare = prepare
        self._places = [(name, partition) for name, count in topics.items() for partition in range(count)]
        _check_topics(settings, topics)
        self._offsets = KafkaOffsets(settings)
        ask = self._offsets.stable_ends if start == "end" else self._offsets.beginnings
        first = ask(self._places)
        named = {} if isinstance(start, str) else start
        self._queue = RecordQueue(
            max_records=settings.reader_queue_records,
            max_bytes=settings.reader_queue_bytes,
            wakeup=wakeup or Wakeup(),
        )
        self._commands = threading.Lock()
        self._seeks: dict[Place, tuple[int, int]] = {}
        """place -> (epoch, offset) that the thread has not applied yet"""
        for place in self._places:
            offset = named.get(place, first[place])
            self._seeks[place] = (self._queue.start_at(place, offset), offset)
        self._epochs: dict[Place, int] = {}
        """what the thread reads under; its own"""
        self._stopping = threading.Event()
        self._silence = Silence(LOOK_S)
        self._consumer = self._new_consumer()
        self._thread = threading.Thread(target=self._run, name=f"reader-{','.join(topics)}", daemon=True)
        self._thread.start()

    def poll(self, max_records: int) -> Sequence[Record]:
        """What has arrived; never waits. Raises what stopped the reader."""
        return self._queue.take(max_records)

    def positions(self) -> Mapping[Place, int]:
        """Per partition: every committed record below was handed out."""
        return self._queue.positions()

    @property
    def is_closed(self) -> bool:
        """`close` was called."""
        return self._stopping.is_set()

    def end_offsets(self) -> Mapping[Place, int]:
        """Last stable offsets, asked now."""
        return self._offsets.stable_ends(self._places)

    def high_watermarks(self) -> Mapping[Place, int]:
        """Ends including open transactions, asked now."""
        return self._offsets.high_watermarks(self._places)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on there; what is queued of the partition is forgotten."""
        place = (topic, partition)
        if place not in self._places:
            raise ValueError(f"seek: {topic}[{partition}] is not read here")
        with self._commands:
            self._seeks[place] = (self._queue.start_at(place, offset), offset)

    def close(self) -> None:
        """Stop the thread and leave, in bounded time. Safe to call twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(self._settings.request_timeout_s)
        self._offsets.close()

    def _new_consumer(self) -> KafkaConsumer:
        consumer = build(KafkaConsumer, self._settings, consumer_config(self._settings))
        consumer.assign([TopicPartition(*place) for place in self._places])
        return consumer

    # ------------------------------------------------------------ the reader thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._apply_seeks()
                if self._queue.failed():
                    self._stopping.wait(POLL_MS / 1000)
                    continue
                self._queue.wait_until_taken(BUSY_S)
                room = self._queue.wait_for_room(POLL_MS / 1000)
                if room:
                    self._read(min(room, POLL_RECORDS))
        except Exception as error:  # noqa: BLE001  the boundary of the thread: the service raises it on its next poll
            self._queue.fail(error)
        finally:
            self._consumer.close(autocommit=False, timeout_ms=1_000)

    def _apply_seeks(self) -> None:
        with self._commands:
            seeks, self._seeks = self._seeks, {}
        for place, (epoch, offset) in seeks.items():
            self._consumer.seek(TopicPartition(*place), offset)
            self._epochs[place] = epoch

    def _read(self, max_records: int) -> None:
        try:
            polled = self._consumer.poll(timeout_ms=POLL_MS, max_records=max_records)
        except kafka_errors.KafkaError as error:
            explained = reading_error(error, self._offsets)
            if explained is not None:
                self._queue.fail(explained)
            self._stopping.wait(POLL_MS / 1000)
            return
        if polled:
            self._silence.heard()
        elif self._silence.is_due(time.monotonic()):
            self._look()
        # Without records, markers alone may have moved any position.
        for tp in polled or [TopicPartition(*place) for place in self._places]:
            place = (tp.topic, tp.partition)
            records = [to_record(fetched) for fetched in polled.get(tp, ())]
            if self._prepare is not None:
                records = [self._prepare(record) for record in records]
            position = self._consumer.position(tp, timeout_ms=0)
            if position is None:  # a record that was polled is queued whatever the client says of its position
                position = records[-1].offset + 1 if records else 0
            self._queue.put(place, self._epochs[place], records, position)

    def _look(self) -> None:
        """Replace a client that reads nothing although there is something to read."""
        try:
            ends = self._offsets.stable_ends(self._places)
        except LogUnavailable:
            self._silence.heard()  # the broker is away: nobody can read
            return
        positions = {place: self._consumer.position(TopicPartition(*place), timeout_ms=0) for place in self._places}
        if None in positions.values():
            return
        deaf_to = self._silence.look(positions, ends, time.monotonic())
        if deaf_to is None:
            return
        event(
            _LOG, "reader_replaced", level=logging.WARNING, topic=deaf_to[0], partition=deaf_to[1],
            offset=positions[deaf_to], reason="nothing was read although committed records lie there",
        )  # fmt: skip
        try:
            consumer = self._new_consumer()
        except LogUnavailable:
            return  # the next look finds the same
        for place, position in positions.items():
            consumer.seek(TopicPartition(*place), position)
        old, self._consumer = self._consumer, consumer
        self._silence.replaced()
        old.close(autocommit=False, timeout_ms=1_000)


def to_record(fetched: Any) -> Record:
    """A consumer's record as the port has it."""
    return Record(
        topic=fetched.topic,
        partition=fetched.partition,
        offset=fetched.offset,
        key=fetched.key,
        value=fetched.value,
        headers=tuple(fetched.headers),
        timestamp_ms=fetched.timestamp,
    )


def reading_error(error: kafka_errors.KafkaError, offsets: KafkaOffsets) -> DriftlogError | None:
    """What the service must hear, at its next poll. None: it passes by itself, and is left to the client."""
    if error.retriable:
        event(_LOG, "poll_failed", error=type(error).__name__)
        return None
    return _explained(error, offsets)


def _explained(error: Exception, offsets: KafkaOffsets) -> DriftlogError | None:
    """Why a partition cannot be read on: the missing range for a position outside the log. None: ask again."""
    if isinstance(error, kafka_errors.OffsetOutOfRangeError) and error.args and isinstance(error.args[0], dict):
        wanted = {(tp.topic, tp.partition): offset for tp, offset in error.args[0].items()}
        try:
            first, end = offsets.beginnings(wanted), offsets.high_watermarks(wanted)
        except LogUnavailable:
            return None
        return missing_range([(place, offset, first[place], end[place]) for place, offset in wanted.items()])
    if isinstance(error, kafka_errors.CorruptRecordError):
        return IllegalState(f"the log holds a batch that fails its checksum: {error}; nothing behind it can be trusted")
    return explain(error, "reading")


def missing_range(wanted: Iterable[tuple[Place, int, int, int]]) -> IllegalState:
    """The error for positions outside the log: (place, wanted, first, end) each. RangeMissing when all lie below it."""
    words: list[str] = []
    lost: dict[tuple[str, int], int] = {}
    for (topic, partition), offset, first, end in wanted:
        if offset < first:
            lost[topic, partition] = first
            words.append(
                f"{topic}[{partition}]: records {offset}-{first - 1} are no longer in the log (it starts at {first}): "
                f"{first - offset} lost to retention"
            )
        else:
            words.append(f"{topic}[{partition}]: position {offset} is beyond the end {end}: was the topic made anew?")
    said = "; ".join(words) + ". Nothing is skipped by itself: seek to a retained offset if that is meant"
    return RangeMissing(said, lost) if len(lost) == len(words) else IllegalState(said)


def _check_topics(settings: KafkaSettings, topics: Mapping[str, int]) -> None:
    """A consumer on a topic that is missing, or that it may not read, is silent: ask an admin before."""
    admin = KafkaLogAdmin(settings)
    try:
        check_partitions(admin.partition_counts(topics), dict(topics))
    finally:
        admin.close()
