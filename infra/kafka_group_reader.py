"""A member of a Kafka consumer group on one topic: cooperative-sticky, with metadata beside each offset.

Guarantees: a partition is handed out from its committed offset (or the start), never from a remembered
position; what is queued of a revoked partition is dropped; only owned partitions are committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kafka import ConsumerRebalanceListener, KafkaConsumer, TopicPartition
from kafka import errors as kafka_errors
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.structs import OffsetAndMetadata

from infra.kafka_admin import KafkaOffsets
from infra.kafka_clients import KafkaSettings, build, consumer_config
from infra.kafka_reader import LOOK_S, POLL_MS, POLL_RECORDS, reading_error, to_record
from infra.kafka_silence import Silence
from infra.logs import event
from infra.ports import Record
from infra.record_queue import RecordQueue
from infra.wakeup import Wakeup
from schemas.errors import LogUnavailable, RangeMissing

_LOG = logging.getLogger(__name__)
_COMMIT_LIMIT_S = 2.0
JOIN_LIMIT_S = 60.0
"""a rebalance lasts 30 s at most: see max_poll_interval_ms"""
MAX_METADATA_BYTES = 4096
"""the broker's offset.metadata.max.bytes by default; above it every commit fails, for ever and unseen"""
Committed = tuple[int, str]


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Runs on the client's I/O loop: it may only note what happened."""

    def __init__(self, reader: KafkaGroupReader) -> None:
        self._reader = reader

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._reader._note_assigned({tp.partition for tp in assigned})

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._reader._note_revoked({tp.partition for tp in revoked})

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
        self._reader._note_revoked({tp.partition for tp in lost})


