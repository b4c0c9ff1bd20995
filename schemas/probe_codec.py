"""probe.arrow of a checkpoint: token sequences and the log-probabilities its weights must give for them.

A file, not a record, so it has no headers; its bytes are held to the manifest's sha256 before they come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.arrow_columns import read_complete_rows
from schemas.arrow_stream import Column, Format, read_batch, write_rows
from schemas.errors import InvalidRecord
from schemas.topics import MAX_MESSAGE_BYTES
from schemas.trajectory import FloatArray, IntArray

PROBE = Format(
    "probe",
    1,
    0,
    "Probe",
    (
        Column(name="token_ids", type=pa.list_(pa.int32()), doc="[P+T] prompt and completion"),
        Column(name="prompt_length", type=pa.int32(), doc="P"),
        Column(name="logprobs", type=pa.list_(pa.float32()), doc="[T] of the completion at temperature 1"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSequence:
    """One sequence of a probe."""

    token_ids: IntArray
    """[P+T]"""
    prompt_length: int
    """P, at least 1"""
    logprobs: FloatArray
    """[T] temperature-1 log-probability of each token after the prompt"""


def encode_probe(sequences: Sequence[ProbeSequence]) -> bytes:
    """Contents of probe.arrow. InvalidRecord for anything a reader would refuse."""
    for number, sequence in enumerate(sequences):
        if sequence.token_ids.dtype != np.int32 or sequence.logprobs.dtype != np.float32:
            raise InvalidRecord("schema_type:token_ids", f"probe sequence {number}: need int32 ids, float32 logprobs")
        _check(number, sequence)
    return write_rows(PROBE, [(s.token_ids, s.prompt_length, s.logprobs) for s in sequences])


def decode_probe(data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> tuple[ProbeSequence, ...]:
    """Read probe.arrow; InvalidRecord says what is wrong."""
    rows = read_complete_rows(PROBE, read_batch(PROBE, data, None, max_bytes=max_bytes))
    sequences = tuple([ProbeSequence(token_ids=ids, prompt_length=p, logprobs=lp) for ids, p, lp in rows])
    for number, sequence in enumerate(sequences):
        _check(number, sequence)
    return sequences


def _check(number: int, s: ProbeSequence) -> None:
    if not 1 <= s.prompt_length < len(s.token_ids) or len(s.token_ids) - s.prompt_length != len(s.logprobs):
        raise InvalidRecord(
            "length_mismatch",
            f"probe sequence {number}: {len(s.token_ids)} ids, prompt of {s.prompt_length}, {len(s.logprobs)} logprobs",
        )
    if s.token_ids.min() < 0:
        raise InvalidRecord("token_out_of_vocabulary", f"probe sequence {number} has a negative token id")
    if not np.isfinite(s.logprobs).all():
        raise InvalidRecord("nan_logprob", f"probe sequence {number} has a log-probability that is not finite")
