"""Faults of a trajectory record as a whole: bytes, schema, headers. None of its rows is used."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from schemas.arrow_stream import END_MARKER, build_batch, write_batch
from schemas.errors import InvalidRecord
from schemas.headers import Headers, arrow_headers
from schemas.prompt_codec import encode_request
from schemas.trajectory_codec import decode_group, encode_group, group_message_headers
from schemas.trajectory_schema import TRAJECTORY, to_row
from tests.unit.schemas.make_examples import LIMITS, request, same, trajectory

ROWS = [trajectory(0), trajectory(1), trajectory(2)]
BATCH = build_batch(TRAJECTORY, [to_row(row) for row in ROWS])
VALUE = encode_group(ROWS)
SCHEMA_BYTES = len(TRAJECTORY.schema_message)


def headers_for(value: bytes | None, rows: int = 3) -> Headers:
    return arrow_headers("trajectory", "1.0", rows, value or b"")


def code_of(value: bytes | None, headers: Headers | None = None) -> str:
    with pytest.raises(InvalidRecord) as caught:
        decode_group(value, headers_for(value) if headers is None else headers, LIMITS)
    return caught.value.code


def stream(batch: pa.RecordBatch, *more: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        for each in (batch, *more):
            writer.write_batch(each)
    return bytes(sink.getvalue())


def with_column(name: str, array: pa.Array) -> pa.RecordBatch:
    return BATCH.set_column(BATCH.schema.get_field_index(name), name, array)


def test_a_group_comes_back_as_it_was_written() -> None:
    rows = decode_group(VALUE, group_message_headers(ROWS, VALUE, "gen-0/i1"), LIMITS)

    assert same([row.trajectory for row in rows], ROWS)
    assert [(row.row, row.code, row.detail) for row in rows] == [(0, "", ""), (1, "", ""), (2, "", "")]
    assert [row.trajectory_id for row in rows] == [row.trajectory_id for row in ROWS]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "empty_value"),
        (b"", "empty_value"),
        (b"abc", "not_arrow"),
        (b"plain text, no Arrow at all", "not_arrow"),
        (b"ARROW1\0\0" + VALUE, "not_arrow"),
        (VALUE[:-10], "truncated"),
        (VALUE[:-8], "truncated"),
        (VALUE[: SCHEMA_BYTES + 3], "truncated"),
        (VALUE[:SCHEMA_BYTES], "truncated"),
        (VALUE[: SCHEMA_BYTES // 2], "truncated"),
        (VALUE[:SCHEMA_BYTES] + END_MARKER, "no_batch"),
        (VALUE + b"abc", "trailing_bytes"),
        (VALUE + VALUE, "trailing_bytes"),
        (VALUE[SCHEMA_BYTES:], "not_arrow"),
        (VALUE[:SCHEMA_BYTES] + VALUE, "not_arrow"),
        (VALUE[:-8] + VALUE[SCHEMA_BYTES:], "several_batches"),
        (stream(BATCH, BATCH), "several_batches"),
        (stream(BATCH.slice(0, 0)), "no_rows"),
        (stream(BATCH, compression="zstd"), "compressed"),
        (stream(BATCH, compression="lz4"), "compressed"),
        (encode_group([trajectory(0, token_ids=np.ones(3, dtype=np.int32))]) * 1000, "too_large"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_broken_bytes_have_a_reason_of_their_own(value: bytes | None, code: str) -> None:
    limits = replace(LIMITS, max_bytes=1_000_000)

    with pytest.raises(InvalidRecord) as caught:
        decode_group(value, headers_for(value), limits)

    assert caught.value.code == code


def test_a_compressed_body_is_refused_before_its_claimed_size_is_believed() -> None:
    # The length prefix of a compressed buffer is what the reader would allocate: here 8 EiB.
    value = bytearray(stream(BATCH, compression="zstd"))
    body = bytes(value).find(struct.pack("<q", 16))  # some buffer's uncompressed length
    value[body : body + 8] = struct.pack("<q", 2**62)

    assert code_of(bytes(value)) == "compressed"


def test_a_foreign_byte_order_is_refused_by_name() -> None:
    # The smallest schema message that says big-endian: Message{type=Schema, header=Schema{endianness=Big}}.
    metadata = struct.pack("<I", 16) + struct.pack("<HHHHH", 10, 12, 0, 4, 8) + b"\0\0"
    metadata += struct.pack("<iBxxxI", 12, 1, 12) + struct.pack("<HHH", 6, 8, 4) + b"\0\0" + struct.pack("<ihxx", 8, 1)
    metadata += b"\0" * (-len(metadata) % 8)
    value = b"\xff\xff\xff\xff" + struct.pack("<I", len(metadata)) + metadata + END_MARKER

    assert code_of(value) == "byte_order"


def test_a_dictionary_column_is_refused_even_among_added_ones() -> None:
    words = pa.array(["a", "b", "a"]).dictionary_encode()

    assert code_of(stream(BATCH.append_column("added", words))) == "dictionary"
    assert code_of(stream(with_column("task", words))) == "dictionary"


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (BATCH.drop_columns(["logprobs"]), "schema_missing:logprobs"),
        (with_column("logprobs", pa.array([[-1.0]] * 3, pa.list_(pa.float16()))), "schema_type:logprobs"),
        (with_column("logprobs", pa.array([[-1.0]] * 3, pa.list_(pa.float64()))), "schema_type:logprobs"),
        (with_column("logprobs", pa.array([[b"\x16\xc0"]] * 3, pa.list_(pa.binary(2)))), "schema_type:logprobs"),
        (with_column("reward", pa.array([1, 2, 3])), "schema_type:reward"),
        (with_column("text", pa.array(["a"] * 3, pa.large_utf8())), "schema_type:text"),
        (with_column("started_at", pa.array([1] * 3, pa.timestamp("us"))), "schema_type:started_at"),
        (with_column("sampling", pa.array([{"temperature": 1.0}] * 3)), "schema_type:sampling"),
        (BATCH.append_column("task", BATCH.column("task")), "schema_duplicate:task"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_missing_or_retyped_column_is_refused_by_name(batch: pa.RecordBatch, code: str) -> None:
    assert code_of(stream(batch)) == code


def test_columns_are_matched_by_name_and_added_ones_ignored() -> None:
    names = list(reversed(BATCH.schema.names))
    batch = BATCH.select(names).append_column("added", pa.array([[1], None, [2, 3]]))
    value = stream(batch)

    assert same([row.trajectory for row in decode_group(value, headers_for(value), LIMITS)], ROWS)


def test_names_of_list_children_do_not_matter() -> None:
    element = pa.list_(pa.field("element", pa.int32(), nullable=False))
    value = stream(with_column("token_ids", BATCH.column("token_ids").cast(element)))

    assert same([row.trajectory for row in decode_group(value, headers_for(value), LIMITS)], ROWS)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda h: h[1:], "no_schema_header"),
        (lambda h: h[:1] + h[2:], "no_row_count_header"),
        (lambda h: h[:2], "no_payload_bytes_header"),
        (lambda h: (*h, ("row-count", b"2")), "row_count"),
        (lambda h: (*h, ("row-count", b"three")), "row_count"),
        (lambda h: (*h, ("payload-bytes", b"1")), "payload_bytes"),
        (lambda h: (*h, ("arrow-schema", b"prompt/1.0")), "schema_name"),
        (lambda h: (*h, ("arrow-schema", b"trajectory/2.0")), "schema_version"),
        (lambda h: (*h, ("arrow-schema", b"trajectory/1.x")), "schema_version"),
        (lambda h: (*h, ("arrow-schema", b"\xff")), "bad_header:arrow-schema"),
    ],
)
def test_headers_that_are_missing_or_unequal_have_a_reason_of_their_own(
    change: Callable[[Headers], Headers], code: str
) -> None:
    assert code_of(VALUE, change(headers_for(VALUE))) == code


def test_a_newer_minor_version_is_read_and_another_major_says_what_is_known() -> None:
    newer = (*headers_for(VALUE), ("arrow-schema", b"trajectory/1.7"))
    assert len(decode_group(VALUE, newer, LIMITS)) == 3

    with pytest.raises(InvalidRecord, match="this build knows trajectory/1.x"):
        decode_group(VALUE, (*headers_for(VALUE), ("arrow-schema", b"trajectory/2.0")), LIMITS)


def test_offsets_that_point_outside_are_refused() -> None:
    offsets = struct.pack("<4i", 0, 3, 6, 9)
    at = VALUE.rfind(offsets)
    value = VALUE[:at] + struct.pack("<4i", 0, 3, 6, 2_000_000_000) + VALUE[at + 16 :]

    assert code_of(value) == "arrow_invalid"


def test_text_that_is_not_utf8_is_refused() -> None:
    assert code_of(VALUE.replace("caf\u00e9".encode(), b"caf\xff\xff")) == "arrow_invalid"


def test_rows_of_two_groups_in_one_record_are_refused() -> None:
    other = trajectory(0, group_id="demo/p000018/e0/a1", trajectory_id="demo/p000018/e0/a1/0")
    value = write_batch(TRAJECTORY, build_batch(TRAJECTORY, [to_row(trajectory(0)), to_row(other)]))

    assert code_of(value, headers_for(value, 2)) == "several_groups"


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(InvalidRecord) as caught:
        decode_group(VALUE, headers_for(VALUE), replace(LIMITS, max_rows=2))

    assert caught.value.code == "too_many_rows"


def test_a_column_of_bits_cannot_blow_up_memory() -> None:
    # 12 MiB of loss mask bits would become 100 million Python objects.
    bits = pa.array(np.zeros(40_000_000, dtype=np.bool_))
    mask = pa.ListArray.from_arrays(pa.array([0, 0, 0, len(bits)], pa.int32()), bits)

    assert code_of(stream(with_column("loss_mask", mask))) == "too_many_values"


def test_every_record_has_the_same_schema_bytes_whatever_is_missing_in_its_rows() -> None:
    empty = trajectory(0, reward=None, reward_parts={}, metadata={}, text=None)

    assert encode_group([empty])[:SCHEMA_BYTES] == VALUE[:SCHEMA_BYTES] == TRAJECTORY.schema_message


def test_a_one_row_record_is_about_one_row_large() -> None:
    rows = [trajectory(index, text=chr(97 + index) * 1000) for index in range(4)]

    assert len(encode_group(rows[:1])) - len(encode_group([trajectory(0, text="")])) < 1_100


def test_a_sliced_batch_ships_and_returns_only_its_own_rows() -> None:
    value = stream(BATCH.slice(1, 2))
    rows = decode_group(value, headers_for(value, 2), LIMITS)

    assert same([row.trajectory for row in rows], ROWS[1:])
    assert rows[0].trajectory is not None
    assert 10 not in rows[0].trajectory.token_ids  # row 0's token


def test_decoded_arrays_cannot_be_edited_and_do_not_keep_the_record() -> None:
    value = bytes(bytearray(VALUE))
    row = decode_group(value, headers_for(value), LIMITS)[1].trajectory
    assert row is not None

    for array in (row.prompt_token_ids, row.token_ids, row.logprobs, row.loss_mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base.base is None  # numpy owns the memory, not the record
    edited = row.token_ids.copy()
    edited += 1

    assert value == VALUE
    assert same(decode_group(value, headers_for(value), LIMITS)[1].trajectory, ROWS[1])


def test_many_records_are_read_one_by_one_and_never_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("joining batches overflows 32-bit offsets")

    for name in ("concat_tables", "concat_arrays", "concat_batches"):
        monkeypatch.setattr(pa, name, refuse)

    assert sum(len(decode_group(VALUE, headers_for(VALUE), LIMITS)) for _ in range(50)) == 150


def test_a_valid_stream_of_another_kind_is_refused_by_its_columns() -> None:
    value = encode_request(request())

    assert code_of(value, headers_for(value, 1)) == "schema_missing:claim_id"
