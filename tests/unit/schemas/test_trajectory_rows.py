"""Faults of single rows: each costs its own row, under a code of its own, and its siblings decode."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from consumers.trainer.batch import BatchRow, TrainBatch
from schemas.arrow_columns import Columns
from schemas.arrow_stream import Format, write_rows
from schemas.errors import InvalidRecord
from schemas.headers import arrow_headers
from schemas.prompt_codec import PROMPT
from schemas.trajectory import Fingerprint, PromptRequest, Sampling, Segment, Trajectory
from schemas.trajectory_codec import DecodedRow, batch_digest, decode_group, encode_group, row_sha256
from schemas.trajectory_schema import FINGERPRINT, TRAJECTORY, to_row
from schemas.trajectory_schema import SAMPLING as SAMPLING_TYPE
from tests.unit.schemas.make_examples import GROUP, LIMITS, same, trajectory

NAN, INF = float("nan"), float("inf")


def decode_raw(*rows: tuple[Any, ...], limits: Any = LIMITS) -> tuple[DecodedRow, ...]:
    """Decode row tuples that nobody checked on writing."""
    value = write_rows(TRAJECTORY, rows)
    return decode_group(value, arrow_headers("trajectory", "1.0", len(rows), value), limits)


def with_values(row: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    return tuple([changes.get(name, value) for name, value in zip(TRAJECTORY.names, row, strict=True)])


def floats(*values: float | None) -> Any:
    return list(values) if None in values else np.array(values, dtype=np.float32)


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


SAMPLING = to_row(trajectory())[TRAJECTORY.names.index("sampling")]
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("null_logprob", {"logprobs": floats(-0.5, None, 0.0)}, "token 1"),
    ("nan_logprob", {"logprobs": floats(-0.5, NAN, 0.0)}, "token 1 is nan"),
    ("infinite_logprob", {"logprobs": floats(-0.5, -INF, 0.0)}, "token 1 is -inf"),
    ("infinite_logprob", {"logprobs": floats(INF, -0.5, 0.0)}, "token 0 is inf"),
    ("positive_logprob", {"logprobs": floats(-0.5, 0.3, 0.0)}, "token 1 is 0.3"),
    ("positive_logprob", {"logprobs": floats(-0.5, 2e-6, 0.0)}, "token 1"),
    ("masked_logprob", {"logprobs": floats(-0.5, -0.5, -0.1)}, "token 2"),
    ("length_mismatch", {"logprobs": floats(-0.5, 0.0)}, "3 ids, 2 logprobs"),
    ("length_mismatch", {"loss_mask": np.ones(4, dtype=np.bool_)}, "3 ids, 4 loss mask"),
    ("no_tokens", {"token_ids": ids(), "logprobs": floats(), "loss_mask": np.ones(0, dtype=np.bool_)}, "no token"),
    ("no_prompt_tokens", {"prompt_token_ids": ids()}, "no token"),
    ("token_out_of_vocabulary", {"token_ids": ids(1, 100, 2)}, "completion token 1 is 100"),
    ("token_out_of_vocabulary", {"token_ids": ids(1, 2, -1)}, "completion token 2 is -1"),
    ("token_out_of_vocabulary", {"prompt_token_ids": ids(100)}, "prompt token 0 is 100"),
    ("segments_length", {"segments": ((3, 2, 41),)}, "segments cover 2"),
    ("segments_length", {"segments": ()}, "segments cover 0"),
    ("bad_segment", {"segments": ((3, 4, 41), (3, -1, 41))}, "-1 tokens"),
    ("bad_segment", {"segments": ((-1, 3, 41),)}, "version -1"),
    ("bad_segment", {"segments": ((3, 3, -1),)}, "proof -1"),
    ("bad_ids", {"trajectory_id": "demo/p000017/e0/a1/2"}, "is not group id/1"),
    ("bad_ids", {"attempt": 2}, "attempt 2"),
    ("bad_ids", {"claim_id": ""}, "1 to 512"),
    ("bad_ids", {"worker_id": "w" * 513}, "513"),
    ("index_out_of_group", {"group_size": 1}, "index 1 of a group of 1"),
    ("index_out_of_group", {"index_in_group": -1, "trajectory_id": f"{GROUP}/-1"}, "index -1"),
    ("index_out_of_group", {"group_size": 0}, "group of 0"),
    ("reward_not_finite", {"reward": NAN}, "reward is nan"),
    ("reward_not_finite", {"reward": -INF}, "reward is -inf"),
    ("reward_not_finite", {"reward_parts": (("a", NAN),)}, "'a' is nan"),
    ("bad_finish_reason", {"finish_reason": "tired"}, "'tired'"),
    ("bad_sampling", {"sampling": (NAN, *SAMPLING[1:])}, "finite"),
    ("bad_sampling", {"sampling": (-1.0, *SAMPLING[1:])}, "temperature"),
    ("bad_sampling", {"sampling": (*SAMPLING[:-1], "guessed")}, "'guessed'"),
    ("duplicate_key:metadata", {"metadata": (("a", "1"), ("a", "2"))}, "twice"),
    ("duplicate_key:reward_parts", {"reward_parts": (("a", 1.0), ("a", 2.0))}, "twice"),
    ("null:logprobs", {"logprobs": None}, "logprobs is null"),
    ("null:token_ids", {"token_ids": [1, None, 2]}, "holds a null"),
    ("null:loss_mask", {"loss_mask": [True, None, False]}, "holds a null"),
    ("null:segments", {"segments": ((3, 2, 41), None)}, "holds a null"),
    ("null:segments", {"segments": ((3, None, 41),)}, "holds a null"),
    ("null:sampling", {"sampling": None}, "is null"),
    ("null:sampling", {"sampling": (None, *SAMPLING[1:])}, "holds a null"),
    ("null:metadata", {"metadata": (("a", None),)}, "holds a null"),
    ("null:worker_id", {"worker_id": None}, "is null"),
    ("null:published_at", {"published_at": None}, "is null"),
    ("null:group_id", {"group_id": None}, "is null"),
    ("null:trajectory_id", {"trajectory_id": None}, "is null"),
]


@pytest.mark.parametrize(("code", "changes", "words"), FAULTS)
def test_a_faulty_row_is_refused_alone_with_its_reason(code: str, changes: dict[str, Any], words: str) -> None:
    good = [trajectory(0), trajectory(2)]

    first, bad, last = decode_raw(to_row(good[0]), with_values(to_row(trajectory(1)), **changes), to_row(good[1]))

    assert (bad.code, bad.trajectory) == (code, None)
    assert words in bad.detail
    assert same([first.trajectory, last.trajectory], good)
    assert len({first.row_sha256, bad.row_sha256, last.row_sha256}) == 3


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ({"max_tokens": 4}, "too_many_tokens"),
        ({"max_text_bytes": 4}, "too_much_text"),  # "cafe" with an accent has 5 bytes
        ({"max_metadata_bytes": 16}, "too_much_metadata"),
    ],
)
def test_a_row_above_a_configured_size_is_refused(limit: dict[str, int], code: str) -> None:
    (row,) = decode_raw(to_row(trajectory(0)), limits=replace(LIMITS, **limit))

    assert (row.code, row.trajectory) == (code, None)


def test_every_kind_of_logprob_fault_is_counted_apart() -> None:
    bad = [floats(-0.5, value, 0.0) for value in (None, NAN, -INF, 0.3)]

    rows = decode_raw(*[with_values(to_row(trajectory(i)), logprobs=lp) for i, lp in enumerate(bad)])

    assert [row.code for row in rows] == ["null_logprob", "nan_logprob", "infinite_logprob", "positive_logprob"]


def test_a_failed_reward_is_a_good_row() -> None:
    (row,) = decode_raw(to_row(trajectory(0, reward=None, reward_error="crashed")))

    assert row.code == ""
    assert row.trajectory is not None
    assert (row.trajectory.reward, row.trajectory.reward_error) == (None, "crashed")


def test_a_certain_token_a_rounding_above_zero_is_kept_as_it_is() -> None:
    (row,) = decode_raw(with_values(to_row(trajectory(0)), logprobs=floats(1e-7, -0.5, 0.0)))

    assert row.trajectory is not None
    assert row.trajectory.logprobs[0] == np.float32(1e-7)


def test_ids_and_logprobs_come_back_as_sampled_whatever_the_text_says() -> None:
    row = trajectory(0, text="re-encoded this is one token", token_ids=ids(1, 2, 9))

    (decoded,) = decode_raw(to_row(row))

    assert decoded.trajectory is not None
    assert decoded.trajectory.token_ids.tolist() == [1, 2, 9]
    assert same(decoded.trajectory.logprobs, row.logprobs)


def test_float32_keeps_the_summed_log_ratio_of_a_long_completion() -> None:
    exact, length = -2.345678, 200
    row = trajectory(
        0,
        token_ids=np.ones(length, dtype=np.int32),
        logprobs=np.full(length, exact, dtype=np.float32),
        loss_mask=np.ones(length, dtype=np.bool_),
        segments=(Segment(version=3, length=length, proof=1),),
    )

    (decoded,) = decode_raw(to_row(row))

    assert decoded.trajectory is not None
    assert abs(decoded.trajectory.logprobs.astype(np.float64) - exact).sum() <= 2e-4


def test_a_record_whose_rows_have_no_ids_is_still_decided_row_by_row() -> None:
    rows = decode_raw(*[with_values(to_row(trajectory(i)), group_id=None, trajectory_id=None) for i in range(2)])

    assert [(row.code, row.group_id, row.trajectory_id) for row in rows] == [("null:group_id", "", "")] * 2
    assert [row.claim_id for row in rows] == ["gen-0/i1/17"] * 2


def test_lists_that_do_not_start_at_their_first_value_are_read_by_their_offsets() -> None:
    # Other writers may send a slice with the values of its parent: [[1], [2, 3], [4, 5, 6]] without its first row.
    tokens = pa.ListArray.from_arrays(pa.array([1, 3, 6], pa.int32()), pa.array([1, 2, 3, 4, 5, 6], pa.int32()))
    batch = pa.RecordBatch.from_struct_array(
        pa.array([to_row(trajectory(0)), to_row(trajectory(1))], type=TRAJECTORY.row_type)
    )
    batch = batch.set_column(TRAJECTORY.names.index("token_ids"), "token_ids", tokens)

    rows = Columns(TRAJECTORY, batch).rows()

    assert [row[TRAJECTORY.names.index("token_ids")].tolist() for row in rows] == [[2, 3], [4, 5, 6]]


@pytest.mark.parametrize(("value", "fmt"), [(Trajectory, TRAJECTORY), (PromptRequest, PROMPT)])
def test_every_field_has_a_column(value: Any, fmt: Format) -> None:
    columns = {f"{name}_us" if name.endswith("_at") else name for name in fmt.names}

    assert {field.name for field in fields(value)} - {"traceparent"} == columns


def test_sampling_and_fingerprint_travel_whole_and_in_order() -> None:
    assert [field.name for field in SAMPLING_TYPE] == [field.name for field in fields(Sampling)]
    assert [field.name for field in FINGERPRINT] == [field.name for field in fields(Fingerprint)]


# ---------------------------------------------------------------- hashes


def test_the_hash_of_a_row_does_not_depend_on_its_record() -> None:
    rows = [trajectory(0), trajectory(1, metadata={"b": "1", "a": "2"}), trajectory(2)]
    wanted = [row_sha256(row) for row in rows]

    for order in itertools.permutations(range(3)):
        decoded = decode_raw(*[to_row(rows[i]) for i in order])
        assert [row.row_sha256 for row in decoded] == [wanted[i] for i in order]
    assert decode_raw(to_row(rows[1]))[0].row_sha256 == wanted[1]
    assert row_sha256(replace(rows[1], metadata={"a": "2", "b": "1"})) == wanted[1]


def test_the_hash_of_a_row_covers_every_column() -> None:
    row = to_row(trajectory(0))
    seen = {decode_raw(row)[0].row_sha256}
    for name, value in zip(TRAJECTORY.names, row, strict=True):
        seen.add(decode_raw(with_values(row, **{name: _other(value)}))[0].row_sha256)

    assert len(seen) == len(TRAJECTORY.names) + 1


def _other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value[:-1]
    if isinstance(value, tuple):
        return (_other(value[0]), *value[1:])
    if value is None or isinstance(value, str):
        return (value or "") + "x"
    return value + 1


def test_the_batch_digest_is_the_one_the_trainer_computes() -> None:
    rows = [
        BatchRow(trajectory=t, row_sha256=row_sha256(t), advantage=0.0, weight=1.0, policy_lag=0, use_count=1)
        for t in (trajectory(0), trajectory(1))
    ]

    digest = TrainBatch(rows=tuple(rows), version_in=1, depth_in=1).digest
    assert batch_digest(row.row_sha256 for row in rows) == digest
    assert batch_digest(row.row_sha256 for row in reversed(rows)) != digest


# ---------------------------------------------------------------- writers


def test_an_empty_group_is_not_published() -> None:
    with pytest.raises(InvalidRecord) as caught:
        encode_group([])

    assert caught.value.code == "no_rows"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"logprobs": floats(-0.5, NAN, 0.0)}, "nan_logprob"),
        ({"logprobs": np.array([-0.5, -0.5, 0.0])}, "schema_type:logprobs"),
        ({"token_ids": [1, 2, 3]}, "schema_type:token_ids"),
        ({"token_ids": ids(1, 2, -3)}, "token_out_of_vocabulary"),
        ({"token_ids": ids(), "logprobs": floats(), "loss_mask": np.ones(0, dtype=np.bool_)}, "no_tokens"),
        ({"index_in_group": 4}, "index_out_of_group"),
        ({"reward": INF}, "reward_not_finite"),
        ({"sampling": Sampling(max_tokens=0)}, "bad_sampling"),
        ({"attempt": 2**40}, "unencodable"),
        ({"text": "\ud800"}, "unencodable"),
        ({"prompt_id": None}, "null:prompt_id"),
        ({"group_id": "demo/p000018/e0/a1", "trajectory_id": "demo/p000018/e0/a1/1"}, "several_groups"),
    ],
)
def test_a_writer_refuses_what_a_reader_would_refuse(change: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        encode_group([trajectory(0), trajectory(1, **change)])

    assert caught.value.code == code


def test_a_record_that_no_topic_takes_is_refused_by_its_writer() -> None:
    with pytest.raises(InvalidRecord) as caught:
        encode_group([trajectory(i, text="x" * 4_000_000 + str(i)) for i in range(4)] * 2)

    assert caught.value.code == "too_large"
