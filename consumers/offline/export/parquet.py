"""Parquet files that are written as rows come: bounded memory, bounded open files, row groups of a useful size.

Strings repeat and go through dictionaries; log-probabilities are byte-stream-split, which makes them compressible;
everything is zstd. Which columns those are follows from their types alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_BYTES = 16 * 1024 * 1024
"""In memory, before encoding: large enough to scan fast, small enough to hold several of."""
ROW_GROUP_ROWS = 65_536
_HELD_BYTES = 64 * 1024 * 1024
"""What all partitions of one table may hold back together."""
_OPEN_FILES = 8
_SMALL_ROWS = 8_192
"""Rows of a small table that become one row group."""


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How the columns of this schema are encoded."""
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    return {
        "compression": "zstd",
        # A dictionary of floats is as long as the column; token ids repeat, as strings do.
        "use_dictionary": [path for path, type_ in leaves if not pa.types.is_floating(type_)],
        "use_byte_stream_split": [path for path, type_ in leaves if type_ == pa.float32()],
        "store_schema": True,
    }


def _leaves(path: str, type_: pa.DataType) -> list[tuple[str, pa.DataType]]:
    if pa.types.is_struct(type_):
        return [leaf for field in type_ for leaf in _leaves(f"{path}.{field.name}", field.type)]
    if pa.types.is_map(type_):
        keys, items = _leaves(f"{path}.key_value.key", type_.key_type), type_.item_type
        return keys + _leaves(f"{path}.key_value.value", items)
    if pa.types.is_list(type_):
        return _leaves(f"{path}.list.element", type_.value_type)
    return [(path, type_)]


class SmallTable:
    """One file of rows given as tuples in the order of the schema."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = 0
        self._schema = schema
        self._type = pa.struct(list(schema))
        self._writer = pq.ParquetWriter(path, schema, **parquet_options(schema))
        self._held: list[tuple[Any, ...]] = []

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows."""
        for row in rows:
            self._held.append(tuple(row))
            if len(self._held) >= _SMALL_ROWS:
                self._flush()

    def close(self) -> None:
        """Write what is held and end the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            batch = pa.RecordBatch.from_struct_array(pa.array(self._held, type=self._type))
            self._writer.write_batch(batch.cast(self._schema))
            self.rows += len(self._held)
            self._held = []


class PartitionedTable:
    """Files below `<root>/<key>=<number>/`. Partitions may come in any order and come back."""

    def __init__(self, root: Path, key: str, schema: pa.Schema) -> None:
        self.rows = 0
        self._root = root
        self._key = key
        self._schema = schema
        self._held: dict[int, list[pa.RecordBatch]] = {}
        self._bytes: dict[int, int] = {}
        self._open: OrderedDict[int, pq.ParquetWriter] = OrderedDict()
        self._parts: dict[int, int] = {}

    @property
    def partitions(self) -> int:
        """How many there are."""
        return len(self._parts)

    @property
    def files(self) -> int:
        """How many were begun."""
        return sum(self._parts.values())

    def add(self, number: int, batch: pa.RecordBatch) -> None:
        """Append rows to one partition."""
        self.rows += batch.num_rows
        self._held.setdefault(number, []).append(batch)
        self._bytes[number] = self._bytes.get(number, 0) + batch.nbytes
        if self._bytes[number] >= ROW_GROUP_BYTES or sum(b.num_rows for b in self._held[number]) >= ROW_GROUP_ROWS:
            self._flush(number)
        while sum(self._bytes.values()) > _HELD_BYTES:
            self._flush(max(self._bytes, key=lambda one: self._bytes[one]))

    def close(self) -> None:
        """Write what is held and end every file. A table without rows still has one empty file."""
        for number in sorted(self._held):
            self._flush(number)
        if not self._parts:
            self._writer(0)
        while self._open:
            self._open.popitem()[1].close()

    def _flush(self, number: int) -> None:
        table = pa.Table.from_batches(self._held.pop(number), schema=self._schema)
        del self._bytes[number]
        self._writer(number).write_table(table, row_group_size=ROW_GROUP_ROWS)

    def _writer(self, number: int) -> pq.ParquetWriter:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        part = self._parts.get(number, 0)
        self._parts[number] = part + 1
        path = self._root / f"{self._key}={number}" / f"part-{part:04d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open[number] = pq.ParquetWriter(path, self._schema, **parquet_options(self._schema))
        return self._open[number]
