"""Records of trajectories are decoded once, by whoever sees them first."""

from __future__ import annotations

import pytest

from consumers.trainer import decoding
from consumers.trainer.decoding import read_group
from infra.ports import Record
from schemas.trajectory_codec import TrajectoryLimits, encode_group, group_message_headers
from tests.fakes.log_script import group

A = "demo/p000000/e0/a0"
LIMITS = TrajectoryLimits(vocabulary_size=1_000)


def record(value: bytes, rows: list[object]) -> Record:
    headers = group_message_headers(rows, value, "gen-0")  # type: ignore[arg-type]
    return Record(topic="t", partition=1, offset=7, key=b"k", value=value, headers=headers, timestamp_ms=5)


def test_a_record_keeps_its_place_and_gains_its_rows() -> None:
    rows = group(A, [1, 0, 0, 1])
    lying = record(encode_group(rows), rows)
    read = read_group(lying, LIMITS)
    assert (read.partition, read.offset, read.key, read.value) == (1, 7, b"k", lying.value)
    assert (read.headers, read.timestamp_ms, read.fault) == (lying.headers, 5, None)
    assert [row.trajectory for row in read.rows if row.trajectory is not None] and len(read.rows) == 4


def test_bad_bytes_are_a_fault_that_names_what_is_wrong() -> None:
    rows = group(A, [1, 0])
    read = read_group(record(b"no arrow", rows), LIMITS)
    assert read.rows == ()
    assert read.fault is not None and read.fault.code


def test_what_was_decoded_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = group(A, [1, 0])
    read = read_group(record(encode_group(rows), rows), LIMITS)

    def refuse(*_: object) -> None:
        raise AssertionError("decoded twice")

    monkeypatch.setattr(decoding, "decode_group", refuse)
    assert read_group(read, LIMITS) is read
