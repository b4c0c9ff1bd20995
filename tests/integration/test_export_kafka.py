"""Export and cache on the real log: the same as from the log in memory, retention included."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from consumers.offline.cache import open_cache
from consumers.offline.cache.writer import refresh
from consumers.offline.export import ExportOptions, export
from consumers.offline.run_log import RunLog
from driftlog.run_reading import offline_settings
from infra.clock import SystemClock
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings
from infra.kafka_reader import KafkaEventReader
from infra.kafka_writer import KafkaEventWriter
from infra.local_broker import BrokerHandle
from infra.ports import Message
from schemas.errors import RangeMissing
from schemas.topics import TOPICS, TopicName, topic
from tests.fakes.tiny_export import add_scores
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

pytestmark = pytest.mark.kafka
_LIMIT_S = 30.0


def _copy(run: TinyRun, settings: KafkaSettings) -> None:
    """Every record where it lay, markers apart: trajectories have none, so decisions still name their rows."""
    admin = KafkaLogAdmin(settings)
    admin.create_topics(RUN)
    admin.close()
    writer = KafkaEventWriter(settings)
    names = [name for name in TopicName if name is not TopicName.EVALUATIONS]
    sent = [
        writer.send(Message(topic=r.topic, key=r.key or b"", value=r.value, headers=r.headers, partition=r.partition))
        for name in names
        for r in run.records(name)
    ]
    for delivery in sent:
        delivery.result(_LIMIT_S)
    assert writer.close(_LIMIT_S) == 0


def _run_log(settings: KafkaSettings) -> RunLog:
    def open_reader(names: Sequence[str]) -> KafkaEventReader:
        counts = {name: TOPICS[TopicName(name.removeprefix(f"{RUN}."))].partitions for name in names}
        return KafkaEventReader(offline_settings(settings), counts, "beginning")

    return RunLog(RUN, open_reader, clock=SystemClock(), stall_limit_s=_LIMIT_S)


# A consumer that is closed while it connects leaves that socket to the garbage collector (kafka-python 3.0.12).
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
def test_the_real_log_gives_the_same_tables_and_names_what_retention_took(
    kafka_broker: BrokerHandle, tmp_path: Path
) -> None:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers)
    run = TinyRun(tmp_path / "store")
    add_scores(run, version=2)
    _copy(run, settings)
    export(run.run_log(), tmp_path / "memory", ExportOptions(), now_us=0, build="test")
    log = _run_log(settings)

    export(log, tmp_path / "kafka", ExportOptions(), now_us=0, build="test")
    cached = refresh(log, tmp_path / "cache").cache

    # Other columns hold what the broker decides: when it took a record, and where a ledger record lies.
    names = ["partition", "offset", "row", "trajectory_id", "token_ids", "decision", "mean_log_ratio", "version"]
    order = [(name, "ascending") for name in names[:3]]
    found, expected = [
        pq.read_table(tmp_path / kind / "trajectories").select(names).sort_by(order) for kind in ("kafka", "memory")
    ]
    assert found.equals(expected)
    assert cached.manifest.rows == 14
    assert sum(batch.num_rows for batch in open_cache(tmp_path / "cache", log).batches()) == 14

    admin = KafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap_servers)
    admin.delete_records({TopicPartition(topic(RUN, TopicName.TRAJECTORIES), 2): 1})
    admin.close()
    with pytest.raises(RangeMissing, match=r"tiny.trajectories\[2\]: records 0-0 are no longer in the log"):
        export(_run_log(settings), tmp_path / "after", ExportOptions(), now_us=0, build="test")
    assert refresh(_run_log(settings), tmp_path / "cache").cache.manifest.rows == 14
    gc.collect()  # here, where the filter above is in force, and not at the end of the session