class KafkaGroupReader:
    """The GroupReader port. The reader thread keeps the membership alive however long the service's step takes."""

    def __init__(self, settings: KafkaSettings, group: str, topic: str, wakeup: Wakeup | None = None) -> None:
        self._settings = settings
        self._topic = topic
        self._wakeup = wakeup or Wakeup()
        self._queue = RecordQueue(
            max_records=settings.reader_queue_records, max_bytes=settings.reader_queue_bytes, wakeup=self._wakeup
        )
        self._lock = threading.Lock()
        self._wanted = True
        """the service wants to be a member"""
        self._fresh: set[int] = set()
        """assigned, committed offset not read yet"""
        self._owned: dict[int, tuple[int, Committed | None]] = {}
        """partition -> (queue epoch, committed at assignment)"""
        self._pending: dict[int, Committed] = {}
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._offsets = KafkaOffsets(settings)
        self._silence = Silence(LOOK_S)
        self._joined_s = time.monotonic()
        """when it was a member of a settled group last, or could not have been"""
        self._config = consumer_config(settings) | {
            "group_id": group,
            "partition_assignment_strategy": (CooperativeStickyAssignor(),),
            "session_timeout_ms": int(settings.session_timeout_s * 1000),
            "heartbeat_interval_ms": int(settings.heartbeat_interval_s * 1000),
            # The broker also waits this long for members to rejoin; ours poll every 100 ms.
            "max_poll_interval_ms": 30_000,
        }
        self._consumer = build(KafkaConsumer, settings, self._config)
        self._member = False
        self._thread = threading.Thread(target=self._run, name=f"group-reader-{group}", daemon=True)
        self._thread.start()

    def poll(self, max_records: int) -> Sequence[Record]:
        """Records of owned partitions; never waits. Raises what stopped the reader."""
        return self._queue.take(max_records)

    def positions(self) -> Mapping[tuple[str, int], int]:
        """Per owned partition: every record below was handed out."""
        return self._queue.positions()

    @property
    def is_closed(self) -> bool:
        """`close` was called."""
        return self._stopping.is_set()

    def assignment(self) -> frozenset[int]:
        """Partitions owned now."""
        with self._lock:
            return frozenset(self._owned)

    def committed(self, partition: int) -> Committed | None:
        """What the group had committed when the partition was assigned."""
        with self._lock:
            owned = self._owned.get(partition)
            return owned[1] if owned is not None else None

    def commit(self, offsets: Mapping[int, Committed]) -> None:
        """Queue a commit; unowned partitions are left out. ValueError: metadata that the broker would never take."""
        for partition, (_, metadata) in offsets.items():
            if len(metadata.encode()) > MAX_METADATA_BYTES:
                raise ValueError(
                    f"commit of {self._topic}[{partition}]: {len(metadata.encode())} bytes of metadata, the broker "
                    f"takes {MAX_METADATA_BYTES}: commit a higher offset or list fewer"
                )
        with self._lock:
            self._pending.update({p: value for p, value in offsets.items() if p in self._owned})
        self._changed.set()

    def leave(self) -> None:
        """Give the partitions back; what was committed before still is."""
        with self._lock:
            self._wanted = False
            self._forget(set(self._owned))
        self._changed.set()

    def rejoin(self) -> None:
        """Take part again."""
        with self._lock:
            self._wanted = True
        self._changed.set()

    def close(self) -> None:
        """Commit what is queued, leave the group, stop: in bounded time. Safe to call twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._changed.set()
        self._thread.join(_COMMIT_LIMIT_S + self._settings.request_timeout_s)
        self._offsets.close()

    # ------------------------------------------------------------ the client's I/O loop

    def _note_assigned(self, partitions: set[int]) -> None:
        with self._lock:
            self._fresh |= partitions

    def _note_revoked(self, partitions: set[int]) -> None:
        with self._lock:
            self._fresh -= partitions
            self._forget(partitions)
            for partition in partitions:
                self._pending.pop(partition, None)
        self._wakeup.ring()

    def _forget(self, partitions: set[int]) -> None:
        for partition in partitions:
            self._owned.pop(partition, None)
            self._queue.forget((self._topic, partition))

    # ------------------------------------------------------------ the reader thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._follow_wish()
                self._commit_pending()
                if not self._member or self._queue.failed():
                    self._changed.wait(POLL_MS / 1000)
                    self._changed.clear()
                    continue
                self._read()
        except Exception as error:  # noqa: BLE001  the boundary of the thread: the service raises it on its next poll
            self._queue.fail(error)
        finally:
            self._commit_pending()
            self._consumer.close(autocommit=False, timeout_ms=1_000)

    def _follow_wish(self) -> None:
        with self._lock:
            wanted = self._wanted
        if wanted and not self._member:
            self._consumer.subscribe([self._topic], listener=_Listener(self))
            self._joined_s = time.monotonic()
        elif self._member and not wanted:
            self._commit_pending()
            self._consumer.unsubscribe()
            with self._lock:
                self._fresh.clear()
                self._pending.clear()
        self._member = wanted

    def _commit_pending(self) -> None:
        """Between polls only: a rebalance completes inside `poll`, so what is owned here is still owned there."""
        held = {tp.partition for tp in self._consumer.assignment()} if self._member else set()
        with self._lock:
            batch = {p: value for p, value in self._pending.items() if p in held}
        if not batch:
            return
        offsets = {TopicPartition(self._topic, p): OffsetAndMetadata(o, m, -1) for p, (o, m) in batch.items()}
        try:
            self._consumer.commit(offsets, timeout_ms=int(_COMMIT_LIMIT_S * 1000))
        except kafka_errors.KafkaError as error:  # stays pending: the next round repeats it while we own it
            event(_LOG, "group_commit_failed", topic=self._topic, error=type(error).__name__)
            return
        with self._lock:
            for partition, value in batch.items():
                if self._pending.get(partition) == value:
                    del self._pending[partition]

    def _mend_join(self) -> None:
        """Ask for a join again that the client forgot.

        kafka-python 3.0.12: a join that was called for by new metadata and outlives one poll is never taken up again
        (joining itself makes `need_rejoin` false): the member would stand idle for ever, without heartbeats or an
        error. Between polls no join is under way unless it is still needed, so this pair of answers means just that.
        """
        coordinator = self._consumer._coordinator
        if coordinator.rejoining and not coordinator.need_rejoin():
            coordinator.request_rejoin()

    def _read(self) -> None:
        self._mend_join()
        room = self._queue.room()
        held = self._consumer.assignment()
        # A full queue must not stop the polls that carry the membership: only fetching pauses.
        if room:
            self._consumer.resume(*(held & self._consumer.paused()))
        else:
            self._consumer.pause(*held)
        try:
            polled = self._consumer.poll(timeout_ms=POLL_MS, max_records=min(room, POLL_RECORDS) or POLL_RECORDS)
        except kafka_errors.NoOffsetForPartitionError:
            polled = {}  # a new partition of a group without offsets: placed below
        except kafka_errors.KafkaError as error:
            explained = reading_error(error, self._offsets)
            if isinstance(explained, RangeMissing):
                polled = self._take_back(explained)
            else:
                if explained is not None:
                    self._queue.fail(explained)
                self._stopping.wait(POLL_MS / 1000)
                return
        with self._lock:
            owned = dict(self._owned)
        for tp, records in polled.items():
            if tp.partition in owned and tp in self._consumer.assignment():
                position = self._consumer.position(tp, timeout_ms=0)
                known = position if position is not None else records[-1].offset + 1
                self._queue.put((self._topic, tp.partition), owned[tp.partition][0], map(to_record, records), known)
        self._place_fresh()
        if polled or not room:
            self._silence.heard()
        self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        """Replace a client that waits for its group for ever, or reads nothing although there is something to read."""
        if self._consumer._coordinator.stable():
            self._joined_s = now_s
        waits = now_s - self._joined_s >= JOIN_LIMIT_S
        if not (waits or self._silence.is_due(now_s)):
            return
        with self._lock:
            places = [(self._topic, partition) for partition in self._owned]
        try:
            ends = self._offsets.stable_ends(places or [(self._topic, 0)])
        except LogUnavailable:  # the broker is away: nobody can join or read
            self._joined_s = now_s
            self._silence.heard()
            return
        positions = {
            place: self._consumer.position(TopicPartition(*place), timeout_ms=0)
            for place in places
            if TopicPartition(*place) in self._consumer.assignment()
        }
        deaf_to = self._silence.look(positions, ends, now_s)
        if waits:
            self._replace(f"no part in the group for {JOIN_LIMIT_S:.0f} s, though the broker answers")
        elif deaf_to is not None and self._replace(
            f"nothing was read of partition {deaf_to[1]} although committed records lie there"
        ):
            self._silence.replaced()

    def _replace(self, reason: str) -> bool:
        """A new client, as another member; the old one's partitions are taken up again from what is committed. False
        when there is none to be had now: the next look finds the same."""
        event(_LOG, "group_member_replaced", level=logging.WARNING, topic=self._topic, reason=reason)
        self._joined_s = time.monotonic()
        try:
            consumer = build(KafkaConsumer, self._settings, self._config)
        except LogUnavailable:
            return False
        old, self._consumer, self._member = self._consumer, consumer, False  # the next round subscribes
        with self._lock:
            self._forget(set(self._owned))
            self._fresh.clear()
            self._pending.clear()
        old.close(autocommit=False, timeout_ms=1_000)
        self._wakeup.ring()
        return True

    def _take_back(self, missing: RangeMissing) -> dict[TopicPartition, list[Any]]:
        """Retention overtook these partitions, or what is committed of them: they are placed anew, below."""
        with self._lock:
            partitions = {partition for _, partition in missing.first}
            self._forget(partitions)
            self._fresh |= partitions
        return {}

    def _place_fresh(self) -> None:
        """Put newly assigned partitions at their committed offset, read now: the last owner may have moved it."""
        with self._lock:
            fresh = sorted(self._fresh)
        if not fresh:
            return
        deadline_s = time.monotonic() + self._settings.request_timeout_s
        try:
            found: dict[int, Committed | None] = {}
            for partition in fresh:
                left_ms = max(1, int((deadline_s - time.monotonic()) * 1000))
                tp = TopicPartition(self._topic, partition)
                answer = self._consumer.committed(tp, metadata=True, timeout_ms=left_ms)
                found[partition] = None if answer is None else (answer.offset, answer.metadata or "")
            beginnings = self._offsets.beginnings([(self._topic, p) for p in fresh])
        except (kafka_errors.KafkaError, LogUnavailable) as error:
            event(_LOG, "group_offsets_unread", topic=self._topic, reason=str(error))
            return  # they stay fresh: the next round asks again
        for partition in fresh:
            self._start(partition, found[partition], beginnings.get((self._topic, partition), 0))
        self._wakeup.ring()

    def _start(self, partition: int, committed: Committed | None, beginning: int) -> None:
        offset = committed[0] if committed is not None else beginning
        if offset < beginning:
            # Never to the end: what is still there is read. Whoever waits for the lost ones has a time-out of his own.
            event(
                _LOG, "group_range_lost", level=logging.WARNING, topic=self._topic, partition=partition,
                first_offset=offset, last_offset=beginning - 1, reason="retention removed them before they were read",
            )  # fmt: skip
            offset, committed = beginning, None
        try:
            self._consumer.seek(TopicPartition(self._topic, partition), offset)
        except ValueError:
            return  # revoked meanwhile
        with self._lock:
            if partition in self._fresh and self._wanted:
                self._fresh.discard(partition)
                self._owned[partition] = (self._queue.start_at((self._topic, partition), offset), committed)
