"""Transport: transactions back to back and spaced, the client's own ends, and whole groups beside other transports.

    python -m benchmarks.bench_transport [--seconds 5] [--groups-per-s 50] [--group-bytes 47000] [--rounds 3]

The last line is `RESULT {json}`. Figures move from machine to machine: compare them side by side only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.transport_pairs import compare
from infra import local_broker
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings, quiet_client_loggers
from infra.kafka_reader import KafkaEventReader
from infra.kafka_transactions import KafkaTransactionalWriter
from infra.kafka_writer import KafkaEventWriter
from infra.ports import Message
from infra.wakeup import Wakeup
from schemas.errors import BudgetExhausted

RUN = "bench"
TRAJECTORIES = f"{RUN}.trajectories"


def quantile_ms(seconds: list[float], q: float) -> float:
    """The q-quantile in milliseconds."""
    return round(sorted(seconds)[min(len(seconds) - 1, int(q * len(seconds)))] * 1000, 2)


def transactions(settings: KafkaSettings, count: int, pause_s: float) -> list[float]:
    """Seconds of each commit of 4 messages and the offsets of 4 partitions."""
    writer = KafkaTransactionalWriter(settings, f"{RUN}-trainer")
    writer.init()
    messages = [Message(topic=f"{RUN}.prompts", key=b"g", value=bytes(500), partition=i) for i in range(2)]
    messages += [Message(topic=f"{RUN}.{name}", key=b"g", value=bytes(2_000)) for name in ("ledger", "policy")]
    offsets = {(TRAJECTORIES, partition): 1 for partition in range(4)}
    seconds = []
    for i in range(count + 3):
        begun_s = time.perf_counter()
        writer.commit(messages, group=f"{RUN}-trainer", offsets=offsets)
        if i >= 3:  # the first ones find coordinators
            seconds.append(time.perf_counter() - begun_s)
        time.sleep(pause_s)
    writer.close()
    return seconds


def latencies(settings: KafkaSettings, seconds: float, groups_per_s: float, group_bytes: int) -> list[float]:
    """Seconds from send to the service's poll."""
    bell = Wakeup()
    reader = KafkaEventReader(settings, {TRAJECTORIES: 4}, "beginning", bell)
    count = int(seconds * groups_per_s)
    body = random.Random(0).randbytes(group_bytes // 2) + bytes(group_bytes - group_bytes // 2)

    def produce() -> None:
        writer = KafkaEventWriter(settings)
        for i in range(count):
            stamp = time.perf_counter_ns().to_bytes(8, "little")
            writer.send(Message(topic=TRAJECTORIES, key=b"g%d" % i, value=stamp + body))
            time.sleep(1 / groups_per_s)
        writer.close(10.0)

    producer = threading.Thread(target=produce)
    producer.start()
    found: list[float] = []
    deadline_s = time.monotonic() + seconds + 20
    while len(found) < count and time.monotonic() < deadline_s:
        bell.wait(0.5)
        now_ns = time.perf_counter_ns()
        found += [(now_ns - int.from_bytes((r.value or b"")[:8], "little")) / 1e9 for r in reader.poll(1_000)]
    producer.join()
    reader.close()
    return found[len(found) // 10 :]


def throughput(settings: KafkaSettings, count: int, group_bytes: int) -> tuple[float, float]:
    """Groups a second: written and acknowledged; read back from the beginning."""
    body = random.Random(0).randbytes(group_bytes // 2) + bytes(group_bytes - group_bytes // 2)
    writer = KafkaEventWriter(settings)
    begun_s = time.perf_counter()
    for i in range(count):
        message = Message(topic=TRAJECTORIES, key=b"t%d" % i, value=body)
        while True:
            try:
                writer.send(message)
                break
            except BudgetExhausted:
                time.sleep(0.002)
    undelivered = writer.close(60.0)
    written = (count - undelivered) / (time.perf_counter() - begun_s)
    bell = Wakeup()
    reader = KafkaEventReader(settings, {TRAJECTORIES: 4}, "beginning", bell)
    ends = reader.end_offsets()
    begun_s, got = time.perf_counter(), 0
    while any(reader.positions()[place] < end for place, end in ends.items()):
        bell.wait(0.5)
        got += len(reader.poll(1_000))
    read = got / (time.perf_counter() - begun_s)
    reader.close()
    return written, read


def main() -> None:
    """Run everything on a fresh broker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the latency run")
    parser.add_argument("--groups-per-s", type=float, default=50.0)
    parser.add_argument("--group-bytes", type=int, default=47_000)
    parser.add_argument("--transactions", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="of every peer, interleaved; 0: no peers")
    parser.add_argument("--groups", type=int, default=2_000, help="of one peer's round")
    options = parser.parse_args()
    quiet_client_loggers()
    jars = local_broker.ensure_jars(local_broker.default_cache_dir())
    with tempfile.TemporaryDirectory() as directory:
        broker = local_broker.start(Path(directory), jars=jars, die_with_parent=True)
        try:
            settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            admin = KafkaLogAdmin(settings)
            admin.create_topics(RUN)
            admin.close()
            back_to_back = transactions(settings, options.transactions, 0.0)
            spaced = transactions(settings, options.transactions, 0.2)
            latency = latencies(settings, options.seconds, options.groups_per_s, options.group_bytes)
            written, read = throughput(settings, 3_000, options.group_bytes)
            peers = compare(
                broker.bootstrap_servers,
                rounds=options.rounds,
                fast=options.groups,
                seconds=options.seconds,
                per_s=options.groups_per_s,
            )
        finally:
            local_broker.stop(Path(directory))
    result = {
        "transaction_back_to_back_ms_p50": round(statistics.median(back_to_back) * 1000, 2),
        "transaction_back_to_back_ms_p99": quantile_ms(back_to_back, 0.99),
        "transaction_spaced_ms_p50": round(statistics.median(spaced) * 1000, 2),
        "transaction_spaced_ms_p99": quantile_ms(spaced, 0.99),
        "latency_ms_p50": quantile_ms(latency, 0.5),
        "latency_ms_p99": quantile_ms(latency, 0.99),
        "latency_records": len(latency),
        "write_groups_per_s": round(written),
        "read_groups_per_s": round(read),
        "group_bytes": options.group_bytes,
        **peers,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
