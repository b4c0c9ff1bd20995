"""The trajectories of a log as large record batches: validated in full, column by column, no Python object a row.

A batch holds whole records. A row that is not evidently fine, or a record that is not of the usual shape, goes the
trainer's way (`decode_group`): the verdicts are the same, only cheaper to come by. Memory is one batch and its
records, whatever the length of the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from consumers.offline.run_log import RecordKey, RunLog
from infra.ports import Record
from schemas.arrow_stream import build_batch, read_batch
from schemas.errors import IllegalState, InvalidRecord
from schemas.topics import TopicName, topic
from schemas.trajectory_codec import decode_group
from schemas.trajectory_columns import evident_rows
from schemas.trajectory_schema import TIMESTAMP, TRAJECTORY, to_row

BATCH_ROWS = 1_024
"""Enough that columns cost little beside rows. Records, their copy and the batch before are held at once."""
BATCH_BYTES = 16 * 1024 * 1024
"""Long completions fill a batch before the rows do."""

PLACE = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
        pa.field("appended_at", TIMESTAMP, nullable=False),
    ]
)
"""where a row lies in the log, and the broker's stamp of its record"""
ROWS = pa.schema([*PLACE, *TRAJECTORY.schema])
"""columns of every batch"""
NO_ROWS = pa.RecordBatch.from_pylist([], schema=ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A row, or a whole record (row None), that fails validation."""

    partition: int
    offset: int
    row: int | None
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One record of a partition, to be known again by."""

    offset: int
    value_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryBatch:
    """The rows of some whole records, in the order they were read: offset order within a partition."""

    rows: pa.RecordBatch
    """columns of ROWS; may be empty when every record was refused"""
    refused: tuple[RefusedRow, ...]
    next_offsets: Mapping[int, int]
    """partition -> every record below was handed out, in this batch or before; only partitions read so far"""
    edges: Mapping[int, tuple[Edge, Edge]]
    """partition -> first and last record of this batch"""


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one record."""

    rows: pa.RecordBatch
    numbers: npt.NDArray[np.int32]
    """of the rows inside the record"""


_NO_ROWS = pa.RecordBatch.from_pylist([], schema=TRAJECTORY.schema)


def trajectory_batches(
    run_log: RunLog,
    *,
    start: Mapping[int, int] | None = None,
    known_foreign: frozenset[RecordKey] = frozenset(),
    batch_rows: int = BATCH_ROWS,
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[TrajectoryBatch]:
    """Every trajectories record from `start` (partition -> offset) on, in batches of at least `batch_rows` rows.

    A record of a schema version that this build does not know is an IllegalState, unless the trainer has refused it
    as such (`known_foreign`): a reader that skipped what it is too old for would report half a run as a whole one.
    """
    held: list[Record] = []
    parts: list[pa.RecordBatch | InvalidRecord] = []
    rows = size = 0
    next_offsets: dict[int, int] = dict(start or {})
    for record in run_log.records(TopicName.TRAJECTORIES, start):
        part = _read(record, run_log, known_foreign)
        held.append(record)
        parts.append(part)
        rows += part.num_rows if isinstance(part, pa.RecordBatch) else 0
        size += len(record.value or b"")
        if rows >= batch_rows or size >= batch_bytes:
            batch = _batch(held, parts, run_log, next_offsets)
            # The records go before their copy is handed out: one of the two is enough to hold.
            held, parts, rows, size = [], [], 0, 0
            yield batch
            del batch
    if held:
        yield _batch(held, parts, run_log, next_offsets)


def places_of(rows: pa.RecordBatch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Partition, offset and row of each row."""
    partition, offset, row = [rows.column(name).to_numpy() for name in ("partition", "offset", "row")]
    return partition, offset, row


def _read(record: Record, run_log: RunLog, known_foreign: frozenset[RecordKey]) -> pa.RecordBatch | InvalidRecord:
    limits = run_log.limits
    try:
        return read_batch(
            TRAJECTORY, record.value, record.headers, max_bytes=limits.max_bytes, max_rows=limits.max_rows
        )
    except InvalidRecord as error:
        if error.code == "schema_version" and (record.partition, record.offset) not in known_foreign:
            raise IllegalState(
                f"{topic(run_log.run, TopicName.TRAJECTORIES)}[{record.partition}]@{record.offset}: {error.message}; "
                "nothing was skipped"
            ) from error
        return error


def _batch(
    held: Sequence[Record],
    parts: Sequence[pa.RecordBatch | InvalidRecord],
    run_log: RunLog,
    next_offsets: dict[int, int],
) -> TrajectoryBatch:
    refused: list[RefusedRow] = []
    for record in held:
        next_offsets[record.partition] = record.offset + 1
    usual = [isinstance(part, pa.RecordBatch) and part.schema.equals(TRAJECTORY.schema) for part in parts]
    whole = pa.concat_batches([part for part, is_usual in zip(parts, usual, strict=True) if is_usual] or [_NO_ROWS])
    evident = _evident(whole, parts, usual, run_log)
    if all(evident):
        counts = [part.num_rows for part in parts if isinstance(part, pa.RecordBatch)]
        rows = _placed(held, counts, [np.arange(count, dtype=np.int32) for count in counts], whole)
    else:
        rows = _sifted(held, parts, evident, run_log, refused)
    return TrajectoryBatch(rows=rows, refused=tuple(refused), next_offsets=dict(next_offsets), edges=_edges(held))


def _evident(
    whole: pa.RecordBatch, parts: Sequence[pa.RecordBatch | InvalidRecord], usual: Sequence[bool], run_log: RunLog
) -> list[bool]:
    """Per record: it has our very schema, and no row of it can have a fault. `whole`: the usual ones' rows."""
    numbers = [number for number, is_usual in enumerate(usual) if is_usual]
    counts = [
        part.num_rows
        for part, is_usual in zip(parts, usual, strict=True)
        if is_usual and isinstance(part, pa.RecordBatch)
    ]
    record_of_row = np.repeat(np.array(numbers, dtype=np.int64), counts)
    fine = evident_rows(whole, record_of_row, run_log.limits)
    doubtful = set(record_of_row[~fine].tolist())
    return [is_usual and number not in doubtful for number, is_usual in enumerate(usual)]


def _sifted(
    held: Sequence[Record],
    parts: Sequence[pa.RecordBatch | InvalidRecord],
    evident: Sequence[bool],
    run_log: RunLog,
    refused: list[RefusedRow],
) -> pa.RecordBatch:
    """The rows that are fine; the others join `refused`."""
    chosen: list[tuple[Record, _Part]] = []
    for record, part, is_evident in zip(held, parts, evident, strict=True):
        if isinstance(part, InvalidRecord):
            refused.append(_refused(record, None, part.code, part.message))
        elif is_evident:
            chosen.append((record, _Part(part, np.arange(part.num_rows, dtype=np.int32))))
        else:
            chosen += [(record, kept) for kept in _judged(record, run_log, refused)]
    return _placed(
        [record for record, _ in chosen],
        [part.rows.num_rows for _, part in chosen],
        [part.numbers for _, part in chosen],
        pa.concat_batches([part.rows for _, part in chosen] or [_NO_ROWS]),
    )


def _judged(record: Record, run_log: RunLog, refused: list[RefusedRow]) -> list[_Part]:
    """The rows of a record that decode one by one; the others join `refused`."""
    try:
        decoded = decode_group(record.value, record.headers, run_log.limits)
    except InvalidRecord as error:
        refused.append(_refused(record, None, error.code, error.message))
        return []
    refused += [_refused(record, row.row, row.code, row.detail) for row in decoded if row.trajectory is None]
    good = [(row.row, row.trajectory) for row in decoded if row.trajectory is not None]
    if not good:
        return []
    rows = build_batch(TRAJECTORY, [to_row(trajectory) for _, trajectory in good])
    return [_Part(rows, np.array([number for number, _ in good], dtype=np.int32))]


def _refused(record: Record, row: int | None, code: str, detail: str) -> RefusedRow:
    return RefusedRow(partition=record.partition, offset=record.offset, row=row, code=code, detail=detail[:300])


def _placed(
    records: Sequence[Record], counts: Sequence[int], numbers: Sequence[npt.NDArray[np.int32]], rows: pa.RecordBatch
) -> pa.RecordBatch:
    """`rows` with the place of each: `counts[i]` rows of record i, their numbers inside it."""
    partitions, offsets, appended_us = [
        np.repeat(np.array(values, dtype=dtype), counts)
        for values, dtype in (
            ([record.partition for record in records], np.int32),
            ([record.offset for record in records], np.int64),
            ([record.timestamp_ms * 1000 for record in records], np.int64),
        )
    ]
    inside = np.concatenate([np.empty(0, dtype=np.int32), *numbers])
    place = [pa.array(partitions), pa.array(offsets), pa.array(inside), pa.array(appended_us).cast(TIMESTAMP)]
    return pa.RecordBatch.from_arrays([*place, *rows.columns], schema=ROWS)


def _edges(held: Sequence[Record]) -> dict[int, tuple[Edge, Edge]]:
    first: dict[int, Record] = {}
    last: dict[int, Record] = {}
    for record in held:
        first.setdefault(record.partition, record)
        last[record.partition] = record
    return {partition: (edge_of(first[partition]), edge_of(last[partition])) for partition in first}


def edge_of(record: Record) -> Edge:
    """What a record is known again by."""
    return Edge(offset=record.offset, value_sha256=hashlib.sha256(record.value or b"").hexdigest())
