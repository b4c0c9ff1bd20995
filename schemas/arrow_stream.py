"""Arrow values of the log: one IPC stream of schema, exactly one record batch, end marker, and nothing else.

Owns the way from row tuples to bytes and from untrusted bytes to a fully validated batch. Refuses compressed
buffers, dictionaries and foreign byte order BEFORE Arrow touches the body: a kilobyte of compressed body can
claim 32 GiB, and a dictionary or another byte order gives wrong numbers rather than an error.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas import headers as record_headers
from schemas.errors import InvalidRecord
from schemas.headers import Headers
from schemas.topics import ARROW_STREAM, MAX_MESSAGE_BYTES

Row = tuple[Any, ...]
"""One row, values in the order of the format's columns; see `arrow_columns` for the Python types"""

END_MARKER = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_UINT8, _INT16, _UINT16, _INT32, _UINT32, _INT64 = map(struct.Struct, ("<B", "<h", "<H", "<i", "<I", "<q"))
_MAX_SCHEMA_BYTES = 64 * 1024  # Ours take 5 KiB; schemas are cached, so their size must be bounded.
# What pyarrow raises on damaged input depends on the place of the damage (OSError, ArrowInvalid, StopIteration ...).
_ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, StopIteration, NotImplementedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a format."""

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = False


class Format:
    """A named, versioned set of columns. Compared and hashed by identity: there is one object per format."""

    def __init__(self, name: str, major: int, minor: int, event_type: str, columns: Sequence[Column]) -> None:
        self.name = name
        self.major = major
        self.minor = minor
        self.event_type = event_type
        self.columns = tuple(columns)
        self.names = tuple(column.name for column in columns)
        fields = [pa.field(column.name, column.type, nullable=column.nullable) for column in columns]
        self.row_type = pa.struct(fields)
        self.schema = pa.schema(fields, metadata={record_headers.ARROW_SCHEMA: f"{name}/{major}.{minor}"})
        self.schema_message = self.schema.serialize().to_pybytes()

    @property
    def version(self) -> str:
        """`<major>.<minor>`"""
        return f"{self.major}.{self.minor}"

    def headers(
        self,
        *,
        rows: int,
        value: bytes,
        source: str,
        at_us: int,
        event_id: str | None = None,
        traceparent: str | None = None,
    ) -> Headers:
        """All headers of a record of this format. Without an `event_id` it is taken from the bytes."""
        return record_headers.event_headers(
            event_type=self.event_type,
            source=source,
            event_id=hashlib.sha256(value).hexdigest()[:32] if event_id is None else event_id,
            at_us=at_us,
            content_type=ARROW_STREAM,
            traceparent=traceparent,
            extra=record_headers.arrow_headers(self.name, self.version, rows, value),
        )


# ---------------------------------------------------------------- writing


def build_batch(fmt: Format, rows: Sequence[Row]) -> pa.RecordBatch:
    """One batch of these rows; InvalidRecord("unencodable") when a value does not fit its column."""
    if not rows:
        raise InvalidRecord("no_rows", f"a {fmt.name} record needs at least one row: do not publish empty ones")
    try:
        array = pa.array(rows, type=fmt.row_type)
    except (*_ARROW_ERRORS, UnicodeEncodeError) as error:
        raise InvalidRecord("unencodable", f"{fmt.name}: {error}") from error
    return pa.RecordBatch.from_struct_array(array)


def write_batch(fmt: Format, batch: pa.RecordBatch) -> bytes:
    """The stream's bytes: uncompressed (Kafka compresses whole batches better and cheaper)."""
    return b"".join((fmt.schema_message, batch.serialize(), END_MARKER))


def write_rows(fmt: Format, rows: Sequence[Row]) -> bytes:
    """`build_batch` and `write_batch`."""
    return write_batch(fmt, build_batch(fmt, rows))


# ---------------------------------------------------------------- reading


def read_batch(
    fmt: Format,
    value: bytes | None,
    headers: Headers | None,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
    max_rows: int = 1_000_000,
) -> pa.RecordBatch:
    """The batch in `value`, columns exactly those of `fmt` in its order, fully validated by Arrow.

    Nulls where the format has none are NOT refused here: what they cost is decided per row. `headers` is
    None for files, which have none. Raises InvalidRecord and nothing else.
    """
    if not value:
        raise InvalidRecord("empty_value", f"the {fmt.name} record has no value")
    if len(value) > max_bytes:
        raise InvalidRecord("too_large", f"{len(value)} bytes, the limit is {max_bytes}")
    if headers is not None:
        _check_schema_header(fmt, headers)
        _check_count_header(headers, record_headers.PAYLOAD_BYTES, "payload_bytes", len(value))
    own = value.startswith(fmt.schema_message)  # the usual case: these bytes need no second look
    schema_end = len(fmt.schema_message) if own else _schema_end(value)
    batch_end = _batch_end(value, schema_end)
    plan = _own_plan(fmt) if own else _plan(fmt, value[:schema_end])
    batch = _load(plan.schema, memoryview(value)[schema_end:batch_end])
    if batch.num_rows == 0:
        raise InvalidRecord("no_rows", f"the {fmt.name} record holds no rows")
    if batch.num_rows > max_rows:
        raise InvalidRecord("too_many_rows", f"{batch.num_rows} rows, the limit is {max_rows}")
    if headers is not None:
        _check_count_header(headers, record_headers.ROW_COUNT, "row_count", batch.num_rows)
    return batch if plan.selection is None else batch.select(plan.selection)


