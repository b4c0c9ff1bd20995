"""Hashes that name what a version was trained on: of one row, and of a batch of rows.

`row_sha256` is sha256 over TAG and the canonical bytes of the row's values in the order of the format's
columns, so it depends on the values alone: not on the record, the order of columns in it, its padding, or
its other rows. Canonical bytes of a value (all little-endian):

    null    b"N"                          int    b"I" int64        str    b"S" uint32 bytes, UTF-8
    float   b"F" float64, -0.0 as 0.0     bool   b"T" or b"B"      array  b"A" dtype character, uint32 count, items
    tuple   b"L" uint32 count, values (a list with a null in it, a struct, a map's pairs in key order)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from schemas.arrow_stream import Row
from schemas.trajectory import Trajectory
from schemas.trajectory_schema import GROUP_COLUMNS, to_row

TAG = b"driftlog.row/1"

_INT = struct.Struct("<cq").pack
_FLOAT = struct.Struct("<cd").pack
_SIZED = struct.Struct("<cI").pack
_COUNT = struct.Struct("<I").pack
_ARRAY = {np.dtype(np.int32): b"Ai", np.dtype(np.float32): b"Af", np.dtype(np.bool_): b"A?"}


def group_prefix(group_part: Row) -> bytes:
    """Canonical bytes of what the members of a group share; the start of every member's bytes."""
    out: list[Any] = [TAG]
    _append(out, group_part)
    return b"".join(out)


def finish_row(prefix: bytes, row_part: Row) -> str:
    """sha256 hex of a row, given its group's prefix and the values after the group columns."""
    out: list[Any] = [prefix]
    _append(out, row_part)
    return hashlib.sha256(b"".join(out)).hexdigest()


def row_sha256(trajectory: Trajectory) -> str:
    """The hash that `decode_group` gives for this row."""
    row = to_row(trajectory)
    return finish_row(group_prefix(row[:GROUP_COLUMNS]), row[GROUP_COLUMNS:])


def batch_digest(row_hashes: Iterable[str]) -> str:
    """sha256 hex over the row hashes of a batch in order: what StepCompleted records."""
    return hashlib.sha256("".join(row_hashes).encode()).hexdigest()


def _append(out: list[Any], values: Iterable[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is str:
            data = value.encode()
            out += (_SIZED(b"S", len(data)), data)
        elif kind is int:
            out.append(_INT(b"I", value))
        elif kind is float:
            out.append(_FLOAT(b"F", value + 0.0))
        elif kind is tuple:
            out.append(_SIZED(b"L", len(value)))
            _append(out, value)
        elif value is None:
            out.append(b"N")
        elif kind is np.ndarray:
            # (join copies contiguous memory only)
            out += (_ARRAY[value.dtype], _COUNT(len(value)), value if value.flags.c_contiguous else value.copy())
        elif kind is bool:
            out.append(b"T" if value else b"B")
        else:
            raise TypeError(f"no canonical bytes for {kind.__name__}")
