"""Which rows of a large batch are fine for certain, decided over whole columns: no Python object a row.

The verdict of a row belongs to `trajectory_validate`. This only spares asking it: True is a promise that it finds
no fault, False means ask it (`decode_group`). Every check here is at least as strict as its twin there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ids import parse_group_id
from schemas.trajectory_schema import TRAJECTORY
from schemas.trajectory_validate import (
    FINISH_REASONS,
    LOGPROBS_MODES,
    MAX_ID_LENGTH,
    POSITIVE_TOLERANCE,
    TrajectoryLimits,
    clean_tokens,
)

Mask = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]

_IDS = ("group_id", "claim_id", "prompt_id", "task", "worker_id", "incarnation", "reward_function")
_FINISH_REASONS = pa.array(sorted(FINISH_REASONS))
_LOGPROBS_MODES = pa.array(sorted(LOGPROBS_MODES))


def evident_rows(batch: pa.RecordBatch, record_of_row: npt.NDArray[Any], limits: TrajectoryLimits) -> Mask:
    """Rows without a fault. `batch`: whole records one after another, columns of TRAJECTORY, validated by Arrow.

    `record_of_row`: [N] a number that changes where the next record begins.
    """
    if any(_has_unexpected_null(batch.column(c.name), c.nullable) for c in TRAJECTORY.columns):
        return np.zeros(batch.num_rows, dtype=np.bool_)
    fine = _ids_fine(batch, record_of_row)
    for check in (_sampling_fine, _lengths_fine, _segments_fine, _scalars_fine):
        fine &= check(batch)
    fine &= _sizes_fine(batch, limits)
    fine &= _tokens_fine(batch, limits.vocabulary_size)
    return fine


def list_offsets(array: pa.Array) -> _Ints:
    """[N+1] where each list of a list or map column begins in its flattened values; starts at 0."""
    offsets = np.asarray(array.offsets.to_numpy(), dtype=np.int64)
    return np.asarray(offsets - offsets[0])


def flat_values(array: pa.ListArray) -> npt.NDArray[Any]:
    """The values of a list column of numbers end to end, of this array's rows only; no copy but for bits."""
    return np.asarray(array.flatten().to_numpy(zero_copy_only=False))


def list_sums(values: npt.NDArray[Any], offsets: _Ints) -> _Ints:
    """[N] sum over each list of integers or booleans, in int64; 0 for an empty one."""
    running = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)))
    return np.asarray(running[offsets[1:]] - running[offsets[:-1]], dtype=np.int64)


# ---------------------------------------------------------------- checks, one twin each in trajectory_validate


def _has_unexpected_null(array: pa.Array, nullable: bool) -> bool:
    if array.null_count and not nullable:
        return True
    if pa.types.is_struct(array.type):
        return any(_has_unexpected_null(array.field(i), False) for i in range(array.type.num_fields))
    if pa.types.is_map(array.type):
        return bool(array.keys.null_count or array.items.null_count)
    return pa.types.is_list(array.type) and _has_unexpected_null(array.values, False)


def _ids_fine(batch: pa.RecordBatch, record_of_row: npt.NDArray[Any]) -> Mask:
    groups = batch.column("group_id").dictionary_encode()
    codes = np.asarray(groups.indices.to_numpy(), dtype=np.int64)
    # One record holds one group: a record in which the id changes is refused as a whole.
    changes = (codes[1:] != codes[:-1]) & (record_of_row[1:] == record_of_row[:-1])
    fine = ~np.isin(record_of_row, record_of_row[1:][changes])
    fine &= np.array([_attempt(text) for text in groups.dictionary.to_pylist()])[codes] == _ints(batch, "attempt")
    for name in _IDS:
        length = pc.utf8_length(batch.column(name)).to_numpy()
        fine &= (length > 0) & (length <= MAX_ID_LENGTH)
    index = _ints(batch, "index_in_group")
    fine &= (index >= 0) & (index < _ints(batch, "group_size"))
    spelled = pc.binary_join_element_wise(
        batch.column("group_id"), pc.cast(batch.column("index_in_group"), pa.utf8()), "/"
    )
    return fine & _bools(pc.equal(spelled, batch.column("trajectory_id")))


def _attempt(group_id: str) -> int:
    try:
        return min(parse_group_id(group_id).attempt, 2**62)
    except ValueError:
        return -(2**62)  # equal to no int32


def _sampling_fine(batch: pa.RecordBatch) -> Mask:
    sampling = batch.column("sampling")
    fine = np.ones(batch.num_rows, dtype=np.bool_)
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        fine &= np.isfinite(sampling.field(name).to_numpy())
    for name, least in (("temperature", 0), ("top_k", 0), ("min_tokens", 0), ("max_tokens", 1)):
        fine &= sampling.field(name).to_numpy() >= least
    fine &= _bools(pc.is_in(sampling.field("logprobs_mode"), value_set=_LOGPROBS_MODES))
    biases = sampling.field("logit_bias")
    if len(biases.values):
        fine &= list_sums(~np.isfinite(_numbers(biases.flatten().field("bias"))), list_offsets(biases)) == 0
    return fine


