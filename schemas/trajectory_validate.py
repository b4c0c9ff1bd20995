"""What makes one trajectory row unusable. One function decides it, for writers and for readers alike.

Nothing is ever repaired: a missing or impossible value costs the row, because a substitute (0.0 for a missing
log-probability, say) trains as if it had been measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.arrow_columns import first_null
from schemas.arrow_stream import Row
from schemas.ids import parse_group_id
from schemas.topics import MAX_MESSAGE_BYTES
from schemas.trajectory import Sampling, Trajectory
from schemas.trajectory_schema import TRAJECTORY

POSITIVE_TOLERANCE = 1e-6  # float32 log_softmax of a certain token may come out a rounding above 0.
MAX_ID_LENGTH = 512
FINISH_REASONS = frozenset(("stop", "length", "abort"))
LOGPROBS_MODES = frozenset(("processed", "raw"))
_INT32_MAX = 2**31 - 1

Fault = tuple[str, str]
"""(code, words)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryLimits:
    """What a reader accepts."""

    vocabulary_size: int
    """token ids at or above this are refused"""
    max_bytes: int = MAX_MESSAGE_BYTES
    """of one record"""
    max_rows: int = 4_096
    """of one record"""
    max_tokens: int = 1_048_576
    """prompt and completion of one row"""
    max_text_bytes: int = 4 * 1024 * 1024
    """`text` and `reward_error` of one row together"""
    max_metadata_bytes: int = 64 * 1024
    """keys and values of `metadata`, and keys of `reward_parts`, of one row"""


WRITER_LIMITS = TrajectoryLimits(vocabulary_size=_INT32_MAX + 1)
"""What a writer can know: everything but the trainer's vocabulary and settings"""


def null_fault(row: Row) -> Fault | None:
    """A null where the schema has none, in the row or inside one of its lists and structs."""
    name = first_null(TRAJECTORY, row)
    if name is None:
        return None
    value = row[TRAJECTORY.names.index(name)]
    if name == "logprobs" and value is not None:
        return "null_logprob", f"log-probability of token {value.index(None)} is null"
    return f"null:{name}", f"column {name} is null" if value is None else f"column {name} holds a null"


def row_fault(t: Trajectory, limits: TrajectoryLimits, *, tokens_are_clean: bool = False) -> Fault | None:
    """The first fault of a row, or None. `tokens_are_clean`: `clean_tokens` already passed for the whole group."""
    return group_fault(t) or member_fault(t, limits, tokens_are_clean=tokens_are_clean)


def group_fault(t: Trajectory) -> Fault | None:
    """The first fault of the columns that all members of a group share."""
    return _group_ids_fault(t) or sampling_fault(t.sampling)


def member_fault(t: Trajectory, limits: TrajectoryLimits, *, tokens_are_clean: bool = False) -> Fault | None:
    """The first fault of the columns that are a member's own."""
    return (
        _member_ids_fault(t)
        or _size_fault(t, limits)
        or _lengths_fault(t)
        or (None if tokens_are_clean else _tokens_fault(t, limits.vocabulary_size))
        or _scalars_fault(t)
    )


def clean_tokens(
    prompt_token_ids: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    loss_mask: npt.NDArray[np.bool_],
    vocabulary_size: int,
) -> bool:
    """No row of the group can have a token fault. All rows end to end; False only means: look at each row."""
    if not (len(token_ids) == len(logprobs) == len(loss_mask)) or not len(token_ids) or not len(prompt_token_ids):
        return False
    # NaN makes max and min NaN, and every comparison with NaN is false. As uint32 a negative id is a huge one.
    # (Masks are mostly true throughout, and counting their bytes is the quickest way to see that.)
    return bool(
        logprobs.max() <= POSITIVE_TOLERANCE
        and logprobs.min() > -np.inf
        and token_ids.view(np.uint32).max() < vocabulary_size
        and prompt_token_ids.view(np.uint32).max() < vocabulary_size
        and (np.count_nonzero(loss_mask) == len(loss_mask) or not logprobs[~loss_mask].any())
    )


def _member_ids_fault(t: Trajectory) -> Fault | None:
    if not 0 <= t.index_in_group < t.group_size:
        return "index_out_of_group", f"index {t.index_in_group} of a group of {t.group_size}"
    if t.trajectory_id != f"{t.group_id}/{t.index_in_group}":
        return "bad_ids", f"trajectory id {t.trajectory_id[:80]!r} is not group id/{t.index_in_group}"
    return None


