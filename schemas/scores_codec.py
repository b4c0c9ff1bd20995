"""Score records: the trainer's own log-probabilities of what it trained on, per token.

With them another objective can be evaluated on past batches without the weights. Values are stored as
measured, whatever they are; only their lengths are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.arrow_columns import read_complete_rows
from schemas.arrow_stream import Column, Format, read_batch, write_rows
from schemas.errors import InvalidRecord
from schemas.headers import Headers
from schemas.trajectory import FloatArray

SCORES = Format(
    "scores",
    1,
    0,
    "ScoresRecorded",
    (
        Column(name="trajectory_id", type=pa.utf8(), doc="whose tokens"),
        Column(name="version_in", type=pa.int64(), doc="weights at the start of the step"),
        Column(name="proximal", type=pa.list_(pa.float32()), doc="[T] under those weights"),
        Column(
            name="reference", type=pa.list_(pa.float32()), doc="[T] under the reference policy; null without KL",
            nullable=True,
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """Scores of one trajectory in one training step."""

    trajectory_id: str
    version_in: int
    proximal: FloatArray
    """[T] under the weights at the start of the step"""
    reference: FloatArray | None = None
    """[T] under the frozen reference, when KL is on"""


def encode_scores(rows: Sequence[ScoreRow]) -> bytes:
    """The value of one record. InvalidRecord for anything a reader would refuse."""
    for row in rows:
        for name, array in (("proximal", row.proximal), ("reference", row.reference)):
            if array is not None and (array.dtype != np.float32 or array.ndim != 1):
                raise InvalidRecord(f"schema_type:{name}", f"{row.trajectory_id}: need a 1-d float32 array")
        _check(row)
    return write_rows(SCORES, [(row.trajectory_id, row.version_in, row.proximal, row.reference) for row in rows])


def scores_headers(rows: Sequence[ScoreRow], value: bytes, source: str, at_us: int) -> Headers:
    """Headers of the record with this value."""
    return SCORES.headers(rows=len(rows), value=value, source=source, at_us=at_us)


def decode_scores(value: bytes | None, headers: Headers) -> tuple[ScoreRow, ...]:
    """Read one record; InvalidRecord says what is wrong."""
    decoded = []
    for row in read_complete_rows(SCORES, read_batch(SCORES, value, headers)):
        score = ScoreRow(trajectory_id=row[0], version_in=row[1], proximal=row[2], reference=row[3])
        _check(score)
        decoded.append(score)
    return tuple(decoded)


def _check(row: ScoreRow) -> None:
    if row.reference is not None and len(row.reference) != len(row.proximal):
        raise InvalidRecord(
            "length_mismatch",
            f"{row.trajectory_id}: {len(row.proximal)} proximal, {len(row.reference)} reference log-probabilities",
        )