def _load(schema: pa.Schema, message: memoryview) -> pa.RecordBatch:
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
        # Reading never validates: a patched offset reads as "ok" and points outside of the buffer.
        batch.validate(full=True)
    except _ARROW_ERRORS as error:
        raise InvalidRecord("arrow_invalid", f"Arrow refuses the record batch: {error}") from error
    return batch


def _check_schema_header(fmt: Format, headers: Headers) -> None:
    text = record_headers.header_text(headers, record_headers.ARROW_SCHEMA)
    if text is None:
        raise InvalidRecord("no_schema_header", f"the record has no header {record_headers.ARROW_SCHEMA}")
    if text == f"{fmt.name}/{fmt.version}":
        return
    name, _, version = text.partition("/")
    major, _, minor = version.partition(".")
    if name != fmt.name:
        raise InvalidRecord("schema_name", f"header {record_headers.ARROW_SCHEMA} is {text!r}, expected {fmt.name}")
    if not (minor.isdecimal() and major == str(fmt.major)):
        raise InvalidRecord(
            "schema_version",
            f"header {record_headers.ARROW_SCHEMA} is {text!r}, this build knows {fmt.name}/{fmt.major}.x; "
            "upgrade the reader",
        )


def _check_count_header(headers: Headers, name: str, code: str, found: int) -> None:
    text = record_headers.header(headers, name)
    if text is None:
        raise InvalidRecord(f"no_{code}_header", f"the record has no header {name}")
    if text != str(found).encode():
        raise InvalidRecord(code, f"header {name} says {text[:40]!r}, the record has {found}")


# ---------------------------------------------------------------- framing, without trusting a byte


def _schema_end(value: bytes) -> int:
    """Where the schema message ends, which must come first and must be little-endian."""
    if len(value) < 8:
        raise InvalidRecord("not_arrow", f"{len(value)} bytes are no Arrow stream")
    message = _message(value, 0)
    if message is None or message[0] != _SCHEMA or len(message[1]) + 8 != message[2]:
        raise InvalidRecord("not_arrow", "the first message of the stream is not a schema")
    _, metadata, end = message
    if _field(metadata, _header_table(metadata), 0, _INT16) not in (None, 0):
        raise InvalidRecord("byte_order", "the stream is big-endian; write it little-endian")
    return end


def _batch_end(value: bytes, at: int) -> int:
    """Where the one record batch ends; the end marker must follow, and end the value."""
    message = _message(value, at)
    if message is None:
        raise InvalidRecord("no_batch", "the stream ends after its schema: no record batch")
    _check_batch_message(message[0], message[1])
    end = message[2]
    if value[end:] == END_MARKER:
        return end
    following = _message(value, end)
    if following is None:
        raise InvalidRecord("trailing_bytes", f"{len(value) - end - 8} bytes after the end marker")
    _check_batch_message(following[0], following[1])
    raise InvalidRecord("several_batches", "the stream holds more than one record batch")


def _message(value: bytes, at: int) -> tuple[int, bytes, int] | None:
    """(kind, metadata, end of the body) of the message at this place; None for the end marker."""
    if len(value) - at < 8:
        raise InvalidRecord("truncated", f"the stream stops at byte {at} of {len(value)}, before its end marker")
    continuation, length = struct.unpack_from("<Ii", value, at)
    if continuation != _CONTINUATION or length < 0:
        raise InvalidRecord("not_arrow", f"no Arrow stream message at byte {at} (of {len(value)})")
    if length == 0:
        return None
    body = at + 8 + length
    if body > len(value):
        raise InvalidRecord("truncated", f"the message at byte {at} needs {length} bytes of metadata")
    metadata = value[at + 8 : body]
    table = _root(metadata)
    body_bytes = _field(metadata, table, 3, _INT64) or 0
    if body_bytes < 0:
        raise InvalidRecord("not_arrow", f"the message at byte {at} claims a body of {body_bytes} bytes")
    if body + body_bytes > len(value):
        raise InvalidRecord("truncated", f"the message at byte {at} needs a body of {body_bytes} bytes")
    return _field(metadata, table, 1, _UINT8) or 0, metadata, body + body_bytes


