"""The idempotent writer: bytes in flight are bounded, every record's fate is known, a broken client is rebuilt.

A batch that expired or was refused poisons the client (it never sends again), so after any failed delivery the
client is replaced in the background; lost records are reported as DeliveryFailed, never sent a second time.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from kafka import KafkaProducer
from kafka import errors as kafka_errors
from kafka.codec import zstd_encode

from infra.kafka_admin import TopicLimits
from infra.kafka_clients import KafkaSettings, abandon, build, explain, is_refusal, producer_config
from infra.logs import event
from infra.ports import Message, Placed
from infra.retry import retrying
from schemas.errors import (
    BudgetExhausted,
    DeliveryFailed,
    EnvironmentMissing,
    LogUnavailable,
    MessageTooLarge,
)
from schemas.topics import MAX_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)
_BATCH_OVERHEAD_BYTES = 128
"""what a batch of one record adds to its key, value and headers, generously"""
_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)


def message_bytes(message: Message) -> int:
    """What a message weighs in the in-flight budget."""
    size = len(message.key) + len(message.value or b"")
    return size + sum(len(name) + len(value) for name, value in message.headers)


def describe(message: Message) -> str:
    """Which record, for an error message: topic, key and size."""
    return f"{message.topic} key {message.key.decode('utf-8', 'replace')!r} ({message_bytes(message)} bytes)"


def _compressed_bytes(message: Message) -> int:
    """About what the broker will weigh. Only asked for records above the topic's limit before compression."""
    parts = [message.key, message.value or b"", *(name.encode() + value for name, value in message.headers)]
    return len(zstd_encode(b"".join(parts))) + _BATCH_OVERHEAD_BYTES


class KafkaDelivery:
    """The Delivery port."""

    __slots__ = ("_future", "_may_be_too_large", "_what")

    def __init__(self, future: Any, what: str, *, may_be_too_large: bool) -> None:
        self._future = future
        self._what = what
        self._may_be_too_large = may_be_too_large
        """False: the broker refused another record, and the client failed this one with it"""

    def done(self) -> bool:
        """Acknowledged or failed."""
        return bool(self._future.is_done)

    def result(self, timeout_s: float) -> Placed:
        """Where it lies, after at most timeout_s."""
        try:
            metadata = self._future.get(timeout=timeout_s)
        except kafka_errors.KafkaError as error:
            if not self._future.is_done:
                raise LogUnavailable(f"{self._what}: not acknowledged within {timeout_s:g} s") from error
            if isinstance(error, _TOO_LARGE) and self._may_be_too_large:
                raise _too_large(self._what) from error
            if is_refusal(error):
                raise explain(error, self._what) from error
            raise DeliveryFailed(f"{self._what}: {error}") from error
        return Placed(partition=metadata.partition, offset=metadata.offset)


class RefusedDelivery:
    """A record that was never handed to the client: the topic would have refused it."""

    def __init__(self, error: MessageTooLarge) -> None:
        self._error = error

    def done(self) -> bool:
        """From the start."""
        return True

    def result(self, timeout_s: float) -> Placed:
        """Never."""
        raise self._error


def _too_large(what: str) -> MessageTooLarge:
    return MessageTooLarge(f"{what}: larger than the topic's max.message.bytes; make groups or completions smaller")


