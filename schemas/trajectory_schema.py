"""The columns of a trajectory record, and the way between a Trajectory and its row tuple.

One row a completion, flat on purpose: DuckDB, Polars and pandas read it as it is. Columns that are equal
for all rows of a group come first (`GROUP_COLUMNS` of them), because the row hash shares their part.
"""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa

from schemas.arrow_stream import Column, Format, Row
from schemas.ids import ClaimId, GroupId, Incarnation, TrajectoryId, WorkerId
from schemas.trajectory import Fingerprint, Sampling, Segment, Trajectory

TIMESTAMP = pa.timestamp("us", "UTC")
TEXT_MAP = pa.map_(pa.utf8(), pa.utf8())

SAMPLING = pa.struct(
    [
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int64(), nullable=False),
        pa.field("min_p", pa.float64(), nullable=False),
        pa.field("presence_penalty", pa.float64(), nullable=False),
        pa.field("frequency_penalty", pa.float64(), nullable=False),
        pa.field("repetition_penalty", pa.float64(), nullable=False),
        pa.field(
            "logit_bias",
            pa.list_(
                pa.struct(
                    [
                        pa.field("token_id", pa.int64(), nullable=False),
                        pa.field("bias", pa.float64(), nullable=False),
                    ]
                )
            ),
            nullable=False,
        ),
        pa.field("min_tokens", pa.int64(), nullable=False),
        pa.field("max_tokens", pa.int64(), nullable=False),
        pa.field("stop_token_ids", pa.list_(pa.int64()), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("logprobs_mode", pa.utf8(), nullable=False),
    ]
)
FINGERPRINT = pa.struct(
    [
        pa.field(name, pa.utf8(), nullable=False)
        for name in ("tokenizer_digest", "dtype", "engine", "engine_version")
    ]
)  # fmt: skip
SEGMENT = pa.struct(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("proof", pa.int64(), nullable=False),
    ]
)

_GROUP = (
    Column(name="group_id", type=pa.utf8(), doc="run/p<prompt>/e<epoch>/a<attempt>"),
    Column(name="claim_id", type=pa.utf8(), doc="one worker incarnation's work on one request"),
    Column(name="prompt_id", type=pa.utf8(), doc="id in the prompt source"),
    Column(name="task", type=pa.utf8(), doc="for mixtures and metrics by task"),
    Column(name="attempt", type=pa.int32(), doc="0 for the first request of this prompt, +1 for each one after"),
    Column(name="group_size", type=pa.int32(), doc="completions asked for"),
    Column(name="worker_id", type=pa.utf8(), doc="who sampled it"),
    Column(name="incarnation", type=pa.utf8(), doc="which life of that worker"),
    Column(name="sampling", type=SAMPLING, doc="every transform that changes the distribution sampled from"),
    Column(name="fingerprint", type=FINGERPRINT, doc="what besides the weights decides a log-probability"),
    Column(name="reward_function", type=pa.utf8(), doc="name@version"),
    Column(name="requested_at", type=TIMESTAMP, doc="the request was issued (trainer clock)"),
)
GROUP_COLUMNS = len(_GROUP)
_ROW = (
    Column(name="trajectory_id", type=pa.utf8(), doc="group_id/index_in_group"),
    Column(name="index_in_group", type=pa.int32(), doc="0 ... group_size - 1"),
    Column(
        name="segments", type=pa.list_(SEGMENT),
        doc="runs of tokens by policy version; lengths add up to T; proof: policy offset of the worker's VersionLoaded",
    ),
    Column(name="finish_reason", type=pa.utf8(), doc="stop, length or abort"),
    Column(name="reward", type=pa.float64(), doc="null: the reward function failed", nullable=True),
    Column(name="reward_parts", type=pa.map_(pa.utf8(), pa.float64()), doc="components of the reward"),
    Column(name="reward_error", type=pa.utf8(), doc="why the reward failed", nullable=True),
    Column(name="started_at", type=TIMESTAMP, doc="sampling began (worker clock)"),
    Column(name="finished_at", type=TIMESTAMP, doc="sampling ended (worker clock)"),
    Column(name="published_at", type=TIMESTAMP, doc="handed to the log (worker clock)"),
    Column(name="text", type=pa.utf8(), doc="decoded completion, for people; null when switched off", nullable=True),
    Column(name="metadata", type=TEXT_MAP, doc="free"),
    Column(name="prompt_token_ids", type=pa.list_(pa.int32()), doc="[P] the prompt as the engine saw it"),
    Column(name="token_ids", type=pa.list_(pa.int32()), doc="[T] the completion exactly as sampled"),
    Column(
        name="logprobs", type=pa.list_(pa.float32()),
        doc="[T] of each token under the distribution it was sampled from; 0.0 where loss_mask is false",
    ),
    Column(name="loss_mask", type=pa.list_(pa.bool_()), doc="[T] false: not sampled by the policy (tool output)"),
)  # fmt: skip
TRAJECTORY = Format("trajectory", 1, 0, "TrajectoriesCompleted", _GROUP + _ROW)


