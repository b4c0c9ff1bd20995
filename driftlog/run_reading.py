"""Opens the log and the store of a run for the commands that ask questions after the fact."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from driftlog.broker_access import kafka_settings, reading_broker
from driftlog.options import run_of
from driftlog.run_directory import RunDirectory, read_config
from driftlog.wiring import open_store
from infra.clock import SystemClock
from infra.config import Config
from schemas.ids import RunId
from schemas.topics import TOPICS, TopicName

if TYPE_CHECKING:
    from consumers.offline.audit.report import AuditReport
    from consumers.offline.run_log import RunLog
    from infra.checkpoint_store import FsspecCheckpointStore
    from infra.kafka_clients import KafkaSettings
    from infra.kafka_reader import KafkaEventReader

OFFLINE_QUEUE_BYTES = 4 * 1024 * 1024
"""A fetch of the client deep: whoever reads faster than the broker answers gains nothing from more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run whose log can be read."""

    config: Config
    run: RunDirectory
    kafka: KafkaSettings

    @property
    def run_id(self) -> RunId:
        """The run."""
        return RunId(self.run.name)

    def log(self) -> RunLog:
        """The topics as they stand now."""
        from consumers.offline.run_log import RunLog

        return RunLog(self.run_id, self._open, clock=SystemClock())

    def store(self) -> FsspecCheckpointStore:
        """The checkpoints."""
        return open_store(self.config, self.run)

    def configs(self) -> list[Config]:
        """Every configuration the run had, in order."""
        return [read_config(path) for path in self.run.config_files()]

    def _open(self, topics: Sequence[str]) -> KafkaEventReader:
        from infra.kafka_reader import KafkaEventReader

        counts = {name: TOPICS[TopicName(name.removeprefix(f"{self.run.name}."))].partitions for name in topics}
        return KafkaEventReader(offline_settings(self.kafka), counts, "beginning")


def offline_settings(kafka: KafkaSettings) -> KafkaSettings:
    """Settings of readers that go through a log once: they need no deep queue, and should not cost its memory."""
    return replace(kafka, reader_queue_bytes=min(kafka.reader_queue_bytes, OFFLINE_QUEUE_BYTES))


@contextmanager
def opened_run(options: argparse.Namespace) -> Iterator[OpenedRun]:
    """The run that --run and --directory name; its embedded broker is started for the while when it is down."""
    config, run = run_of(options)
    with reading_broker(config, run) as bootstrap:
        yield opened(config, run, bootstrap)


def opened(config: Config, run: RunDirectory, bootstrap: str) -> OpenedRun:
    """A run whose broker is known."""
    from infra.kafka_clients import quiet_client_loggers

    quiet_client_loggers()
    return OpenedRun(config=config, run=run, kafka=kafka_settings(config, bootstrap))


def audit_run(at: OpenedRun, *, version: int | None = None, allow_gaps: bool = True) -> AuditReport:
    """Every check on a run, its checkpoints included; advantages are computed again as its configuration says."""
    from consumers.offline.audit import AuditRules, audit, rules_from_configs
    from driftlog.learning_settings import advantages_of, objective_settings

    rules: dict[str, AuditRules] = {}
    for digest, config in at.run.configs_by_digest().items():
        rules[digest] = rules_from_configs([config], advantages_of(objective_settings(config)))[config.digest()]
    return audit(at.log(), rules, at.store(), version=version, allow_gaps=allow_gaps)
