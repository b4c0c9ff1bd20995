"""The ways to carry groups between two processes that bench_transport compares, each one sender and one receiver.

Every client library is imported where it is used: one that is missing is a reason to leave its peer out, no crash.
"""

from __future__ import annotations

import contextlib
import time

from benchmarks.bench_codec import installed
from benchmarks.transport_ends import FLUSH_LIMIT_S, WAIT_S, Peer, Where
from benchmarks.transport_redis import BatchedReceiver, BatchedSender, PipelineReceiver, PipelineSender
from infra.kafka_clients import KafkaSettings
from infra.kafka_reader import KafkaEventReader
from infra.kafka_writer import KafkaEventWriter
from infra.ports import Message
from infra.wakeup import Wakeup
from schemas.errors import BudgetExhausted
from schemas.topics import TOPICS, TopicName, topic

PARTITIONS = TOPICS[TopicName.TRAJECTORIES].partitions
_TAIL_S = 0.01
"""pause of the reader of a file that has nothing new"""


class OurSender:
    """The service's writer: acks=all, idempotent, zstd, a byte budget."""

    def __init__(self, at: Where) -> None:
        self._topic, self._count = topic_of(at), 0
        self._writer = KafkaEventWriter(KafkaSettings(bootstrap_servers=at.bootstrap))

    def send(self, message: bytes) -> None:
        self._count += 1
        whole = Message(topic=self._topic, key=b"g%d" % self._count, value=message)
        while True:
            try:
                self._writer.send(whole)
                return
            except BudgetExhausted:
                time.sleep(0.002)

    def close(self) -> None:
        if left := self._writer.close(FLUSH_LIMIT_S):
            raise SystemExit(f"{left} groups were not delivered within {FLUSH_LIMIT_S:.0f} s")


class OurReceiver:
    """The service's reader: committed records, a thread that fills a queue."""

    def __init__(self, at: Where) -> None:
        self._bell = Wakeup()
        settings = KafkaSettings(bootstrap_servers=at.bootstrap)
        self._reader = KafkaEventReader(settings, {topic_of(at): PARTITIONS}, "beginning", self._bell)

    def poll(self) -> list[bytes]:
        self._bell.wait(WAIT_S)
        return [record.value for record in self._reader.poll(1_000)]

    def close(self) -> None:
        self._reader.close()


class ConfluentSender:
    """librdkafka with the same settings."""

    def __init__(self, at: Where) -> None:
        from confluent_kafka import Producer

        self._topic, self._count = topic_of(at), 0
        self._producer = Producer(
            {
                "bootstrap.servers": at.bootstrap, "acks": "all", "enable.idempotence": True,
                "compression.type": "zstd", "linger.ms": 0, "batch.size": 1024 * 1024,
                "queue.buffering.max.kbytes": 64 * 1024, "message.max.bytes": 16 * 1024 * 1024,
            }
        )  # fmt: skip

    def send(self, message: bytes) -> None:
        self._count += 1
        while True:
            try:
                self._producer.produce(self._topic, message, key=b"g%d" % self._count)
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(0.002)

    def close(self) -> None:
        if left := self._producer.flush(FLUSH_LIMIT_S):
            raise SystemExit(f"{left} groups were not delivered within {FLUSH_LIMIT_S:.0f} s")


class ConfluentReceiver:
    """librdkafka, all partitions, committed records."""

    def __init__(self, at: Where) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        self._consumer = Consumer(
            {
                "bootstrap.servers": at.bootstrap, "group.id": at.name, "enable.auto.commit": False,
                "isolation.level": "read_committed", "fetch.message.max.bytes": 16 * 1024 * 1024,
            }
        )  # fmt: skip
        self._consumer.assign([TopicPartition(topic_of(at), place, OFFSET_BEGINNING) for place in range(PARTITIONS)])

    def poll(self) -> list[bytes]:
        first = self._consumer.poll(WAIT_S)
        rest = [] if first is None else self._consumer.consume(1_000, 0)
        return [found.value() or b"" for found in (first, *rest) if found is not None and found.error() is None]

    def close(self) -> None:
        self._consumer.close()


