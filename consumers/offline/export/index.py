"""What the ledger says of each trajectory and group, held as columns: some 60 bytes a row, never a token.

Fed one transaction at a time. Rows are known by their place in the log (partition, offset, row).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from consumers.offline.outcomes import Ends, version_of
from consumers.offline.run_log import LedgerTransaction, RecordKey
from schemas.errors import IllegalState
from schemas.ledger import (
    INVALID_PREFIX,
    AnyLedgerControl,
    Decision,
    DecisionRow,
    LedgerEnded,
    Position,
    Reason,
    Subject,
)
from schemas.trajectory_schema import TIMESTAMP

UNDECIDED = "undecided"
AFTER_END = "after_end"
_ROW_BITS, _OFFSET_BITS = 20, 38
_NO_LAG = -(2**63)
_NOT_OF_THE_GROUP = frozenset((Reason.DUPLICATE, Reason.CONFLICT, Reason.GROUP_CLOSED, Reason.REWARD_FAILED))

JOINED = pa.schema(
    [
        pa.field("decision", pa.utf8(), nullable=False),
        pa.field("reason", pa.utf8()),
        pa.field("policy_lag", pa.int64()),
        pa.field("weight", pa.float64()),
        pa.field("use_count", pa.int32()),
        pa.field("advantage", pa.float64()),
        pa.field("trained_at_version", pa.int64()),
        pa.field("consumed_at", TIMESTAMP),
    ]
)
"""columns that a decision adds to its trajectory"""
_DTYPE = np.dtype(
    [
        ("key", np.uint64), ("decision", np.int8), ("reason", np.int32), ("lag", np.int64), ("weight", np.float64),
        ("advantage", np.float64), ("version", np.int64), ("consumed_us", np.int64), ("uses", np.int32),
    ]
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class GroupOutcome:
    """What became of a group, and the rewards of its rows as they were measured."""

    decision: str = "open"
    reason: str = ""
    detail: str = ""
    decided_at_us: int | None = None
    version: int | None = None
    rows: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """sum of squared differences from the mean"""
    least: float = math.inf
    most: float = -math.inf

    def add_reward(self, reward: float) -> None:
        """Count one row."""
        self.rows += 1
        step = reward - self.mean
        self.mean += step / self.rows
        self.squares += step * (reward - self.mean)
        self.least, self.most = min(self.least, reward), max(self.most, reward)


class DecisionIndex:
    """First decisions by row, replays counted, groups by id."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupOutcome] = {}
        self.position: Position | None = None
        self.known_foreign: set[RecordKey] = set()
        """records that the trainer has refused for their schema version"""
        self._control: AnyLedgerControl | None = None
        self._chunks: list[npt.NDArray[Any]] = []
        self._replayed: list[int] = []
        self._decisions = [Decision.TRAINED.value, Decision.REPLAYED.value, Decision.DROPPED.value]
        self._reasons: dict[str, int] = {}
        self._table: npt.NDArray[Any] | None = None

    @property
    def is_ended(self) -> bool:
        """The last transaction closed the run."""
        return isinstance(self._control, LedgerEnded)

    def add(self, transaction: LedgerTransaction) -> None:
        """Take in one transaction."""
        version = version_of(transaction.control)
        if transaction.control is not None:
            self._control, self.position = transaction.control, transaction.control.position
        rows = []
        for row in transaction.decisions:
            if row.subject is Subject.GROUP:
                self._add_group(row, version)
            elif row.subject is Subject.RECORD:
                self._add_record(row)
            elif row.decision is Decision.REPLAYED:
                self._replayed.append(_key_of(row))
            else:
                rows.append(self._entry(row, version))
                self._add_reward(row)
        if rows:
            self._chunks.append(np.array(rows, dtype=_DTYPE))

    def freeze(self) -> None:
        """The ledger is read: make it searchable."""
        table = np.concatenate([np.empty(0, dtype=_DTYPE), *self._chunks])
        self._chunks = []
        # Stable: of two decisions on one row the first is the one that counts.
        table = table[np.argsort(table["key"], kind="stable")]
        keys, uses = np.unique(np.array(self._replayed, dtype=np.uint64), return_counts=True)
        at = np.searchsorted(table["key"], keys)
        known = at < len(table)
        known[known] = table["key"][at[known]] == keys[known]
        table["uses"][at[known]] += uses[known].astype(np.int32)
        self._table = table

    def join(
        self, partition: npt.NDArray[np.int32], offset: npt.NDArray[np.int64], row: npt.NDArray[np.int32]
    ) -> tuple[list[pa.Array], dict[str, int]]:
        """Columns of JOINED for these rows, and how many are undecided or behind the end."""
        table = self._table
        assert table is not None, "freeze comes first"
        keys = _keys(partition, offset, row)
        at = np.searchsorted(table["key"], keys)
        found = at < len(table)
        found[found] = table["key"][at[found]] == keys[found]
        rows = table[np.where(found, at, 0)] if len(table) else np.zeros(len(keys), dtype=_DTYPE)
        counts = _counting(Ends(self.position, self._control), partition, offset)
        missing = ~found
        codes = np.where(found, rows["decision"], np.where(counts, 3, 4)).astype(np.int32)
        words = pa.array([*self._decisions, UNDECIDED, AFTER_END])
        reasons = pa.array(list(self._reasons) or [""])
        trained = rows["version"] >= 0
        columns = [
            words.take(pa.array(codes)),
            reasons.take(pa.array(rows["reason"], mask=missing)),
            pa.array(rows["lag"], mask=missing | (rows["lag"] == _NO_LAG)),
            pa.array(rows["weight"], mask=missing),
            pa.array(rows["uses"], mask=missing),
            pa.array(rows["advantage"], mask=missing | np.isnan(rows["advantage"])),
            pa.array(rows["version"], mask=missing | ~trained),
            pa.array(rows["consumed_us"], mask=missing).cast(TIMESTAMP),
        ]
        return columns, {
            UNDECIDED: int((missing & counts).sum()), AFTER_END: int((missing & ~counts).sum()),
        }  # fmt: skip

    # ------------------------------------------------------------ inside

    def _entry(self, row: DecisionRow, version: int | None) -> tuple[Any, ...]:
        reason = self._reasons.setdefault(row.reason, len(self._reasons))
        used = row.decision is Decision.TRAINED and version is not None
        return (
            _key_of(row), self._decisions.index(row.decision.value), reason,
            _NO_LAG if row.policy_lag is None else row.policy_lag, row.weight,
            math.nan if row.advantage is None else row.advantage, version if used else -1, row.consumed_at_us,
            row.use_count,
        )  # fmt: skip

    def _add_group(self, row: DecisionRow, version: int | None) -> None:
        group = self._group(row)
        if row.decision is Decision.REPLAYED or group.decided_at_us is not None:
            return
        group.decision, group.reason, group.detail = row.decision.value, row.reason, row.detail
        group.decided_at_us = row.consumed_at_us
        group.version = version if row.decision is Decision.TRAINED else None

    def _add_reward(self, row: DecisionRow) -> None:
        counts = row.reason not in _NOT_OF_THE_GROUP and not row.reason.startswith(INVALID_PREFIX)
        if row.reward is not None and row.group_id is not None and counts:
            self._group(row).add_reward(row.reward)

    def _add_record(self, row: DecisionRow) -> None:
        if row.reason == f"{INVALID_PREFIX}schema_version" and row.partition is not None and row.offset is not None:
            self.known_foreign.add((row.partition, row.offset))

    def _group(self, row: DecisionRow) -> GroupOutcome:
        assert row.group_id is not None, "decisions on groups and rows name their group"
        found = self.groups.get(row.group_id)
        if found is None:
            found = self.groups[row.group_id] = GroupOutcome()
        return found


