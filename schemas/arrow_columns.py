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
_Read = Callable[[_Buffers, int], Sequence[Any]]

_CAST = {pa.int32(): "i", pa.int64(): "q", pa.float32(): "f", pa.float64(): "d"}
_DTYPE = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32, pa.float64(): np.float64}
# A bit costs 8 bytes as a Python list entry: without a bound a record of bits would take a gigabyte. No honest
# column has more values than a largest record has int32 places.
_MAX_VALUES = MAX_MESSAGE_BYTES // 4


class Columns:
    """The columns of a batch that `read_batch` or `build_batch` returned."""

    def __init__(self, fmt: Format, batch: pa.RecordBatch) -> None:
        self._fmt = fmt
        self._n = batch.num_rows
        # One call gives every buffer of every column, depth first; such batches have no slices inside.
        self._buffers: _Buffers = batch.to_struct_array().buffers()

    def rows(self) -> list[Row]:
        """All rows as tuples."""
        buffers, n = self._buffers, self._n
        try:
            columns = [read(buffers, n) for read, _ in _readers(self._fmt)]
        except UnicodeDecodeError as error:
            raise InvalidRecord("arrow_invalid", f"{self._fmt.name}: text that is not UTF-8: {error}") from error
        return list(zip(*columns, strict=True))

    def has_unexpected_nulls(self) -> bool:
        """There may be a null where the format has none. False is a promise; True only means: look at each row."""
        return any(self._buffers[at] is not None for at in _required(self._fmt))

    def same_lengths(self, one: str, other: str) -> bool:
        """Two list columns have lists of the same length in every row."""
        first, second = [_readers(self._fmt)[self._fmt.names.index(name)][1] for name in (one, other)]
        return _offsets(self._buffers[first + 1], self._n) == _offsets(self._buffers[second + 1], self._n)

    def flat(self, name: str) -> Array:
        """The values of a list column of numbers end to end, those that no row refers to included."""
        _, at = _readers(self._fmt)[self._fmt.names.index(name)]
        total = _offsets(self._buffers[at + 1], self._n)[-1]
        element = self._fmt.row_type.field(name).type.value_type
        if element == pa.bool_():
            return _bits(self._buffers[at + 3], total)
        return _numbers(element, self._buffers[at + 3], total)


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
    if columns.has_unexpected_nulls():
        for number, row in enumerate(rows):
            name = first_null(fmt, row)
            if name is not None:
                raise InvalidRecord(f"null:{name}", f"row {number} of the {fmt.name} record has a null in {name}")
    return rows


@functools.lru_cache(maxsize=16)
def _readers(fmt: Format) -> tuple[tuple[_Read, int], ...]:
    readers = []
    at = 1  # 0 is the validity of the struct array itself
    for column in fmt.columns:
        reader, following = _compile(column.type, at, top=True)
        readers.append((reader, at))
        at = following
    return tuple(readers)


@functools.lru_cache(maxsize=16)
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


def _compile(type_: pa.DataType, at: int, *, top: bool = False) -> tuple[_Read, int]:
    """(reader of a column of this type whose first buffer is number `at`, number of the first buffer after it)."""
    if pa.types.is_timestamp(type_):
        return _compile(pa.int64(), at)
    if type_ == pa.utf8():
        return _with_nulls(at, functools.partial(_read_strings, at)), at + 3
    if type_ in _CAST:
        return _with_nulls(at, functools.partial(_read_scalars, _CAST[type_], at)), at + 2
    if type_ == pa.bool_():
        return _with_nulls(at, lambda buffers, n: _bits(buffers[at + 1], n).tolist()), at + 2
    if pa.types.is_struct(type_):
        children, following = [], at + 1
        for field in type_:
            child, following = _compile(field.type, following)
            children.append(child)
        return _with_nulls(at, functools.partial(_read_structs, children)), following
    if pa.types.is_map(type_):
        entries, following = _compile(type_.field(0).type, at + 2)
        return _with_nulls(at, functools.partial(_read_maps, at, entries)), following
    if pa.types.is_list(type_):
        items, following = _compile(type_.value_type, at + 2)
        if top and (type_.value_type in _DTYPE or type_.value_type == pa.bool_()):
            return _with_nulls(at, functools.partial(_read_arrays, type_.value_type, at, items)), following
        return _with_nulls(at, functools.partial(_read_lists, at, items)), following
    raise AssertionError(f"no reader for columns of type {type_}")