def _check_batch_message(kind: int, metadata: bytes) -> None:
    if kind == _DICTIONARY:
        raise InvalidRecord("dictionary", "dictionary-encoded columns are not accepted; write plain ones")
    if kind != _BATCH:
        raise InvalidRecord("not_arrow", f"message of kind {kind} where a record batch should be")
    if _slot(metadata, _header_table(metadata), 3) is not None:
        raise InvalidRecord("compressed", "compressed buffers are not accepted; let Kafka compress")


def _header_table(metadata: bytes) -> int:
    slot = _slot(metadata, _root(metadata), 2)
    if slot is None:
        raise InvalidRecord("not_arrow", "an Arrow message without a header")
    return slot + int(_peek(metadata, slot, _UINT32))


# A flatbuffer table starts with the distance back to its vtable; the vtable holds the place of each field.
def _root(metadata: bytes) -> int:
    return int(_peek(metadata, 0, _UINT32))


def _slot(metadata: bytes, table: int, index: int) -> int | None:
    vtable = table - _peek(metadata, table, _INT32)
    if 4 + 2 * index >= _peek(metadata, vtable, _UINT16):
        return None
    offset = _peek(metadata, vtable + 4 + 2 * index, _UINT16)
    return table + offset if offset else None


def _field(metadata: bytes, table: int, index: int, number: struct.Struct) -> int | None:
    slot = _slot(metadata, table, index)
    return None if slot is None else _peek(metadata, slot, number)


def _peek(metadata: bytes, at: int, number: struct.Struct) -> int:
    if not 0 <= at <= len(metadata) - number.size:
        raise InvalidRecord("not_arrow", f"message metadata points outside of itself (byte {at} of {len(metadata)})")
    return int(number.unpack_from(metadata, at)[0])


# ---------------------------------------------------------------- matching columns by name


@dataclass(frozen=True, slots=True)
class _Plan:
    schema: pa.Schema
    selection: list[int] | None
    """column of the batch per column of the format; None: the same columns in the same order"""


def _plan(fmt: Format, schema_message: bytes) -> _Plan:
    if len(schema_message) > _MAX_SCHEMA_BYTES:
        raise InvalidRecord("schema_too_large", f"{len(schema_message)} bytes of schema, limit {_MAX_SCHEMA_BYTES}")
    return _cached_plan(fmt, schema_message)


@functools.lru_cache(maxsize=16)
def _own_plan(fmt: Format) -> _Plan:
    """Of a schema as this build writes it: found without looking at its bytes again."""
    return _cached_plan(fmt, fmt.schema_message)


@functools.lru_cache(maxsize=64)
def _cached_plan(fmt: Format, schema_message: bytes) -> _Plan:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(schema_message))
        return _Plan(schema, _match_columns(fmt, schema))
    except _ARROW_ERRORS as error:  # also names that are not UTF-8
        raise InvalidRecord("not_arrow", f"Arrow refuses the schema: {error}") from error


def _match_columns(fmt: Format, schema: pa.Schema) -> list[int] | None:
    for field in schema:
        if _has_dictionary(field.type):
            raise InvalidRecord("dictionary", f"column {field.name} is dictionary-encoded; write it plain")
    selection = []
    for column in fmt.columns:
        found = schema.get_all_field_indices(column.name)
        if not found:
            raise InvalidRecord(f"schema_missing:{column.name}", f"{fmt.name} needs a column {column.name}")
        if len(found) > 1:
            raise InvalidRecord(f"schema_duplicate:{column.name}", f"{len(found)} columns are named {column.name}")
        if not _same_type(schema.field(found[0]).type, column.type):
            raise InvalidRecord(
                f"schema_type:{column.name}",
                f"column {column.name} is {schema.field(found[0]).type}, expected {column.type}",
            )
        selection.append(found[0])
    return None if selection == list(range(len(schema))) else selection


def _has_dictionary(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return True
    if isinstance(type_, pa.BaseExtensionType):
        return _has_dictionary(type_.storage_type)
    return any(_has_dictionary(type_.field(i).type) for i in range(type_.num_fields))


def _same_type(found: pa.DataType, expected: pa.DataType) -> bool:
    """Equal but for the names and nullability of list and map children, which writers choose differently."""
    if found.id != expected.id or found.num_fields != expected.num_fields:
        return False
    if found.num_fields == 0:
        return bool(found.equals(expected))
    pairs = [(found.field(i), expected.field(i)) for i in range(found.num_fields)]
    if pa.types.is_struct(expected) and any(a.name != b.name for a, b in pairs):
        return False
    if pa.types.is_map(expected):  # its one child is a struct whose field names are free
        pairs = [(pair_a, pair_b) for a, b in pairs for pair_a, pair_b in zip(a.type, b.type, strict=True)]
    return all(_same_type(a.type, b.type) for a, b in pairs)