def _lengths_fine(batch: pa.RecordBatch) -> Mask:
    length = _lengths(batch, "token_ids")
    same = (length == _lengths(batch, "logprobs")) & (length == _lengths(batch, "loss_mask"))
    return _mask(same & (length > 0) & (_lengths(batch, "prompt_token_ids") > 0))


def _segments_fine(batch: pa.RecordBatch) -> Mask:
    segments = batch.column("segments")
    offsets = list_offsets(segments)
    parts = segments.flatten()
    version, length, proof = [_numbers(parts.field(name)) for name in ("version", "length", "proof")]
    bad = list_sums((length < 1) | (version < 0) | (proof < 0), offsets)
    return _mask((bad == 0) & (list_sums(length, offsets) == _lengths(batch, "token_ids")))


def _scalars_fine(batch: pa.RecordBatch) -> Mask:
    fine = _bools(pc.is_in(batch.column("finish_reason"), value_set=_FINISH_REASONS))
    fine &= _bools(pc.fill_null(pc.is_finite(batch.column("reward")), True))
    parts = batch.column("reward_parts")
    fine &= list_sums(~np.isfinite(_numbers(_flat_map(parts)[1])), list_offsets(parts)) == 0
    return fine & ~_repeats_key(parts) & ~_repeats_key(batch.column("metadata"))


def _sizes_fine(batch: pa.RecordBatch, limits: TrajectoryLimits) -> Mask:
    tokens = _lengths(batch, "token_ids") + _lengths(batch, "prompt_token_ids")
    text = sum(_byte_lengths(batch.column(name)) for name in ("text", "reward_error"))
    metadata, parts = batch.column("metadata"), batch.column("reward_parts")
    words = sum(
        list_sums(_byte_lengths(flat), list_offsets(column))
        for column, flat in (*((metadata, part) for part in _flat_map(metadata)), (parts, _flat_map(parts)[0]))
    )
    small = (text <= limits.max_text_bytes) & (words <= limits.max_metadata_bytes)
    return _mask(small & (tokens <= limits.max_tokens))


def _tokens_fine(batch: pa.RecordBatch, vocabulary_size: int) -> Mask:
    columns = [batch.column(name) for name in ("prompt_token_ids", "token_ids", "logprobs", "loss_mask")]
    offsets = [list_offsets(column) for column in columns]
    if not np.array_equal(offsets[2], offsets[3]):  # laid end to end, rows behind the odd one would meet other masks
        return np.zeros(batch.num_rows, dtype=np.bool_)
    prompt_ids, ids, logprobs, mask = [flat_values(column) for column in columns]
    if clean_tokens(prompt_ids, ids, logprobs, mask, vocabulary_size):
        return np.ones(batch.num_rows, dtype=np.bool_)
    bad = ~np.isfinite(logprobs) | (logprobs > POSITIVE_TOLERANCE) | ((logprobs != 0) & ~mask)
    faults = list_sums(bad, offsets[2])
    for values, at in ((prompt_ids, offsets[0]), (ids, offsets[1])):
        faults = faults + list_sums((values < 0) | (values >= vocabulary_size), at)
    return _mask(faults == 0)


# ---------------------------------------------------------------- columns as arrays


def _flat_map(array: pa.MapArray) -> tuple[pa.Array, pa.Array]:
    """Keys and values of this array's rows end to end."""
    first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.keys[first:end], array.items[first:end]


def _repeats_key(array: pa.MapArray) -> Mask:
    offsets = list_offsets(array)
    counts = np.diff(offsets)
    repeats = np.zeros(len(array), dtype=np.bool_)
    if not len(counts) or counts.max() < 2:
        return repeats
    keys = _flat_map(array)[0].dictionary_encode()
    rows = np.repeat(np.arange(len(array)), counts)
    pairs = np.sort(rows * len(keys.dictionary) + np.asarray(keys.indices.to_numpy(), dtype=np.int64))
    repeats[pairs[1:][pairs[1:] == pairs[:-1]] // len(keys.dictionary)] = True
    return repeats


def _lengths(batch: pa.RecordBatch, name: str) -> _Ints:
    return np.diff(list_offsets(batch.column(name)))


def _ints(batch: pa.RecordBatch, name: str) -> _Ints:
    return np.asarray(batch.column(name).to_numpy(), dtype=np.int64)


def _byte_lengths(array: pa.Array) -> _Ints:
    return np.asarray(pc.fill_null(pc.binary_length(array), 0).to_numpy(), dtype=np.int64)


def _numbers(array: pa.Array) -> npt.NDArray[Any]:
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _mask(values: Any) -> Mask:
    return np.asarray(values, dtype=np.bool_)


def _bools(array: pa.Array) -> Mask:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.bool_)
