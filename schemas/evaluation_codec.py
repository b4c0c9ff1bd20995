"""Evaluation records: how one version did on held-out prompts, one row a sampled answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from schemas.arrow_columns import read_complete_rows
from schemas.arrow_stream import Column, Format, read_batch, write_rows
from schemas.headers import Headers
from schemas.trajectory_schema import TIMESTAMP

EVALUATION = Format(
    "evaluation",
    1,
    0,
    "VersionEvaluated",
    (
        Column(name="version", type=pa.int64(), doc="policy version that answered"),
        Column(name="task", type=pa.utf8(), doc="task of the prompt"),
        Column(name="prompt_id", type=pa.utf8(), doc="id in the held-out source"),
        Column(name="sample", type=pa.int32(), doc="0, 1, ... of this prompt"),
        Column(name="temperature", type=pa.float64(), doc="0: greedy"),
        Column(name="reward", type=pa.float64(), doc="null: the reward function failed", nullable=True),
        Column(name="reward_error", type=pa.utf8(), doc="why it failed", nullable=True),
        Column(name="completion_tokens", type=pa.int32(), doc="T"),
        Column(name="finish_reason", type=pa.utf8(), doc="stop, length or abort"),
        Column(name="evaluated_at", type=TIMESTAMP, doc="evaluator clock"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One answer of one version to one held-out prompt."""

    version: int
    task: str
    prompt_id: str
    sample: int
    temperature: float
    reward: float | None
    reward_error: str | None
    completion_tokens: int
    finish_reason: str
    evaluated_at_us: int


def encode_evaluation(rows: Sequence[EvaluationRow]) -> bytes:
    """The value of one record; InvalidRecord("no_rows") for none."""
    return write_rows(
        EVALUATION,
        [
            (
                r.version, r.task, r.prompt_id, r.sample, r.temperature, r.reward, r.reward_error,
                r.completion_tokens, r.finish_reason, r.evaluated_at_us,
            )
            for r in rows
        ],
    )  # fmt: skip


def evaluation_headers(rows: Sequence[EvaluationRow], value: bytes, source: str) -> Headers:
    """Headers of the record with this value."""
    return EVALUATION.headers(rows=len(rows), value=value, source=source, at_us=rows[0].evaluated_at_us)


def decode_evaluation(value: bytes | None, headers: Headers) -> tuple[EvaluationRow, ...]:
    """Read one record; InvalidRecord says what is wrong."""
    return tuple(
        [
            EvaluationRow(
                version=row[0],
                task=row[1],
                prompt_id=row[2],
                sample=row[3],
                temperature=row[4],
                reward=row[5],
                reward_error=row[6],
                completion_tokens=row[7],
                finish_reason=row[8],
                evaluated_at_us=row[9],
            )
            for row in read_complete_rows(EVALUATION, read_batch(EVALUATION, value, headers))
        ]
    )