class ZmqSender:
    """PUSH over loopback, the default high-water mark."""

    def __init__(self, at: Where) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.linger = int(FLUSH_LIMIT_S * 1000)
        self._socket.sndtimeo = int(FLUSH_LIMIT_S * 1000)
        self._socket.connect(f"tcp://127.0.0.1:{at.free_port}")

    def send(self, message: bytes) -> None:
        self._socket.send(message)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ZmqReceiver:
    """PULL."""

    def __init__(self, at: Where) -> None:
        import zmq

        self._zmq, self._context = zmq, zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvtimeo = int(WAIT_S * 1000)
        self._socket.bind(f"tcp://127.0.0.1:{at.free_port}")

    def poll(self) -> list[bytes]:
        with contextlib.suppress(self._zmq.Again):
            return [self._socket.recv()]
        return []

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class FileSender:
    """One line a group, flushed to the page cache."""

    def __init__(self, at: Where) -> None:
        self._file = (at.directory / at.name).open("ab")

    def send(self, message: bytes) -> None:
        self._file.write(message[:8].hex().encode() + message[8:] + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class FileReceiver:
    """Reads on from where it was."""

    def __init__(self, at: Where) -> None:
        path = at.directory / at.name
        path.touch()
        self._file, self._rest = path.open("rb"), b""

    def poll(self) -> list[bytes]:
        found = self._file.read()
        if not found:
            time.sleep(_TAIL_S)
            return []
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [bytes.fromhex(line[:16].decode()) + line[16:] for line in lines]

    def close(self) -> None:
        self._file.close()


class QueueSender:
    """multiprocessing.Queue."""

    def __init__(self, at: Where) -> None:
        self._queue = at.queue

    def send(self, message: bytes) -> None:
        self._queue.put(message, timeout=FLUSH_LIMIT_S)

    def close(self) -> None:
        self._queue.close()
        self._queue.join_thread()


class QueueReceiver:
    """The other end of it."""

    def __init__(self, at: Where) -> None:
        self._queue = at.queue

    def poll(self) -> list[bytes]:
        import queue

        with contextlib.suppress(queue.Empty):
            return [self._queue.get(timeout=WAIT_S)]
        return []

    def close(self) -> None:
        self._queue.close()


PEERS = (
    Peer(name="driftlog", codec="arrow", module="", keeps="log of the broker (page cache)",
         sender=OurSender, receiver=OurReceiver),
    Peer(name="confluent-kafka", codec="arrow", module="confluent_kafka", keeps="log of the broker (page cache)",
         sender=ConfluentSender, receiver=ConfluentReceiver),
    Peer(name="redis stream, as PipelineRL", codec="pickle of lists", module="redis",
         keeps="append-only file (page cache)", sender=PipelineSender, receiver=PipelineReceiver),
    Peer(name="redis stream, batched", codec="pickle", module="redis", keeps="append-only file (page cache)",
         sender=BatchedSender, receiver=BatchedReceiver),
    Peer(name="JSONL file", codec="orjson", module="", keeps="file (page cache)",
         sender=FileSender, receiver=FileReceiver),
    Peer(name="ZMQ", codec="msgspec", module="zmq", keeps="nothing", sender=ZmqSender, receiver=ZmqReceiver),
    Peer(name="multiprocessing queue", codec="pickle", module="", keeps="nothing",
         sender=QueueSender, receiver=QueueReceiver),
)  # fmt: skip


def missing(peer: Peer, redis_port: int) -> str:
    """Why this peer cannot be measured here; "" when it can."""
    for module in (peer.module, peer.codec if peer.codec in ("msgspec", "orjson") else ""):
        if module and installed(module) is None:
            return f"{module} is not installed (make bench installs it)"
    return "there is no redis-server on this machine" if peer.module == "redis" and not redis_port else ""


def topic_of(at: Where) -> str:
    """The Kafka peers' topic of this round."""
    return topic(at.name, TopicName.TRAJECTORIES)  # type: ignore[arg-type]
