"""Reading a run again: from Kafka as export and reanalysis do, and from the Arrow cache, beside the bare libraries.

    python -m benchmarks.bench_replay [--trajectories 20000] [--tokens 512] [--rounds 3]

Writes whole groups to an embedded broker, then reads them in turn: our reading (fetch, every record validated in full,
large record batches), the bare client (records only), our cache (checksum of every file), bare pyarrow (the same
files). Memory is that of fresh processes; one of them is a whole `driftlog export`, with a ledger and scores to join.
Figures are the best round: other work on the machine only slows them down.
The last line is `RESULT {json}`; exit 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.bare_readers import bare_client, bare_pyarrow
from benchmarks.bench_codec import VOCABULARY, make_group
from benchmarks.decided_log import StepWriter
from consumers.offline.cache import open_cache
from consumers.offline.cache.writer import refresh
from consumers.offline.export import ExportOptions, export
from consumers.offline.run_log import RunLog
from consumers.offline.trajectory_batches import trajectory_batches
from driftlog.run_reading import offline_settings
from infra import local_broker
from infra.clock import SystemClock
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings, quiet_client_loggers
from infra.kafka_reader import KafkaEventReader
from infra.kafka_writer import KafkaEventWriter
from infra.ports import Delivery, Message
from schemas.errors import BudgetExhausted
from schemas.ids import GroupKey, RunId, group_id, trajectory_id
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import encode_group, group_message_headers
from schemas.trajectory_columns import flat_values

GROUP_SIZE = 8
GROUPS_A_STEP = 32
PROMPT_TOKENS = 128
FEW = 2_000
TARGETS = {"kafka_trajectories_per_s": 15_000, "cache_trajectories_per_s": 300_000}
MEMORY_TARGET_MIB = 50.0
_SAMPLE_S = 0.005


def write_groups(settings: KafkaSettings, run: RunId, trajectories: int, tokens: int) -> int:
    """Whole groups of eight, log-probabilities and tokens that do not compress, trained; the bytes of their values."""
    admin = KafkaLogAdmin(settings)
    admin.create_topics(run)
    admin.close()
    shapes = [_shape(seed, tokens) for seed in range(16)]
    writer, trainer = KafkaEventWriter(settings), StepWriter(run)
    size = 0
    sent: list[tuple[list[Trajectory], Delivery]] = []
    for number in range(trajectories // GROUP_SIZE):
        group = group_id(GroupKey(run=run, prompt=number, epoch=0, attempt=0))
        rows = [
            replace(
                t,
                group_id=group,
                trajectory_id=trajectory_id(group, t.index_in_group),
                segments=tuple(replace(segment, version=trainer.version) for segment in t.segments),
            )
            for t in shapes[number % len(shapes)]
        ]
        value = encode_group(rows)
        size += len(value)
        headers = group_message_headers(rows, value, "bench")
        message = Message(topic=topic(run, TopicName.TRAJECTORIES), key=group.encode(), value=value, headers=headers)
        sent.append((rows, _send(writer, message)))
        if len(sent) == GROUPS_A_STEP or number + 1 == trajectories // GROUP_SIZE:
            for record in trainer.step([(rows, delivery.result(60.0)) for rows, delivery in sent]):
                _send(writer, record)
            sent = []
    undelivered = writer.close(120.0)
    if undelivered:
        raise SystemExit(f"{undelivered} groups were not written")
    return size


def _shape(seed: int, tokens: int) -> list[Trajectory]:
    """A group with random tokens and log-probabilities of its own."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            t,
            token_ids=rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
            logprobs=-rng.random(tokens, dtype=np.float32),
        )
        for t in make_group(GROUP_SIZE, PROMPT_TOKENS, tokens)
    ]


def _send(writer: KafkaEventWriter, message: Message) -> Delivery:
    while True:
        try:
            return writer.send(message)
        except BudgetExhausted:
            time.sleep(0.002)


def run_log(settings: KafkaSettings, run: RunId) -> RunLog:
    """As the commands open it."""

    def open_reader(names: Sequence[str]) -> KafkaEventReader:
        counts = {name: TOPICS[TopicName(name.removeprefix(f"{run}."))].partitions for name in names}
        return KafkaEventReader(offline_settings(settings), counts, "beginning")

    return RunLog(run, open_reader, clock=SystemClock())


def consume(batches: Iterator[pa.RecordBatch]) -> int:
    """Look at every token and log-probability, as a user would; the rows."""
    rows = 0
    total = 0.0
    for batch in batches:
        rows += batch.num_rows
        total += float(flat_values(batch.column("logprobs")).sum()) + int(flat_values(batch.column("token_ids"))[-1])
    assert np.isfinite(total)
    return rows


def our_kafka(log: RunLog) -> int:
    """The path of export and reanalysis."""
    return sum(batch.rows.num_rows for batch in trajectory_batches(log))


def our_export(log: RunLog, directory: Path) -> int:
    """Everything as Parquet, decisions and scores joined."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        report = export(log, Path(name) / "out", ExportOptions(), now_us=0, build="bench")
    assert not any(report.undecided.values()), report.undecided
    return report.tables["trajectories"]["rows"]


# ---------------------------------------------------------------- memory


class PeakMemory:
    """Largest anonymous memory of this process while it is entered, in MiB, by sampling."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, anonymous_mib())
            if self._over.wait(_SAMPLE_S):
                return