def sampling_to_row(sampling: Sampling) -> Row:
    """Values in the order of SAMPLING."""
    return (
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.presence_penalty,
        sampling.frequency_penalty, sampling.repetition_penalty, sampling.logit_bias, sampling.min_tokens,
        sampling.max_tokens, sampling.stop_token_ids, sampling.seed, sampling.logprobs_mode,
    )  # fmt: skip


def sampling_from_row(row: Row) -> Sampling:
    """The other way; values are checked by `trajectory_validate.sampling_fault`."""
    return Sampling(
        temperature=row[0], top_p=row[1], top_k=row[2], min_p=row[3], presence_penalty=row[4],
        frequency_penalty=row[5], repetition_penalty=row[6], logit_bias=row[7], min_tokens=row[8],
        max_tokens=row[9], stop_token_ids=row[10], seed=row[11], logprobs_mode=row[12],
    )  # fmt: skip


def fingerprint_to_row(fingerprint: Fingerprint) -> Row:
    """Values in the order of FINGERPRINT."""
    return (fingerprint.tokenizer_digest, fingerprint.dtype, fingerprint.engine, fingerprint.engine_version)


def fingerprint_from_row(row: Row) -> Fingerprint:
    """The other way."""
    return Fingerprint(tokenizer_digest=row[0], dtype=row[1], engine=row[2], engine_version=row[3])


def map_to_row(mapping: dict[str, Any]) -> Row:
    """A map column's value: (key, value) pairs sorted by key."""
    return tuple(sorted(mapping.items()))


def group_part(trajectory: Trajectory) -> Row:
    """The group columns of a row."""
    t = trajectory
    return (
        t.group_id, t.claim_id, t.prompt_id, t.task, t.attempt, t.group_size, t.worker_id, t.incarnation,
        sampling_to_row(t.sampling), fingerprint_to_row(t.fingerprint), t.reward_function, t.requested_at_us,
    )  # fmt: skip


def to_row(trajectory: Trajectory) -> Row:
    """The row tuple of a trajectory."""
    t = trajectory
    segments = tuple([(s.version, s.length, s.proof) for s in t.segments])
    return (
        *group_part(t),
        t.trajectory_id, t.index_in_group, segments, t.finish_reason, t.reward, map_to_row(t.reward_parts),
        t.reward_error, t.started_at_us, t.finished_at_us, t.published_at_us, t.text, map_to_row(t.metadata),
        t.prompt_token_ids, t.token_ids, t.logprobs, t.loss_mask,
    )  # fmt: skip


def from_row(row: Row, sampling: Sampling, fingerprint: Fingerprint) -> Trajectory:
    """The trajectory of a row without nulls where none may be. Its values are not checked here."""
    (
        group_id, claim_id, prompt_id, task, attempt, group_size, worker_id, incarnation, _, _, reward_function,
        requested_at, trajectory_id, index_in_group, segments, finish_reason, reward, reward_parts, reward_error,
        started_at, finished_at, published_at, text, metadata, prompt_token_ids, token_ids, logprobs, loss_mask,
    ) = row  # fmt: skip
    return Trajectory(
        trajectory_id=TrajectoryId(trajectory_id),
        group_id=GroupId(group_id),
        claim_id=ClaimId(claim_id),
        prompt_id=prompt_id,
        task=task,
        attempt=attempt,
        index_in_group=index_in_group,
        group_size=group_size,
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        prompt_token_ids=prompt_token_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        loss_mask=loss_mask,
        segments=tuple([Segment(version=v, length=n, proof=p) for v, n, p in segments]),
        sampling=sampling,
        fingerprint=fingerprint,
        finish_reason=cast(Any, finish_reason),
        reward=reward,
        reward_parts=dict(reward_parts),
        reward_function=reward_function,
        reward_error=reward_error,
        requested_at_us=requested_at,
        started_at_us=started_at,
        finished_at_us=finished_at,
        published_at_us=published_at,
        text=text,
        metadata=dict(metadata),
    )
