"""Makes a copy of a run and changes its log as one with the broker's disk could: same offsets, other bytes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient

from driftlog.broker_access import reading_broker
from driftlog.run_reading import OpenedRun, opened
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_writer import KafkaEventWriter
from infra.ports import Message, Record
from schemas.ledger import Decision, DecisionRow, StepCompleted, Subject
from schemas.topics import TopicName, topic
from schemas.trajectory_codec import decode_group, encode_group, group_message_headers
from schemas.trajectory_validate import WRITER_LIMITS
from tests.e2e.driving import Site, wait_until

_LIMIT_S = 30.0


def copied(site: Site, folder: Path, name: str = "tiny") -> Site:
    """A site with a copy of the run, checkpoints and broker included; the original must not be going."""
    target = Site(folder=folder, config=site.config)
    shutil.copytree(site.run(name).path, target.run(name).path)
    return target


def alter_reward(site: Site, version: int, reward: float, name: str = "tiny") -> DecisionRow:
    """Another reward for the first row that made this version; the ledger's decision about it."""
    config = site.run(name).stored_config()
    assert config is not None
    with reading_broker(config, site.run(name)) as bootstrap:
        at = opened(config, site.run(name), bootstrap)
        decision = _first_trained(at, version)
        records = list(at.log().records(TopicName.TRAJECTORIES))
        _write_anew(at, [_altered(record, decision, reward) for record in records])
    return decision


def _first_trained(at: OpenedRun, version: int) -> DecisionRow:
    return next(
        row
        for t in at.log().transactions()
        if isinstance(t.control, StepCompleted) and t.control.version_out == version
        for row in t.decisions
        if row.subject is Subject.TRAJECTORY and row.decision is Decision.TRAINED
    )


def _altered(record: Record, decision: DecisionRow, reward: float) -> Record:
    if (record.partition, record.offset) != (decision.partition, decision.offset):
        return record
    rows = [row.trajectory for row in decode_group(record.value, record.headers, WRITER_LIMITS)]
    changes: dict[str, Any] = {"reward": reward}
    edited = [dataclasses.replace(t, **(changes if n == decision.row else {})) for n, t in enumerate(rows) if t]
    value = encode_group(edited)
    return dataclasses.replace(record, value=value, headers=group_message_headers(edited, value, "forger"))


def _write_anew(at: OpenedRun, records: Sequence[Record]) -> None:
    """The topic is deleted, made anew, and filled in the old order."""
    full = topic(at.run_id, TopicName.TRAJECTORIES)
    deleting = KafkaAdminClient(bootstrap_servers=at.kafka.bootstrap_servers)
    admin, writer = KafkaLogAdmin(at.kafka), KafkaEventWriter(at.kafka)
    try:
        deleting.delete_topics([full])
        wait_until(lambda: full not in admin.existing_topics(), "the topic to be gone", _LIMIT_S)
        admin.create_topics(at.run_id)
        for record in records:
            sent = writer.send(
                Message(
                    topic=full,
                    key=record.key or b"",
                    value=record.value,
                    headers=record.headers,
                    partition=record.partition,
                )
            )
            assert sent.result(_LIMIT_S).offset == record.offset
    finally:
        assert writer.close(_LIMIT_S) == 0
        admin.close()
        deleting.close()
