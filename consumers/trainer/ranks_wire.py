"""Commands between ranks as bytes: one JSON line, then the token arrays as they lie in memory. Never pickle.

Both ends are processes of one launch on like machines, so there is no version in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from consumers.trainer.tensors import RowData

_ARRAYS = (("prompt", np.int32), ("completion", np.int32), ("behaviour", np.float32), ("loss_mask", np.bool_))
_PLAIN = ("row_id", "truncated", "temperature", "advantage", "weight", "policy_lag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What every rank shall do now."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """plain JSON values"""
    rows: Sequence[RowData] = ()


def encode_command(command: Command) -> bytes:
    """The bytes of a command; floats keep every bit."""
    head = {
        "name": command.name,
        "arguments": command.arguments,
        "rows": [{name: getattr(row, name) for name in _PLAIN} for row in command.rows],
        "lengths": [[len(getattr(row, name)) for name, _ in _ARRAYS] for row in command.rows],
    }
    columns = (
        np.concatenate([np.asarray(getattr(row, name), dtype=kind) for row in command.rows]).tobytes()
        if command.rows
        else b""
        for name, kind in _ARRAYS
    )
    return json.dumps(head).encode() + b"\n" + b"".join(columns)


def decode_command(data: bytes) -> Command:
    """The command again."""
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    lengths = np.asarray(head["lengths"], dtype=np.int64).reshape(-1, len(_ARRAYS))
    columns: dict[str, list[Any]] = {}
    start = 0
    for place, (name, kind) in enumerate(_ARRAYS):
        total = int(lengths[:, place].sum())
        end = start + total * np.dtype(kind).itemsize
        flat: npt.NDArray[Any] = np.frombuffer(body[start:end], dtype=kind)
        columns[name] = np.split(flat, np.cumsum(lengths[:, place])[:-1]) if len(lengths) else []
        start = end
    rows = [
        RowData(**plain, **{name: columns[name][row] for name, _ in _ARRAYS}) for row, plain in enumerate(head["rows"])
    ]
    return Command(name=head["name"], arguments=head["arguments"], rows=rows)