class KafkaEventWriter:
    """The EventWriter port. `send` raises LogUnavailable (nothing queued) while a broken client is being replaced."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._in_flight_bytes = 0
        self._outstanding = 0
        self._failed = 0
        self._rebuilding = False
        self._closing = threading.Event()
        self._limits = TopicLimits(settings)
        self._producer = self._build()

    def send(self, message: Message) -> KafkaDelivery | RefusedDelivery:
        """Queue one record within the budget."""
        size = message_bytes(message)
        limit = self._limits.limit(message.topic)
        may_be_too_large = size + _BATCH_OVERHEAD_BYTES > limit
        if may_be_too_large and size <= MAX_MESSAGE_BYTES and _compressed_bytes(message) > limit:
            return RefusedDelivery(_too_large(describe(message)))
        producer = self._reserve(message, size)
        try:
            future = producer.send(
                message.topic, message.value, message.key, list(message.headers), partition=message.partition
            )
        except _TOO_LARGE as error:
            self._release(size)
            raise MessageTooLarge(f"{describe(message)}: no setting lets it pass") from error
        except kafka_errors.KafkaError as error:
            self._release(size)
            if isinstance(error, kafka_errors.KafkaTimeoutError):
                raise LogUnavailable(f"{describe(message)}: topic unknown or broker away: {error}") from error
            self._replace(producer, error)
            raise LogUnavailable(f"{describe(message)}: the client is being replaced: {error}") from error
        except BaseException:
            self._release(size)
            raise
        future.add_callback(lambda _: self._release(size))
        future.add_errback(lambda error: self._on_failure(producer, size, error))
        return KafkaDelivery(future, describe(message), may_be_too_large=may_be_too_large)

    def in_flight_bytes(self) -> int:
        """Bytes sent and not acknowledged."""
        with self._changed:
            return self._in_flight_bytes

    def close(self, timeout_s: float) -> int:
        """Wait for deliveries at most that long; how many records were not delivered."""
        if self._closing.is_set():
            return 0
        self._closing.set()
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            failed_before = self._failed
            self._changed.wait_for(lambda: self._outstanding == 0, timeout=timeout_s)
            undelivered = self._outstanding + self._failed - failed_before
        abandon(self._producer, limit_s=max(1.0, deadline_s - time.monotonic()))
        return undelivered

    # ------------------------------------------------------------ inside

    def _build(self) -> KafkaProducer:
        return build(KafkaProducer, self._settings, producer_config(self._settings))

    def _reserve(self, message: Message, size: int) -> KafkaProducer:
        with self._changed:
            if self._closing.is_set():
                raise LogUnavailable(f"{describe(message)}: the writer is closed")
            if self._rebuilding:
                raise LogUnavailable(f"{describe(message)}: the client is being replaced after a failed delivery")
            if self._in_flight_bytes + size > self._settings.in_flight_bytes:
                raise BudgetExhausted(
                    f"{describe(message)}: {self._in_flight_bytes} bytes in flight, kafka.in_flight_bytes is "
                    f"{self._settings.in_flight_bytes}; wait for deliveries"
                )
            self._in_flight_bytes += size
            self._outstanding += 1
            return self._producer

    def _release(self, size: int) -> None:
        with self._changed:
            self._in_flight_bytes -= size
            self._outstanding -= 1
            self._changed.notify_all()

    def _on_failure(self, producer: KafkaProducer, size: int, error: Exception) -> None:
        """On the sender thread: note, hand over, return."""
        with self._changed:
            self._failed += 1
        self._release(size)
        self._replace(producer, error)

    def _replace(self, broken: KafkaProducer, error: Exception) -> None:
        with self._changed:
            if self._rebuilding or self._closing.is_set() or broken is not self._producer:
                return
            self._rebuilding = True
        event(_LOG, "writer_replaced", level=logging.WARNING, reason=str(error))
        threading.Thread(target=self._rebuild, args=(broken,), name="writer-rebuild", daemon=True).start()

    def _rebuild(self, broken: KafkaProducer) -> None:
        abandon(broken, limit_s=2.0)
        while not self._closing.is_set():
            try:
                producer = retrying(self._build, what="writer", limit_s=60.0, stop=self._closing, longest_wait_s=1.0)
            except (LogUnavailable, EnvironmentMissing) as error:
                event(_LOG, "writer_not_rebuilt", level=logging.ERROR, reason=str(error))
                self._closing.wait(1.0)
                continue
            with self._changed:
                self._producer = producer
                self._rebuilding = False
            if self._closing.is_set():  # close() saw the old one
                abandon(producer, limit_s=1.0)
            return
