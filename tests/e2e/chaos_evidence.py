"""What a finished run left in its log and store, read back for the checks and the price. One pass over each topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftlog.broker_access import reading_broker
from driftlog.run_directory import RunDirectory
from driftlog.run_reading import opened
from schemas.checkpoint import WEIGHTS_NAME
from schemas.ledger import Decision, Subject
from schemas.policy_events import VersionPublished, WorkerJoined
from schemas.policy_fold import PolicyFold
from tests.e2e.chaos_hits import Traces

RecordKey = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One finished claim of a group, as it lies in the log."""

    worker: str
    incarnation: str
    started_us: int
    finished_us: int
    key: RecordKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFate:
    """The decision about a group."""

    decision: str
    reason: str
    decided_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A finished run."""

    summary: Mapping[str, Any]
    traces: Traces
    joins: Counter[str]
    """worker -> times it joined"""
    fates: Mapping[str, tuple[GroupFate, ...]]
    """group -> its decisions; more than one is a finding"""
    row_decisions: Mapping[tuple[int, int, int], int]
    """(partition, offset, row) -> first decisions about it; replayed rows do not count"""
    generated: Mapping[str, tuple[Generated, ...]]
    """group -> its claims in the log"""
    records: Mapping[RecordKey, str]
    """(partition, offset) of `trajectories` -> sha256"""
    attempts: frozenset[str] = frozenset()
    """checkpoints that versions name"""
    weights_sha256: str = ""
    """of the newest version"""


def read_evidence(run: RunDirectory, summary: Mapping[str, Any], found: Traces) -> Evidence:
    """Start the run's broker once more and read everything."""
    config = run.stored_config()
    assert config is not None, f"{run.path} holds no configuration"
    fates: dict[str, list[GroupFate]] = {}
    rows: Counter[tuple[int, int, int]] = Counter()
    generated: dict[str, list[Generated]] = {}
    records: dict[RecordKey, str] = {}
    joins: Counter[str] = Counter()
    attempts: set[str] = set()
    with reading_broker(config, run) as bootstrap:
        at = opened(config, run, bootstrap)
        log, fold = at.log(), PolicyFold()
        for entry in log.policy(fold):
            if isinstance(entry.event, WorkerJoined):
                joins[entry.event.worker] += 1
            elif isinstance(entry.event, VersionPublished):
                attempts.add(entry.event.manifest_uri.split("/")[1])
        for transaction in log.transactions():
            for row in transaction.decisions:
                if row.subject is Subject.GROUP and row.group_id is not None:
                    fate = GroupFate(decision=row.decision, reason=row.reason, decided_us=row.consumed_at_us)
                    fates.setdefault(row.group_id, []).append(fate)
                elif row.subject is Subject.TRAJECTORY and row.decision is not Decision.REPLAYED:
                    assert row.partition is not None and row.offset is not None and row.row is not None
                    rows[row.partition, row.offset, row.row] += 1
        for record in log.trajectories():
            records[record.key] = record.value_sha256
            decoded = [row.trajectory for row in record.rows if row.trajectory is not None]
            if decoded:
                claim = Generated(
                    worker=decoded[0].worker_id,
                    incarnation=decoded[0].incarnation,
                    started_us=min(row.started_at_us for row in decoded),
                    finished_us=max(row.finished_at_us for row in decoded),
                    key=record.key,
                )
                generated.setdefault(decoded[0].group_id, []).append(claim)
    assert fold.newest is not None, "the run has no version"
    newest = fold.versions[fold.newest].event
    _, manifest = at.store().fetch(newest.manifest_uri, newest.manifest_sha256)
    return Evidence(
        summary=summary,
        traces=found,
        joins=joins,
        fates={group_id: tuple(decisions) for group_id, decisions in fates.items()},
        row_decisions=dict(rows),
        generated={group_id: tuple(claims) for group_id, claims in generated.items()},
        records=records,
        attempts=frozenset(attempts),
        weights_sha256=manifest.file(WEIGHTS_NAME).sha256,
    )
