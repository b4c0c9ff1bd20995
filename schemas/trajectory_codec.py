"""Trajectory records: rows of one group to the bytes of a record, and untrusted bytes back to checked rows.

A fault of the record (bytes, schema, headers) raises InvalidRecord: no row of it is used. A fault of a row
costs that row only; its siblings decode. Each kind of fault has its own code; the ledger keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from schemas.arrow_columns import Columns
from schemas.arrow_stream import Row, build_batch, read_batch, write_batch
from schemas.errors import InvalidRecord
from schemas.headers import Headers
from schemas.row_hash import batch_digest, finish_row, group_prefix, row_sha256
from schemas.trajectory import DecodedRow, Fingerprint, Sampling, Trajectory
from schemas.trajectory_schema import (
    GROUP_COLUMNS,
    TRAJECTORY,
    fingerprint_from_row,
    from_row,
    sampling_from_row,
    to_row,
)
from schemas.trajectory_validate import (
    WRITER_LIMITS,
    Fault,
    TrajectoryLimits,
    clean_tokens,
    group_fault,
    member_fault,
    null_fault,
)

__all__ = [
    "DecodedRow",
    "TrajectoryLimits",
    "batch_digest",
    "batch_row_hashes",
    "decode_group",
    "encode_group",
    "group_message_headers",
    "row_sha256",
]

_GROUP_ID = TRAJECTORY.names.index("group_id")
_TRAJECTORY_ID = TRAJECTORY.names.index("trajectory_id")
_CLAIM_ID = TRAJECTORY.names.index("claim_id")
_SAMPLING = TRAJECTORY.names.index("sampling")
_FINGERPRINT = TRAJECTORY.names.index("fingerprint")
_REWARD_PARTS = TRAJECTORY.names.index("reward_parts")
_METADATA = TRAJECTORY.names.index("metadata")
_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)


def encode_group(rows: Sequence[Trajectory]) -> bytes:
    """The value of one record. Raises InvalidRecord, with the reader's own code, for anything a reader would refuse."""
    if not rows:
        raise InvalidRecord("no_rows", "an empty group is not published: count it instead")
    groups = {trajectory.group_id for trajectory in rows}
    if len(groups) > 1:
        raise InvalidRecord("several_groups", f"one record holds one group, not {sorted(groups)[:3]}")
    for trajectory in rows:
        _check_dtypes(trajectory)
    raw = [to_row(trajectory) for trajectory in rows]
    batch = build_batch(TRAJECTORY, raw)
    columns = Columns(TRAJECTORY, batch)
    may_have_nulls = columns.may_have_nulls
    clean = not may_have_nulls and _tokens_are_clean(columns, WRITER_LIMITS)
    shared: Row | None = None
    for number, (trajectory, row) in enumerate(zip(rows, raw, strict=True)):
        # Members share the group columns: those are checked when they change, which they normally do not.
        fault = null_fault(row) if may_have_nulls else None
        fault = fault or (None if row[:GROUP_COLUMNS] == shared else group_fault(trajectory))
        shared = row[:GROUP_COLUMNS]
        fault = fault or member_fault(trajectory, WRITER_LIMITS, tokens_are_clean=clean)
        if fault is not None:
            raise InvalidRecord(fault[0], f"row {number} ({trajectory.trajectory_id}): {fault[1]}")
    value = write_batch(TRAJECTORY, batch)
    if len(value) > WRITER_LIMITS.max_bytes:
        raise InvalidRecord("too_large", f"{len(value)} bytes, the limit is {WRITER_LIMITS.max_bytes}: split the group")
    return value


def group_message_headers(
    rows: Sequence[Trajectory], value: bytes, source: str, traceparent: str | None = None
) -> Headers:
    """Headers of the record with this value; the same claim and rows give the same ce_id again."""
    first = rows[0]
    return TRAJECTORY.headers(
        rows=len(rows),
        value=value,
        source=source,
        at_us=first.published_at_us,
        event_id=f"{first.claim_id}:{first.group_id}/{first.index_in_group}+{len(rows)}",
        traceparent=traceparent,
    )


def decode_group(value: bytes | None, headers: Headers, limits: TrajectoryLimits) -> tuple[DecodedRow, ...]:
    """Every row of a record, each with its verdict. InvalidRecord when the record as a whole cannot be used."""
    batch = read_batch(TRAJECTORY, value, headers, max_bytes=limits.max_bytes, max_rows=limits.max_rows)
    columns = Columns(TRAJECTORY, batch)
    rows = columns.rows()
    groups = {row[_GROUP_ID] for row in rows} - {None}
    if len(groups) > 1:
        raise InvalidRecord("several_groups", f"one record holds one group, not {sorted(groups)[:3]}")
    decoder = _RowDecoder(columns, limits)
    return tuple([decoder.decode(number, row) for number, row in enumerate(rows)])