def open_groups(groups: Mapping[str, GroupOutcome], issued: int) -> int:
    """Groups that were issued and are not decided."""
    return issued - sum(1 for group in groups.values() if group.decided_at_us is not None)


def _key_of(row: DecisionRow) -> int:
    partition, offset, number = row.partition, row.offset, row.row
    if partition is None or offset is None or number is None:
        raise IllegalState(f"the decision on {row.trajectory_id} does not say where its row lies: audit the run")
    if not (0 <= number < 1 << _ROW_BITS and 0 <= offset < 1 << _OFFSET_BITS and 0 <= partition < 32):
        raise IllegalState(f"the decision on {row.trajectory_id} names an impossible place: audit the run")
    return (partition << (_ROW_BITS + _OFFSET_BITS)) | (offset << _ROW_BITS) | number


def _keys(
    partition: npt.NDArray[np.int32], offset: npt.NDArray[np.int64], row: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint64]:
    high = partition.astype(np.uint64) << np.uint64(_ROW_BITS + _OFFSET_BITS)
    low = (offset.astype(np.uint64) << np.uint64(_ROW_BITS)) | row.astype(np.uint64)
    return np.asarray(high | low, dtype=np.uint64)


def _counting(ends: Ends, partition: npt.NDArray[np.int32], offset: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Rows that are owed a decision: all but those behind the end of a run."""
    if not ends.is_ended:
        return np.ones(len(partition), dtype=np.bool_)
    return np.array([ends.counts(p, o) for p, o in zip(partition.tolist(), offset.tolist(), strict=True)])
