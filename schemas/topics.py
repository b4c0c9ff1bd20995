"""The topic registry: every topic, who writes it, how it is partitioned and kept.

Topics are created from here and nowhere else; the broker never creates one by itself. A run owns its
topics: `<run>.<name>`. Partition counts are fixed for life, because keys map to partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from schemas.ids import RunId

ARROW_STREAM = "application/vnd.apache.arrow.stream"
JSON = "application/json"
FOR_EVER_MS = -1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class TopicName(StrEnum):
    """The name without the run."""

    PROMPTS = "prompts"
    TRAJECTORIES = "trajectories"
    POLICY = "policy"
    WORKERS = "workers"
    LEDGER = "ledger"
    SCORES = "scores"
    EVALUATIONS = "evaluations"
    DEADLETTERS = "deadletters"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """How one topic is created."""

    name: TopicName
    key: str
    """what the record key is, in words"""
    partitions: int
    cleanup: Literal["delete", "compact"]
    retention_ms: int
    """-1: for ever"""
    payload: str
    written_by: str
    transactional: bool
    """written inside transactions: readers must read committed"""
    log_append_time: bool = False

    def broker_config(self) -> dict[str, str]:
        """The topic's settings, as the broker spells them."""
        config = {
            "cleanup.policy": self.cleanup,
            "retention.ms": str(self.retention_ms),
            "retention.bytes": "-1",
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
            "compression.type": "producer",
            "message.timestamp.type": "LogAppendTime" if self.log_append_time else "CreateTime",
        }
        if self.cleanup == "compact":
            # Compaction never touches the active segment: without a short segment.ms it would never act.
            config |= {"segment.ms": "600000", "segment.bytes": str(4 * 1024 * 1024)}
        return config


_SPECS = (
    TopicSpec(
        name=TopicName.PROMPTS, key="group id", partitions=16, cleanup="delete", retention_ms=FOR_EVER_MS,
        payload="Arrow PromptRequested; request i in partition i mod 16", written_by="trainer", transactional=True,
    ),
    TopicSpec(
        name=TopicName.TRAJECTORIES, key="group id", partitions=4, cleanup="delete", retention_ms=FOR_EVER_MS,
        payload="Arrow Trajectory rows of one group", written_by="generators", transactional=False,
        log_append_time=True,
    ),
    TopicSpec(
        name=TopicName.POLICY, key="run id", partitions=1, cleanup="delete", retention_ms=FOR_EVER_MS,
        payload="JSON policy events", written_by="trainer, coordinator, workers", transactional=True,
    ),
    TopicSpec(
        name=TopicName.WORKERS, key="worker id/incarnation", partitions=1, cleanup="compact",
        retention_ms=FOR_EVER_MS, payload="JSON Heartbeat", written_by="workers", transactional=False,
    ),
    TopicSpec(
        name=TopicName.LEDGER, key="version", partitions=1, cleanup="delete", retention_ms=FOR_EVER_MS,
        payload="Arrow decisions; JSON StepCompleted, Settled, RunEnded", written_by="trainer", transactional=True,
    ),
    TopicSpec(
        name=TopicName.SCORES, key="group id", partitions=4, cleanup="delete", retention_ms=FOR_EVER_MS,
        payload="Arrow trainer log-probabilities", written_by="trainer", transactional=True,
    ),
    TopicSpec(
        name=TopicName.EVALUATIONS, key="version", partitions=1, cleanup="delete", retention_ms=FOR_EVER_MS,
        payload="Arrow evaluation rows", written_by="evaluator", transactional=False,
    ),
    TopicSpec(
        name=TopicName.DEADLETTERS, key="original key", partitions=1, cleanup="delete", retention_ms=FOR_EVER_MS,
        payload="original bytes untouched, reason headers", written_by="any consumer", transactional=True,
    ),
)  # fmt: skip
TOPICS: dict[TopicName, TopicSpec] = {spec.name: spec for spec in _SPECS}


def topic(run: RunId, name: TopicName) -> str:
    """The full topic name.

    >>> topic(RunId("demo"), TopicName.POLICY)
    'demo.policy'
    """
    return f"{run}.{name.value}"
