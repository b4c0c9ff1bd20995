"""What bench_replay is compared with: the Kafka client and pyarrow alone, without a check or a promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from kafka import KafkaConsumer, TopicPartition

_POLL_MS = 1_000


def bare_client(bootstrap: str, name: str, partitions: int) -> int:
    """Records of a topic, polled in one thread and thrown away."""
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        fetch_max_bytes=32 * 1024 * 1024,
        max_partition_fetch_bytes=4 * 1024 * 1024,
        metrics_enabled=False,
    )
    try:
        places = [TopicPartition(name, partition) for partition in range(partitions)]
        consumer.assign(places)
        ends = consumer.end_offsets(places)
        consumer.seek_to_beginning(*places)
        records = 0
        while any(consumer.position(place) < end for place, end in ends.items()):
            records += sum(len(found) for found in consumer.poll(timeout_ms=_POLL_MS, max_records=500).values())
        return records
    finally:
        consumer.close()


def bare_pyarrow(files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    """Batches of mapped Arrow files, nothing compared."""
    for path in files:
        with pa.memory_map(str(path), "r") as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
