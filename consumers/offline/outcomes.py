"""Decisions of the ledger by the place of their row: what trace, samples and summaries join the log with."""

from __future__ import annotations

from dataclasses import dataclass

from consumers.offline.run_log import LedgerTransaction, RunLog
from schemas.ledger import AnyLedgerControl, Decision, DecisionRow, LedgerEnded, Position, StepCompleted, Subject

RowKey = tuple[int, int, int]
"""(partition, offset, row)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A decision and where it was written."""

    decision: DecisionRow
    transaction: int
    ledger_offset: int
    version: int | None
    """version the transaction made"""

    @property
    def words(self) -> str:
        """In a few words."""
        row = self.decision
        if row.decision is Decision.DROPPED:
            return f"dropped: {row.reason}" + (f" ({row.detail})" if row.detail else "")
        return f"{row.decision.value} into version {self.version}"


def version_of(control: AnyLedgerControl | None) -> int | None:
    """The version a transaction made."""
    return control.version_out if isinstance(control, StepCompleted) else None


def outcome(transaction: LedgerTransaction, decision: DecisionRow) -> Outcome:
    """One decision with its place."""
    return Outcome(
        decision=decision,
        transaction=transaction.number,
        ledger_offset=transaction.offset,
        version=version_of(transaction.control),
    )


def first_outcomes(run_log: RunLog, *, version: int | None = None) -> dict[RowKey, Outcome]:
    """First decision of every row; with `version` only of the transaction that made it, replays included."""
    found: dict[RowKey, Outcome] = {}
    for transaction in run_log.transactions():
        if version is not None and version_of(transaction.control) != version:
            continue
        for row in transaction.decisions:
            key = row_key(row)
            if key is not None and (version is not None or row.decision is not Decision.REPLAYED):
                found.setdefault(key, outcome(transaction, row))
    return found


def row_key(row: DecisionRow) -> RowKey | None:
    """Where the decided row lies; None for groups and records."""
    if row.subject is not Subject.TRAJECTORY or row.partition is None or row.offset is None or row.row is None:
        return None
    return row.partition, row.offset, row.row


class Ends:
    """Which trajectories records count: those below the last Position's next offsets."""

    def __init__(self, position: Position | None, control: AnyLedgerControl | None) -> None:
        self.is_ended = isinstance(control, LedgerEnded)
        self._next = {} if position is None else {p: q.next_offset for p, q in position.partitions.items()}

    def counts(self, partition: int, offset: int) -> bool:
        """Behind the end of a run a row counts for nothing; while the run is under way every row counts."""
        return not self.is_ended or offset < self._next.get(partition, 0)
