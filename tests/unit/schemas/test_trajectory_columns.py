"""Verdicts over columns never let through a row that the verdict over rows refuses; and honest rows pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.arrow_stream import Row, build_batch, read_batch, write_rows
from schemas.errors import InvalidRecord
from schemas.trajectory_codec import TrajectoryLimits, batch_row_hashes, decode_group, encode_group
from schemas.trajectory_columns import evident_rows
from schemas.trajectory_schema import TRAJECTORY, to_row
from tests.fakes.log_script import group

LIMITS = TrajectoryLimits(vocabulary_size=50, max_tokens=40, max_text_bytes=40, max_metadata_bytes=30)
GROUP = "demo/p000000/e0/a0"


def _f32(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def _i32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def _sampling(**changes: Any) -> Any:
    names = [field.name for field in TRAJECTORY.row_type.field("sampling").type]
    good = dict(zip(names, to_row(group(GROUP, [1.0])[0])[TRAJECTORY.names.index("sampling")], strict=True))
    return tuple((good | changes)[name] for name in names)


CHANGES: tuple[tuple[str, Any], ...] = (
    ("reward", None), ("reward", float("nan")), ("reward", float("inf")), ("reward_error", "x" * 41),
    ("reward_parts", (("a", 1.0), ("b", 2.0))), ("reward_parts", (("a", 1.0), ("a", 2.0))),
    ("reward_parts", (("a", float("nan")),)), ("reward_parts", (("k" * 31, 1.0),)),
    ("metadata", (("a", "b"), ("c", "d"))), ("metadata", (("a", "b"), ("a", "d"))), ("metadata", (("a", "b" * 30),)),
    ("text", "short"), ("text", "x" * 41), ("text", "\u00e9" * 21), ("finish_reason", "length"),
    ("finish_reason", "tired"), ("group_id", "demo/p0/e0/a0"), ("group_id", "no group"),
    ("group_id", "demo/p\u0661/e0/a0"), ("trajectory_id", "demo/p000000/e0/a0/3"), ("attempt", 1),
    ("index_in_group", -1), ("index_in_group", 9), ("group_size", 0), ("claim_id", ""), ("task", "t" * 513),
    ("worker_id", "\u00e9" * 512), ("token_ids", _i32(3, 4, 50)), ("token_ids", _i32(3, -4, 5)), ("token_ids", _i32()),
    ("token_ids", _i32(3, 4)), ("prompt_token_ids", _i32()), ("prompt_token_ids", _i32(60)),
    ("prompt_token_ids", _i32(*range(40))), ("logprobs", _f32(-1, 0.5, -1)), ("logprobs", _f32(-1, np.nan, -1)),
    ("logprobs", _f32(-1, -np.inf, -1)), ("logprobs", _f32(-1, 0, -1)), ("logprobs", _f32(-1, -1)),
    ("logprobs", (-1.0, None, -1.0)), ("loss_mask", np.array([True, False, True])),
    ("loss_mask", np.array([True, True])), ("loss_mask", np.array([True, True, False, True])),
    ("segments", ((0, 1, 5), (1, 2, 6))), ("segments", ((0, 2, 5),)), ("segments", ((0, 4, 5), (0, -1, 5))),
    ("segments", ((-1, 3, 5),)), ("segments", ((0, 3, -1),)), ("segments", ()),
    ("sampling", _sampling(temperature=-1.0)), ("sampling", _sampling(top_p=float("nan"))),
    ("sampling", _sampling(max_tokens=0)), ("sampling", _sampling(logprobs_mode="odd")),
    ("sampling", _sampling(logit_bias=((1, 2.0),))), ("sampling", _sampling(logit_bias=((1, float("inf")),))),
    ("prompt_id", None),
)  # fmt: skip
Edit = tuple[int, int]
"""(row, which of CHANGES)"""


def _rows(number: int, edits: list[Edit]) -> list[Row]:
    names = TRAJECTORY.names
    group_id = f"demo/p{number:06d}/e0/a0"
    rows = [dict(zip(names, to_row(t), strict=True)) for t in group(group_id, [1.0] * 4, segments=((0, 3, 5),))]
    for row, change in edits:
        column, value = CHANGES[change]
        rows[row][column] = value
    return [tuple(row[name] for name in names) for row in rows]


def _judged(records: list[list[Row]]) -> tuple[list[bool], list[bool]]:
    """(verdict over columns, verdict over rows) of every row."""
    batches, verdicts = [], []
    for rows in records:
        value = write_rows(TRAJECTORY, rows)
        headers = TRAJECTORY.headers(rows=len(rows), value=value, source="test", at_us=1, event_id="e")
        batches.append(read_batch(TRAJECTORY, value, headers))
        try:
            verdicts += [row.trajectory is not None for row in decode_group(value, headers, LIMITS)]
        except InvalidRecord:
            verdicts += [False] * len(rows)
    record_of_row = np.repeat(np.arange(len(batches)), [batch.num_rows for batch in batches])
    return evident_rows(pa.concat_batches(batches), record_of_row, LIMITS).tolist(), verdicts


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, len(CHANGES) - 1)), max_size=3), min_size=1, max_size=4
    )
)
def test_a_row_that_is_evident_is_one_that_decodes(edits: list[list[Edit]]) -> None:
    evident, decodes = _judged([_rows(number, some) for number, some in enumerate(edits)])

    assert all(fine for is_evident, fine in zip(evident, decodes, strict=True) if is_evident)
    if not any(edits):
        assert all(evident)


@pytest.mark.parametrize("change", range(len(CHANGES)), ids=lambda number: f"{CHANGES[number][0]}-{number}")
def test_each_fault_alone_is_found_and_each_harmless_change_is_not(change: int) -> None:
    evident, decodes = _judged([_rows(0, []), _rows(1, [(2, change)])])

    assert evident[:4] == [True] * 4 or CHANGES[change][0] in {"loss_mask", "logprobs", "prompt_id"}
    assert evident[6] <= decodes[6]
    # What the columns cannot be sure of is asked again; that must stay rare.
    unsure = ("group_id", "worker_id", "prompt_id")
    assert evident[6] == decodes[6] or CHANGES[change][0] in unsure


def _set(row: Row, **values: Any) -> Row:
    return tuple(values.get(name, value) for name, value in zip(TRAJECTORY.names, row, strict=True))


def _shifted() -> list[Row]:
    """Masks of unequal lengths around row 1 whose masked token has a log-probability: end to end all looks fine."""
    rows = _rows(0, [])
    true = np.ones(3, dtype=np.bool_)
    rows[0] = _set(rows[0], loss_mask=true[:2])
    rows[1] = _set(rows[1], logprobs=_f32(-1, 0, -3), loss_mask=np.array([True, True, False]))
    rows[3] = _set(rows[3], loss_mask=np.ones(4, dtype=np.bool_))
    return rows


def test_masks_that_are_shifted_by_a_neighbour_hide_nothing() -> None:
    evident, decodes = _judged([_shifted()])

    assert evident[1] is False
    assert decodes == [False, False, True, False]


def test_hashes_of_a_batch_are_those_of_its_rows() -> None:
    records = [_rows(number, []) for number in range(3)]
    batch = build_batch(TRAJECTORY, [row for rows in records for row in rows])
    expected = []
    for number in range(3):
        rows = group(f"demo/p{number:06d}/e0/a0", [1.0] * 4, segments=((0, 3, 5),))
        value = encode_group(rows)
        headers = TRAJECTORY.headers(rows=4, value=value, source="test", at_us=1, event_id="e")
        expected += [row.row_sha256 for row in decode_group(value, headers, LIMITS)]

    assert batch_row_hashes(batch) == expected
    assert batch_row_hashes(batch.slice(4, 4)) == expected[4:8]


@pytest.mark.parametrize("size", [1, 5])
def test_a_slice_of_a_batch_is_judged_as_its_rows(size: int) -> None:
    bad = CHANGES.index(next(c for c in CHANGES if c[0] == "metadata" and c[1][0][0] == c[1][-1][0] and len(c[1]) > 1))
    batch = build_batch(TRAJECTORY, _rows(0, [(3, bad)]) + _rows(1, []))
    judge: Callable[[pa.RecordBatch], list[bool]] = lambda part: evident_rows(  # noqa: E731
        part, np.arange(part.num_rows), LIMITS
    ).tolist()

    assert judge(batch.slice(3, size)) == judge(batch)[3 : 3 + size]
    assert judge(batch)[3] is False