def batch_row_hashes(batch: pa.RecordBatch) -> list[str]:
    """row_sha256 of each row of a batch with (at least) the columns of TRAJECTORY, as `decode_group` gives them."""
    columns = batch.select(list(TRAJECTORY.names))
    hashes: list[str] = []
    group: Row | None = None
    prefix = b""
    # A copy without offsets into larger buffers: `Columns` reads buffers from their start.
    for row in Columns(TRAJECTORY, pa.concat_batches([columns])).rows():
        if row[:GROUP_COLUMNS] != group:
            group = row[:GROUP_COLUMNS]
            prefix = group_prefix(group)
        hashes.append(finish_row(prefix, row[GROUP_COLUMNS:]))
    return hashes


class _RowDecoder:
    """Decodes the rows of one record; what follows from the group columns alone is worked out when they change."""

    def __init__(self, columns: Columns, limits: TrajectoryLimits) -> None:
        self._limits = limits
        self._may_have_nulls = columns.may_have_nulls
        self._tokens_are_clean = not self._may_have_nulls and _tokens_are_clean(columns, limits)
        self._group: Row | None = None
        self._hash_prefix = b""
        self._sampling: Sampling | None = None
        self._fingerprint: Fingerprint | None = None
        self._group_fault: Fault | None = None

    def decode(self, number: int, row: Row) -> DecodedRow:
        group = row[:GROUP_COLUMNS]
        if group != self._group:
            self._group, self._hash_prefix = group, group_prefix(group)
            self._sampling = self._fingerprint = self._group_fault = None
        trajectory = None
        fault = null_fault(row) if self._may_have_nulls else None
        if fault is None:
            trajectory, fault = self._build(row)
        return DecodedRow(
            row=number,
            row_sha256=finish_row(self._hash_prefix, row[GROUP_COLUMNS:]),
            group_id=row[_GROUP_ID] or "",
            trajectory_id=row[_TRAJECTORY_ID] or "",
            claim_id=row[_CLAIM_ID] or "",
            trajectory=trajectory if fault is None else None,
            code="" if fault is None else fault[0],
            detail="" if fault is None else fault[1],
        )

    def _build(self, row: Row) -> tuple[Trajectory, Fault | None]:
        is_first = self._sampling is None or self._fingerprint is None
        if self._sampling is None or self._fingerprint is None:
            self._sampling = sampling_from_row(row[_SAMPLING])
            self._fingerprint = fingerprint_from_row(row[_FINGERPRINT])
        trajectory = from_row(row, self._sampling, self._fingerprint)
        if is_first:
            self._group_fault = group_fault(trajectory)
        fault = self._group_fault
        if fault is None and (len(row[_REWARD_PARTS]) > 1 or len(row[_METADATA]) > 1):
            fault = _duplicate_key_fault(trajectory, row)
        return trajectory, fault or member_fault(trajectory, self._limits, tokens_are_clean=self._tokens_are_clean)


def _duplicate_key_fault(trajectory: Trajectory, row: Row) -> Fault | None:
    for name, position in (("reward_parts", _REWARD_PARTS), ("metadata", _METADATA)):
        if len(getattr(trajectory, name)) != len(row[position]):
            return f"duplicate_key:{name}", f"column {name} has the same key twice"
    return None


def _tokens_are_clean(columns: Columns, limits: TrajectoryLimits) -> bool:
    prompt_ids, ids, logprobs, mask = [
        columns.flat(name) for name in ("prompt_token_ids", "token_ids", "logprobs", "loss_mask")
    ]
    # Laid end to end, rows of unequal lengths would meet each other's masks.
    aligned = np.count_nonzero(mask) == len(mask) or columns.same_lengths("logprobs", "loss_mask")
    return aligned and clean_tokens(prompt_ids, ids, logprobs, mask, limits.vocabulary_size)


def _check_dtypes(t: Trajectory) -> None:
    for name, array, dtype in (
        ("prompt_token_ids", t.prompt_token_ids, _INT32),
        ("token_ids", t.token_ids, _INT32),
        ("logprobs", t.logprobs, _FLOAT32),
        ("loss_mask", t.loss_mask, _BOOL),
    ):
        # The type says so already; a wider float would be narrowed and a list accepted without a word.
        if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != 1:
            raise InvalidRecord(f"schema_type:{name}", f"{t.trajectory_id}: {name} must be a 1-d {dtype} array")
