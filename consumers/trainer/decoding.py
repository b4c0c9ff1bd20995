"""Records of trajectories, decoded: once, by whoever sees them first.

That is the reader's own thread in a real trainer, which decodes while the service computes, and the service itself
where a reader does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.ports import Record
from schemas.errors import InvalidRecord
from schemas.trajectory import DecodedRow
from schemas.trajectory_codec import TrajectoryLimits, decode_group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord(Record):
    """A record and what it holds: rows, each with its verdict, or what is wrong with it as a whole."""

    rows: tuple[DecodedRow, ...]
    fault: InvalidRecord | None


def read_group(record: Record, limits: TrajectoryLimits) -> GroupRecord:
    """The record decoded, or as it is when it was decoded already. Bad bytes are a `fault`, never raised."""
    if isinstance(record, GroupRecord):
        return record
    rows: tuple[DecodedRow, ...] = ()
    fault = None
    try:
        rows = decode_group(record.value, record.headers, limits)
    except InvalidRecord as error:
        fault = error
    return GroupRecord(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value,
        headers=record.headers,
        timestamp_ms=record.timestamp_ms,
        rows=rows,
        fault=fault,
    )