def anonymous_mib() -> float:
    """RssAnon of this process: what is not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this kernel does not say RssAnon")


def child(path: str, bootstrap: str, run: RunId, cache: Path) -> None:
    """One reading in a process of its own; prints its peak."""
    quiet_client_loggers()
    log = run_log(KafkaSettings(bootstrap_servers=bootstrap), run)
    paths: dict[str, Callable[[], int]] = {
        "kafka": lambda: our_kafka(log),
        "cache": lambda: consume(open_cache(cache, log).batches()),
        "export": lambda: our_export(log, cache.parent),
    }
    with PeakMemory() as memory:
        rows = paths[path]()
    print(json.dumps({"rows": rows, "peak_mib": memory.peak_mib}))


def peak_of_child(path: str, bootstrap: str, run: RunId, cache: Path) -> float:
    """Peak anonymous memory of a fresh process that reads the run by this path."""
    command = [sys.executable, "-m", "benchmarks.bench_replay", "--child", path, bootstrap, run, str(cache)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mib"])


# ---------------------------------------------------------------- the measurement


def timed(read: Callable[[], int], expected: int) -> tuple[float, float]:
    """(trajectories a second, CPU seconds of this process) of one reading."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    rows = read()
    taken_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    if rows != expected:
        raise SystemExit(f"{rows} trajectories were read, {expected} were written")
    return rows / taken_s, cpu_s


def measure(bootstrap: str, trajectories: int, tokens: int, rounds: int, directory: Path) -> dict[str, float]:
    """Everything, on one broker."""
    settings = KafkaSettings(bootstrap_servers=bootstrap)
    many, few = RunId("many"), RunId("few")
    size = write_groups(settings, many, trajectories, tokens)
    write_groups(settings, few, FEW, tokens)
    caches = {run: directory / f"cache-{run}" for run in (many, few)}
    logs = {run: run_log(settings, run) for run in (many, few)}
    for run in (many, few):
        refresh(logs[run], caches[run])
    log, cache = logs[many], open_cache(caches[many], logs[many])
    files = [caches[many] / file.name for file in cache.manifest.files]
    name, partitions = topic(many, TopicName.TRAJECTORIES), TOPICS[TopicName.TRAJECTORIES].partitions
    paths: dict[str, Callable[[], int]] = {
        "kafka": lambda: our_kafka(log),
        "bare_client": lambda: GROUP_SIZE * bare_client(bootstrap, name, partitions),
        "cache": lambda: consume(open_cache(caches[many], log).batches()),
        "cache_opened": lambda: consume(cache.batches()),
        "bare_pyarrow": lambda: consume(bare_pyarrow(files)),
    }
    rates = dict.fromkeys(paths, 0.0)
    cpu_s = dict.fromkeys(paths, float("inf"))
    for _ in range(rounds):
        for path in random.Random(rounds).sample(list(paths), len(paths)):
            rate, taken_s = timed(paths[path], trajectories)
            rates[path], cpu_s[path] = max(rates[path], rate), min(cpu_s[path], taken_s)
    growth = {
        path: peak_of_child(path, bootstrap, many, caches[many]) - peak_of_child(path, bootstrap, few, caches[few])
        for path in ("kafka", "cache", "export")
    }
    return _figures(rates, cpu_s, growth, trajectories, size)


def _figures(
    rates: dict[str, float], cpu_s: dict[str, float], growth: dict[str, float], trajectories: int, size: int
) -> dict[str, float]:
    return {
        "kafka_trajectories_per_s": round(rates["kafka"]),
        "cache_trajectories_per_s": round(rates["cache_opened"]),
        "memory_growth_mib": round(max(growth["kafka"], growth["cache"]), 1),
        "cache_with_log_check_trajectories_per_s": round(rates["cache"]),
        "bare_client_trajectories_per_s": round(rates["bare_client"]),
        "bare_pyarrow_trajectories_per_s": round(rates["bare_pyarrow"]),
        "kafka_cpu_us_a_trajectory": round(cpu_s["kafka"] / trajectories * 1e6, 1),
        "bare_client_cpu_us_a_trajectory": round(cpu_s["bare_client"] / trajectories * 1e6, 1),
        "cache_cpu_us_a_trajectory": round(cpu_s["cache_opened"] / trajectories * 1e6, 2),
        "kafka_memory_growth_mib": round(growth["kafka"], 1),
        "cache_memory_growth_mib": round(growth["cache"], 1),
        # Buffers that fill (64 MiB of rows that wait for their files) and some bytes an id: docs/queries.md.
        "export_memory_growth_mib": round(growth["export"], 1),
        "trajectories": trajectories,
        "value_mib": round(size / 2**20, 1),
        "load_1min": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    """Measure on a fresh broker; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        path, bootstrap, run, cache = options.child
        child(path, bootstrap, RunId(run), Path(cache))
        return 0
    quiet_client_loggers()
    jars = local_broker.ensure_jars(local_broker.default_cache_dir())
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        broker = local_broker.start(directory / "broker", jars=jars, die_with_parent=True)
        try:
            trajectories = options.trajectories // GROUP_SIZE * GROUP_SIZE
            result = measure(broker.bootstrap_servers, trajectories, options.tokens, options.rounds, directory)
        finally:
            local_broker.stop(directory / "broker")
    missed = [name for name, least in TARGETS.items() if result[name] < least]
    missed += ["memory_growth_mib"] * (result["memory_growth_mib"] > MEMORY_TARGET_MIB)
    for name in missed:
        print(f"missed: {name} is {result[name]}", file=sys.stderr)
    print("RESULT " + json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
