"""Decision records of the ledger: one row for each trajectory, group or undecodable record that was decided.

Control records of the same topic are JSON (schemas/ledger.py); the header ce_type tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from schemas.arrow_columns import read_complete_rows
from schemas.arrow_stream import Column, Format, Row, read_batch, write_rows
from schemas.errors import InvalidRecord
from schemas.headers import Headers
from schemas.ledger import INVALID_PREFIX, Decision, DecisionRow, Reason, Subject
from schemas.trajectory_schema import TIMESTAMP

DECISIONS = Format(
    "decisions",
    1,
    0,
    "DecisionsRecorded",
    (
        Column(name="subject", type=pa.utf8(), doc="trajectory, group or record"),
        Column(name="group_id", type=pa.utf8(), doc="null for records", nullable=True),
        Column(name="trajectory_id", type=pa.utf8(), doc="null for groups and records", nullable=True),
        Column(name="partition", type=pa.int32(), doc="of trajectories; null for groups", nullable=True),
        Column(name="offset", type=pa.int64(), doc="in that partition", nullable=True),
        Column(name="row", type=pa.int32(), doc="inside the record's batch", nullable=True),
        Column(name="row_sha256", type=pa.utf8(), doc="of the row's canonical bytes", nullable=True),
        Column(name="decision", type=pa.utf8(), doc="trained, replayed or dropped"),
        Column(name="reason", type=pa.utf8(), doc="empty unless dropped; invalid:<code> for rows that fail validation"),
        Column(name="policy_lag", type=pa.int64(), doc="training steps, of the oldest trained token", nullable=True),
        Column(name="weight", type=pa.float64(), doc="from age; 0 when dropped"),
        Column(name="use_count", type=pa.int32(), doc="1 for the first use, +1 for each replay; 0 when dropped"),
        Column(name="reward", type=pa.float64(), doc="as measured", nullable=True),
        Column(name="advantage", type=pa.float64(), doc="of the first use", nullable=True),
        Column(name="completion_tokens", type=pa.int32(), doc="T", nullable=True),
        Column(name="consumed_at", type=TIMESTAMP, doc="trainer clock"),
        Column(name="detail", type=pa.utf8(), doc="words for a person"),
    ),
)
_REASONS = frozenset(reason.value for reason in Reason)


def encode_decisions(rows: Sequence[DecisionRow]) -> bytes:
    """The value of one record. InvalidRecord for anything a reader would refuse, an empty list among it."""
    for number, row in enumerate(rows):
        _check(number, row)
    return write_rows(DECISIONS, [_to_row(row) for row in rows])


def decisions_headers(rows: Sequence[DecisionRow], value: bytes, source: str) -> Headers:
    """Headers of the record with this value."""
    return DECISIONS.headers(rows=len(rows), value=value, source=source, at_us=rows[0].consumed_at_us)


def decode_decisions(value: bytes | None, headers: Headers) -> tuple[DecisionRow, ...]:
    """Read one record; InvalidRecord when any of it is wrong (the ledger is ours: there are no half-good records)."""
    rows = read_complete_rows(DECISIONS, read_batch(DECISIONS, value, headers))
    decisions = tuple([_from_row(row) for row in rows])
    for number, row in enumerate(decisions):
        _check(number, row)
    return decisions


def _to_row(r: DecisionRow) -> Row:
    return (
        r.subject.value, r.group_id, r.trajectory_id, r.partition, r.offset, r.row, r.row_sha256, r.decision.value,
        r.reason, r.policy_lag, r.weight, r.use_count, r.reward, r.advantage, r.completion_tokens,
        r.consumed_at_us, r.detail,
    )  # fmt: skip


def _from_row(row: Row) -> DecisionRow:
    try:
        subject, decision = Subject(row[0]), Decision(row[7])
    except ValueError as error:
        raise InvalidRecord("bad_decision", str(error)) from error
    return DecisionRow(
        subject=subject,
        group_id=row[1],
        trajectory_id=row[2],
        partition=row[3],
        offset=row[4],
        row=row[5],
        row_sha256=row[6],
        decision=decision,
        reason=row[8],
        policy_lag=row[9],
        weight=row[10],
        use_count=row[11],
        reward=row[12],
        advantage=row[13],
        completion_tokens=row[14],
        consumed_at_us=row[15],
        detail=row[16],
    )


def _check(number: int, r: DecisionRow) -> None:
    problem = _problem(r)
    if problem:
        raise InvalidRecord("bad_decision", f"row {number} ({r.trajectory_id or r.group_id or r.offset}): {problem}")


def _problem(r: DecisionRow) -> str:
    if r.subject is Subject.GROUP and r.group_id is None:
        return "a group's decision needs its id"
    if r.subject is not Subject.GROUP and (r.partition is None or r.offset is None):
        return f"the decision on a {r.subject.value} needs partition and offset"
    if r.subject is Subject.TRAJECTORY and (r.row is None or r.row_sha256 is None):
        return "a trajectory's decision needs row and row_sha256"
    if r.reason not in _REASONS and not (r.reason.startswith(INVALID_PREFIX) and len(r.reason) > len(INVALID_PREFIX)):
        return f"unknown reason {r.reason!r}"
    if (r.decision is Decision.DROPPED) != bool(r.reason):
        return f"decision {r.decision.value} with reason {r.reason!r}"
    for name, value in (("weight", r.weight), ("reward", r.reward), ("advantage", r.advantage)):
        if value is not None and not math.isfinite(value):
            return f"{name} is {value}"
    return ""