def _with_nulls(at: int, read: _Read) -> _Read:
    def reader(buffers: _Buffers, n: int) -> Sequence[Any]:
        if n == 0:
            return []
        if n > _MAX_VALUES:
            raise InvalidRecord("too_many_values", f"a column holds {n} values, the limit is {_MAX_VALUES}")
        if buffers[at] is None:
            return read(buffers, n)
        valid = _bits(buffers[at], n).tolist()
        if True not in valid:
            return [None] * n
        values = read(buffers, n)
        return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]

    return reader


def _read_strings(at: int, buffers: _Buffers, n: int) -> Sequence[Any]:
    offsets = _offsets(buffers[at + 1], n)
    if buffers[at + 2] is None:
        return [""] * n
    data = memoryview(buffers[at + 2])[: offsets[-1]]
    text = str(data, "utf-8")
    if len(text) == len(data):  # ASCII: a character is a byte
        size = offsets[1] - offsets[0]
        if size and text == text[:size] * n and offsets == tuple(range(0, size * n + 1, size)):
            return [text[:size]] * n  # all equal, as most columns of a group are
        return [text[a:b] for a, b in itertools.pairwise(offsets)]
    return [str(data[a:b], "utf-8") for a, b in itertools.pairwise(offsets)]


def _read_scalars(code: str, at: int, buffers: _Buffers, n: int) -> Sequence[Any]:
    return _unpacker(code, n)(buffers[at + 1])


def _read_structs(children: Sequence[_Read], buffers: _Buffers, n: int) -> Sequence[Any]:
    return list(zip(*[child(buffers, n) for child in children], strict=True))


def _read_lists(at: int, items: _Read, buffers: _Buffers, n: int) -> Sequence[Any]:
    offsets = _offsets(buffers[at + 1], n)
    values = items(buffers, offsets[-1])
    return [tuple(values[a:b]) for a, b in itertools.pairwise(offsets)]


def _read_maps(at: int, entries: _Read, buffers: _Buffers, n: int) -> Sequence[Any]:
    return [
        pairs if len(pairs) < 2 or None in pairs else tuple(sorted(pairs, key=itemgetter(0)))
        for pairs in _read_lists(at, entries, buffers, n)
    ]


def _read_arrays(element: pa.DataType, at: int, items: _Read, buffers: _Buffers, n: int) -> Sequence[Any]:
    if buffers[at + 2] is not None:  # a null somewhere: tuples where rows have one, arrays elsewhere
        dtype = np.dtype(np.bool_ if element == pa.bool_() else _DTYPE[element])
        return [_array_or_tuple(row, dtype) for row in _read_lists(at, items, buffers, n)]
    offsets = _offsets(buffers[at + 1], n)
    if offsets[-1] > _MAX_VALUES:
        raise InvalidRecord("too_many_values", f"a column holds {offsets[-1]} values, the limit is {_MAX_VALUES}")
    if element == pa.bool_():
        values = _bits(buffers[at + 3], offsets[-1])
    else:
        values = _numbers(element, buffers[at + 3], offsets[-1]).copy()
    values.setflags(write=False)
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def _array_or_tuple(row: tuple[Any, ...], dtype: np.dtype[Any]) -> Any:
    if None in row:
        return row
    array = np.array(row, dtype=dtype)
    array.setflags(write=False)
    return array


def _offsets(buffer: Any, n: int) -> tuple[int, ...]:
    return _unpacker("i", n + 1)(buffer)


@functools.lru_cache(maxsize=256)
def _unpacker(code: str, n: int) -> Callable[[Any], tuple[Any, ...]]:
    return struct.Struct(f"<{n}{code}").unpack_from


def _numbers(element: pa.DataType, buffer: Any, n: int) -> Array:
    if n == 0:
        return np.empty(0, dtype=_DTYPE[element])
    return np.frombuffer(buffer, dtype=_DTYPE[element], count=n)


def _bits(buffer: Any, n: int) -> npt.NDArray[np.bool_]:
    if n == 0:
        return np.empty(0, dtype=np.bool_)
    packed = np.frombuffer(buffer, dtype=np.uint8, count=(n + 7) // 8)
    return np.unpackbits(packed, count=n, bitorder="little").view(np.bool_)