def _group_ids_fault(t: Trajectory) -> Fault | None:
    try:
        key = parse_group_id(t.group_id)
    except ValueError as error:  # also: more digits than Python turns into a number
        return "bad_ids", str(error)[:200]
    if key.attempt != t.attempt:
        return "bad_ids", f"attempt {t.attempt}, the group id says {key.attempt}"
    ids = (t.group_id, t.claim_id, t.prompt_id, t.task, t.worker_id, t.incarnation, t.reward_function)
    for text in ids:
        if not 0 < len(text) <= MAX_ID_LENGTH:
            return "bad_ids", f"ids have 1 to {MAX_ID_LENGTH} characters, one has {len(text)}"
    return None


def _size_fault(t: Trajectory, limits: TrajectoryLimits) -> Fault | None:
    tokens = len(t.prompt_token_ids) + len(t.token_ids)
    if tokens > limits.max_tokens:
        return "too_many_tokens", f"{tokens} tokens, the limit is {limits.max_tokens}"
    if t.text is not None or t.reward_error is not None:
        text = _utf8_bytes(t.text) + _utf8_bytes(t.reward_error)
        if text > limits.max_text_bytes:
            return "too_much_text", f"{text} bytes of text, the limit is {limits.max_text_bytes}"
    if t.metadata or t.reward_parts:
        words = (*t.metadata.keys(), *t.metadata.values(), *t.reward_parts.keys())
        metadata = sum(_utf8_bytes(word) for word in words)
        if metadata > limits.max_metadata_bytes:
            return "too_much_metadata", f"{metadata} bytes of metadata, the limit is {limits.max_metadata_bytes}"
    return None


def _utf8_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _lengths_fault(t: Trajectory) -> Fault | None:
    length = len(t.token_ids)
    if length == 0:
        return "no_tokens", "the completion has no token"
    if len(t.prompt_token_ids) == 0:
        return "no_prompt_tokens", "the prompt has no token"
    if len(t.logprobs) != length:
        return "length_mismatch", f"{length} ids, {len(t.logprobs)} logprobs"
    if len(t.loss_mask) != length:
        return "length_mismatch", f"{length} ids, {len(t.loss_mask)} loss mask entries"
    covered = 0
    for segment in t.segments:
        if segment.length < 1 or segment.version < 0 or segment.proof < 0:
            return "bad_segment", f"segment version {segment.version}, {segment.length} tokens, proof {segment.proof}"
        covered += segment.length
    if covered != length:
        return "segments_length", f"{length} ids, segments cover {covered}"
    return None


def _tokens_fault(t: Trajectory, vocabulary_size: int) -> Fault | None:
    lp = t.logprobs
    # What is wrong with the first bad value decides, NaN before infinite before positive.
    for code, bad in (
        ("nan_logprob", np.isnan(lp)),
        ("infinite_logprob", np.isinf(lp)),
        ("positive_logprob", lp > POSITIVE_TOLERANCE),
        ("masked_logprob", (lp != 0) & ~t.loss_mask),
    ):
        if bad.any():
            at = int(bad.argmax())
            return code, f"log-probability of token {at} is {lp[at]}" + (", masked" if code[0] == "m" else "")
    for name, ids in (("prompt", t.prompt_token_ids), ("completion", t.token_ids)):
        outside = (ids < 0) | (ids >= vocabulary_size)
        if outside.any():
            at = int(outside.argmax())
            return "token_out_of_vocabulary", f"{name} token {at} is {ids[at]}, the vocabulary has {vocabulary_size}"
    return None


def _scalars_fault(t: Trajectory) -> Fault | None:
    if t.finish_reason not in FINISH_REASONS:
        return "bad_finish_reason", f"finish reason {t.finish_reason[:40]!r}, expected stop, length or abort"
    if t.reward is not None and not math.isfinite(t.reward):
        return "reward_not_finite", f"reward is {t.reward}; a failed reward is null"
    for name, value in t.reward_parts.items():
        if not math.isfinite(value):
            return "reward_not_finite", f"reward part {name[:40]!r} is {value}"
    return None


def sampling_fault(s: Sampling) -> Fault | None:
    """Settings that no sampler can have used."""
    numbers = (
        s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty,
        *[bias for _, bias in s.logit_bias],
    )  # fmt: skip
    if not all(map(math.isfinite, numbers)):
        return "bad_sampling", "a sampling setting is not a finite number"
    if s.temperature < 0 or s.top_k < 0 or s.min_tokens < 0 or s.max_tokens < 1:
        return "bad_sampling", "temperature, top_k and min_tokens are >= 0, max_tokens >= 1"
    if s.logprobs_mode not in LOGPROBS_MODES:
        return "bad_sampling", f"logprobs_mode {s.logprobs_mode[:40]!r}, expected processed or raw"
    return None
