"""From a validated batch to row tuples of plain values, straight from the column buffers.

Python types: str, int, float, bool; a list of primitives is a read-only numpy array at top level and a tuple
inside a struct; structs are tuples; maps are tuples of (key, value) sorted by key; null is None everywhere,
so an array with a null in it becomes a tuple. Everything is copied: nothing keeps the record's bytes alive.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.arrow_stream import Format, Row
from schemas.errors import InvalidRecord
from schemas.topics import MAX_MESSAGE_BYTES

Array = npt.NDArray[Any]
_Buffers = Sequence[Any]
_Offsets = tuple[int, ...]
_Read = Callable[[_Buffers, int], Sequence[Any]]
"""the values of a column with n > 0 of them"""

_CAST = {pa.int32(): "i", pa.int64(): "q", pa.float32(): "f", pa.float64(): "d"}
_BITS = np.dtype(np.bool_)
_DTYPE: dict[pa.DataType, np.dtype[Any]] = {
    pa.int32(): np.dtype(np.int32), pa.int64(): np.dtype(np.int64), pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64), pa.bool_(): _BITS,
}  # fmt: skip
# A bit costs 8 bytes as a Python list entry: without a bound a record of bits would take a gigabyte. No honest
# column has more values than a largest record has int32 places.
_MAX_VALUES = MAX_MESSAGE_BYTES // 4
_MAX_REMEMBERED = (
    256  # Strings of a column whose even offsets are remembered: a group has fewer, a cache must be small.
)


class Columns:
    """The columns of a batch that `read_batch` or `build_batch` returned."""

    def __init__(self, fmt: Format, batch: pa.RecordBatch) -> None:
        self._fmt = fmt
        self._n = batch.num_rows
        # One call gives every buffer of every column, depth first; such batches have no slices inside.
        self._buffers: _Buffers = batch.to_struct_array().buffers()
        self._layout = _layout(fmt)
        self._lists: dict[str, tuple[_Offsets, Array]] = {}
        # (Validated: a validity buffer that is there has a byte at least, unless nothing is in its column.)
        self.may_have_nulls = any(self._layout.required(self._buffers))
        """There may be a null where the format has none. False is a promise; True only means: look at each row."""

    def rows(self) -> list[Row]:
        """All rows as tuples."""
        buffers, n = self._buffers, self._n
        if n == 0:
            return []
        _check_count(n)
        try:
            if self.may_have_nulls:
                columns = [
                    column.read_carefully(buffers, n) if column.element is None else self._arrays(column)
                    for column in self._layout.columns
                ]
            else:
                columns = [
                    column.read(buffers, n) if column.element is None else self._arrays(column)
                    for column in self._layout.columns
                ]
        except UnicodeDecodeError as error:
            raise InvalidRecord("arrow_invalid", f"{self._fmt.name}: text that is not UTF-8: {error}") from error
        return list(zip(*columns, strict=True))

    def same_lengths(self, one: str, other: str) -> bool:
        """Two list columns have lists of the same length in every row."""
        return self._list(one)[0] == self._list(other)[0]

    def flat(self, name: str) -> Array:
        """The values of a list column of numbers end to end, those that no row refers to included."""
        return self._list(name)[1]

    def _list(self, name: str) -> tuple[_Offsets, Array]:
        """(where each row begins and the last ends, all values) of a list column of numbers; nulls are not looked at.

        Numbers are those of the record itself, not a copy."""
        known = self._lists.get(name)
        if known is None:
            column = self._layout.by_name[name]
            offsets = _offsets(self._buffers[column.at + 1], self._n)
            _check_count(offsets[-1])
            known = self._lists[name] = offsets, _values(column.element, self._buffers[column.at + 3], offsets[-1])
        return known

    def _arrays(self, column: _Column) -> Sequence[Any]:
        if self._buffers[column.at] is not None or self._buffers[column.at + 2] is not None:
            rows = column.read_carefully(self._buffers, self._n)
            return [_array_or_tuple(row, column.element) for row in rows]
        offsets, values = self._list(column.name)
        if column.element is not _BITS:  # those were copied when they were unpacked
            values = values.copy()
        values.setflags(write=False)
        return [values[a:b] for a, b in itertools.pairwise(offsets)]


def first_null(fmt: Format, row: Row) -> str | None:
    """Name of the first column with a null that the format does not have, in the row or inside one of its values."""
    for column, value in zip(fmt.columns, row, strict=True):
        if (value is None and not column.nullable) or (type(value) is tuple and _has_null(value)):
            return column.name
    return None


def _has_null(value: tuple[Any, ...]) -> bool:
    return any(item is None or (type(item) is tuple and _has_null(item)) for item in value)


def read_complete_rows(fmt: Format, batch: pa.RecordBatch) -> list[Row]:
    """The rows of a batch whose nulls are where the format has them; InvalidRecord("null:<column>") otherwise."""
    columns = Columns(fmt, batch)
    rows = columns.rows()
    if columns.may_have_nulls:
        for number, row in enumerate(rows):
            name = first_null(fmt, row)
            if name is not None:
                raise InvalidRecord(f"null:{name}", f"row {number} of the {fmt.name} record has a null in {name}")
    return rows


@dataclass(frozen=True, slots=True)
class _Column:
    """How a column of a format is read."""

    name: str
    at: int
    """number of its first buffer"""
    element: np.dtype[Any] | None
    """of a list of numbers or bits: its rows become arrays"""
    read: _Read
    """when nulls are where the format has them"""
    read_carefully: _Read
    """when there may be a null anywhere"""


@dataclass(frozen=True, slots=True)
class _Layout:
    columns: tuple[_Column, ...]
    by_name: dict[str, _Column]
    required: Callable[[_Buffers], tuple[Any, ...]]
    """the validity buffers that a batch without unexpected nulls does not have"""


@functools.lru_cache(maxsize=16)
def _layout(fmt: Format) -> _Layout:
    columns = []
    at = 1  # 0 is the validity of the struct array itself
    for column in fmt.columns:
        read_carefully, following = _compile(column.type, at, careful=True)
        read, _ = _compile(column.type, at, careful=column.nullable)
        element = _DTYPE.get(column.type.value_type) if pa.types.is_list(column.type) else None
        columns.append(_Column(column.name, at, element, read, read_carefully))
        at = following
    by_name = {column.name: column for column in columns}
    return _Layout(tuple(columns), by_name, itemgetter(*_required(fmt)))


def _required(fmt: Format) -> tuple[int, ...]:
    """Numbers of the validity buffers that a batch without unexpected nulls does not have."""
    found: list[int] = []

    def visit(type_: pa.DataType, at: int, nullable: bool) -> int:
        if not nullable:
            found.append(at)
        if pa.types.is_struct(type_):
            at += 1
            for field in type_:
                at = visit(field.type, at, False)
            return at
        if pa.types.is_map(type_) or pa.types.is_list(type_):
            return visit(type_.field(0).type, at + 2, False)
        return at + (3 if type_ == pa.utf8() else 2)

    at = 1
    for column in fmt.columns:
        at = visit(column.type, at, column.nullable)
    return tuple(found)


def _compile(type_: pa.DataType, at: int, *, careful: bool) -> tuple[_Read, int]:
    """(reader of a column of this type whose first buffer is number `at`, number of the first buffer after it)."""
    read: _Read
    if pa.types.is_timestamp(type_):
        return _compile(pa.int64(), at, careful=careful)
    if type_ == pa.utf8():
        read, following = functools.partial(_read_strings, at), at + 3
    elif type_ == pa.bool_():
        read, following = functools.partial(_read_bits, at), at + 2
    elif type_ in _CAST:
        read, following = functools.partial(_read_scalars, _CAST[type_], at), at + 2
    elif pa.types.is_struct(type_):
        children, following = [], at + 1
        for field in type_:
            child, following = _compile(field.type, following, careful=careful)
            children.append(child)
        read = functools.partial(_read_structs, children)
    elif pa.types.is_map(type_):
        entries, following = _compile(type_.field(0).type, at + 2, careful=careful)
        read = functools.partial(_read_maps, at, entries)
    elif pa.types.is_list(type_):
        items, following = _compile(type_.value_type, at + 2, careful=careful)
        read = functools.partial(_read_lists, at, items)
    else:
        raise AssertionError(f"no reader for columns of type {type_}")
    return (functools.partial(_read_where_valid, at, read) if careful else read), following


def _read_where_valid(at: int, read: _Read, buffers: _Buffers, n: int) -> Sequence[Any]:
    if buffers[at] is None:
        return read(buffers, n)
    every = (1 << n) - 1
    valid = int.from_bytes(memoryview(buffers[at])[: (n + 7) // 8], "little") & every
    if valid == 0:
        return [None] * n
    values = read(buffers, n)
    if valid == every:
        return values
    return [value if is_valid else None for value, is_valid in zip(values, _bits(buffers[at], n).tolist(), strict=True)]


def _read_strings(at: int, buffers: _Buffers, n: int) -> Sequence[Any]:
    offsets = _unpacker("i", n + 1)(buffers[at + 1])
    data, end = buffers[at + 2], offsets[-1]
    if data is None or end == 0:
        return [""] * n
    if len(data) != end:
        data = memoryview(data)[:end]
    text = str(data, "utf-8")
    if len(text) != end:
        return [str(memoryview(data)[a:b], "utf-8") for a, b in itertools.pairwise(offsets)]
    size = offsets[1] - offsets[0]  # ASCII: a character is a byte
    if size and size * n == end and text == text[:size] * n and offsets == _even_offsets(size, n):
        return [text[:size]] * n  # all equal, as most columns of a group are
    return [text[a:b] for a, b in itertools.pairwise(offsets)]


def _read_scalars(code: str, at: int, buffers: _Buffers, n: int) -> Sequence[Any]:
    return _unpacker(code, n)(buffers[at + 1])


def _read_bits(at: int, buffers: _Buffers, n: int) -> Sequence[Any]:
    bits: list[bool] = _bits(buffers[at + 1], n).tolist()
    return bits


def _read_structs(children: Sequence[_Read], buffers: _Buffers, n: int) -> Sequence[Any]:
    return list(zip(*[child(buffers, n) for child in children], strict=True))


def _read_lists(at: int, items: _Read, buffers: _Buffers, n: int) -> Sequence[Any]:
    offsets = _offsets(buffers[at + 1], n)
    total = offsets[-1]
    if total == 0:
        return [()] * n
    _check_count(total)
    values = items(buffers, total)
    return [tuple(values[a:b]) for a, b in itertools.pairwise(offsets)]


def _read_maps(at: int, entries: _Read, buffers: _Buffers, n: int) -> Sequence[Any]:
    return [
        pairs if len(pairs) < 2 or None in pairs else tuple(sorted(pairs, key=itemgetter(0)))
        for pairs in _read_lists(at, entries, buffers, n)
    ]


def _array_or_tuple(row: tuple[Any, ...] | None, dtype: np.dtype[Any] | None) -> Any:
    if row is None or None in row:
        return row
    array = np.array(row, dtype=dtype)
    array.setflags(write=False)
    return array


def _check_count(n: int) -> None:
    if n > _MAX_VALUES:
        raise InvalidRecord("too_many_values", f"a column holds {n} values, the limit is {_MAX_VALUES}")


def _offsets(buffer: Any, n: int) -> _Offsets:
    return _unpacker("i", n + 1)(buffer)


def _even_offsets(size: int, n: int) -> _Offsets:
    """Of n strings of one size."""
    return _remembered_offsets(size, n) if n <= _MAX_REMEMBERED else tuple(range(0, size * n + 1, size))


@functools.lru_cache(maxsize=256)
def _remembered_offsets(size: int, n: int) -> _Offsets:
    return tuple(range(0, size * n + 1, size))


@functools.lru_cache(maxsize=256)
def _unpacker(code: str, n: int) -> Callable[[Any], tuple[Any, ...]]:
    return struct.Struct(f"<{n}{code}").unpack_from


def _values(element: np.dtype[Any] | None, buffer: Any, n: int) -> Array:
    if element is _BITS:
        return _bits(buffer, n)
    return np.frombuffer(buffer, dtype=element, count=n) if n else np.empty(0, dtype=element)


def _bits(buffer: Any, n: int) -> npt.NDArray[np.bool_]:
    if n == 0:
        return np.empty(0, dtype=np.bool_)
    packed = np.frombuffer(buffer, dtype=np.uint8, count=(n + 7) // 8)
    return np.unpackbits(packed, count=n, bitorder="little").view(np.bool_)
