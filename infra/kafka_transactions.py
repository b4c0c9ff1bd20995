"""Kafka transactions, one whole transaction a call, under a stable transactional id.

Every send is awaited before the commit: the client commits transactions that lost records otherwise. Commit
and offsets have no time-out of their own, so everything runs on a thread that is abandoned after a limit;
after any doubt the client is thrown away (an abort after a send time-out hangs) and `init` builds a new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from kafka import KafkaProducer, TopicPartition
from kafka import errors as kafka_errors
from kafka.structs import OffsetAndMetadata

from infra.kafka_clients import KafkaSettings, abandon, build, explain, producer_config
from infra.kafka_writer import describe, message_bytes
from infra.ports import Message, Placed
from infra.record_queue import Place
from infra.retry import retrying
from schemas.errors import DriftlogError, Fenced, MessageTooLarge, TransactionFailed
from schemas.topics import MAX_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)
_FENCING = ("ProducerFencedError", "InvalidProducerEpochError")
_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)


class KafkaTransactionalWriter:
    """The TransactionalWriter port. Not thread-safe."""

    def __init__(self, settings: KafkaSettings, transactional_id: str) -> None:
        self._settings = settings
        self._id = transactional_id
        self._producer: KafkaProducer | None = None
        self._fenced: Fenced | None = None

    def init(self) -> None:
        """Take over the identity: fence predecessors, end their open transaction. Also the way back."""
        if self._fenced is not None:
            raise self._fenced
        self._discard()
        self._producer = retrying(
            self._take_over, what=f"transactions of {self._id}", limit_s=self._settings.init_timeout_s
        )

    def commit(
        self, messages: Sequence[Message], *, group: str | None = None, offsets: Mapping[Place, int] | None = None
    ) -> Sequence[Placed]:
        """All messages and offsets, or none."""
        if self._fenced is not None:
            raise self._fenced
        if self._producer is None:
            raise TransactionFailed(f"{self._id}: no transaction can begin: call init first")
        if (offsets is None) != (group is None):
            raise ValueError("commit: group and offsets go together")
        for message in messages:
            if message_bytes(message) > MAX_MESSAGE_BYTES:
                raise MessageTooLarge(f"{describe(message)}: the limit is {MAX_MESSAGE_BYTES}; nothing was written")
        work = _Transaction(self._producer, self._settings, messages, group, offsets or {})
        try:
            return work.run()
        except MessageTooLarge:
            raise  # aborted, and known to be: the client is fine
        except kafka_errors.KafkaError as error:
            raise self._doubt(error, work.seconds()) from error
        except _OutOfTimeError as error:
            self._discard()
            raise TransactionFailed(f"{self._id}: {error}; outcome unknown: init, then re-read the log") from error
        except BaseException:
            self._discard()  # a caller's mistake in mid-transaction must not leave it open
            raise

    def close(self) -> None:
        """Safe to call twice."""
        self._discard()

    def _take_over(self) -> KafkaProducer:
        timeout_ms = int(self._settings.transaction_timeout_s * 1000)
        send_ms = int(send_limit_s(self._settings) * 1000)
        config = producer_config(self._settings) | {
            "transactional_id": self._id,
            "transaction_timeout_ms": timeout_ms,
            "delivery_timeout_ms": send_ms,
            "request_timeout_ms": int(min(self._settings.request_timeout_s * 1000, send_ms)),
            # The sender sleeps this long when a partition meets the broker still finishing the last transaction:
            # 80 ms a transaction with the default of 100, 29 with 5.
            "retry_backoff_ms": 5,
        }
        producer = build(KafkaProducer, self._settings, config)
        try:
            producer.init_transactions()
        except kafka_errors.KafkaError as error:
            abandon(producer, limit_s=1.0)
            if _is_fencing(error):
                raise self._remember_fenced(error) from error
            raise explain(error, f"init of transactional id {self._id}") from error
        return producer

    def _doubt(self, error: Exception, seconds: float) -> DriftlogError:
        """Fenced, or a transaction that must be read back. The client is gone in either case."""
        self._discard()
        if isinstance(error, kafka_errors.AuthorizationError):
            return explain(error, self._id)
        # The broker raises our epoch when it aborts a transaction that took too long: that is no other process.
        if _is_fencing(error) and seconds < 0.9 * self._settings.transaction_timeout_s:
            return self._remember_fenced(error)
        return TransactionFailed(f"{self._id}: {error} ({seconds:.1f} s after its begin); init, then re-read the log")

    def _remember_fenced(self, error: Exception) -> Fenced:
        self._fenced = Fenced(f"{self._id}: a newer process owns this identity ({type(error).__name__}); stop for good")
        return self._fenced

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            abandon(producer, limit_s=2.0)


def send_limit_s(settings: KafkaSettings) -> float:
    """Sends must fail before the broker gives the transaction up: a late record would meet a dead transaction."""
    return min(settings.delivery_timeout_s, 0.8 * settings.transaction_timeout_s)


class _OutOfTimeError(Exception):
    """The thread did not come back."""


class _Transaction:
    """One transaction on a thread of its own."""

    def __init__(
        self,
        producer: KafkaProducer,
        settings: KafkaSettings,
        messages: Sequence[Message],
        group: str | None,
        offsets: Mapping[Place, int],
    ) -> None:
        self._producer = producer
        self._limit_s = settings.transaction_timeout_s + 5.0
        # While a partition waits to be added the client expires nothing: this limit is ours alone.
        self._send_limit_s = send_limit_s(settings) + 0.5
        self._messages = messages
        self._group = group
        self._offsets = {TopicPartition(*place): OffsetAndMetadata(offset, "", -1) for place, offset in offsets.items()}
        self._started_s = time.monotonic()
        self._doing = "begin"
        self._placed: list[Placed] = []
        self._error: Exception | None = None

    def run(self) -> list[Placed]:
        """Where the messages lie; raises what went wrong, or _OutOfTimeError."""
        thread = threading.Thread(target=self._guarded, name="transaction", daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if thread.is_alive():
            raise _OutOfTimeError(f"still at `{self._doing}` after {self._limit_s:g} s")
        if self._error is not None:
            raise self._error
        return self._placed

    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started_s

    def _guarded(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001  the boundary of the thread: `run` raises it
            self._error = error

    def _work(self) -> None:
        self._producer.begin_transaction()
        self._doing = "send"
        futures = []
        for message in self._messages:
            futures.append(
                self._producer.send(
                    message.topic, message.value, message.key, list(message.headers), partition=message.partition
                )
            )
        for future in futures:
            try:
                metadata = future.get(timeout=max(0.0, self._send_limit_s - self.seconds()))
            except _TOO_LARGE as error:
                self._doing = "abort"
                self._producer.abort_transaction()
                largest = max(self._messages, key=message_bytes)  # the error does not say which one it was
                raise MessageTooLarge(f"{describe(largest)}: the broker refuses it; nothing was written") from error
            self._placed.append(Placed(partition=metadata.partition, offset=metadata.offset))
        if self._offsets:
            self._doing = "send_offsets"
            self._producer.send_offsets_to_transaction(self._offsets, self._group)
        self._doing = "commit"
        self._producer.commit_transaction()


def _is_fencing(error: BaseException) -> bool:
    """The client wraps the broker's answer in plain KafkaErrors: look for its name."""
    return any(name in f"{type(error).__name__} {error} {error.args!r}" for name in _FENCING)
