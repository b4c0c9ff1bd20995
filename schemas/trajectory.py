"""The trajectory row: what one completion is, who sampled it, and under which distribution.

Values only; the Arrow form is in `trajectory_codec`. Token data are read-only numpy arrays, because a
row that came from the log must never be edited in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import numpy as np
import numpy.typing as npt

from schemas.ids import ClaimId, GroupId, Incarnation, TrajectoryId, WorkerId

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens sampled under one policy version."""

    version: int
    length: int
    """tokens; the lengths of a row's segments add up to its completion length"""
    proof: int
    """offset in `policy` of the worker's own VersionLoaded for this version"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Every transform that changes the distribution a token is drawn from. Neutral values by default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off"""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, sorted by token id"""
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """processed: under the distribution sampled from, after temperature and transforms"""


NEUTRAL = Sampling()
_UNMODELLED = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "min_tokens", "logprobs_mode",
)  # fmt: skip
_unmodelled = attrgetter(*_UNMODELLED)
_NOTHING_UNMODELLED = _unmodelled(NEUTRAL)


def unmodelled_transform(sampling: Sampling) -> str:
    """The first setting that changes the distribution in a way the trainer does not model; empty when there is none.

    A truncated support or a penalty that the trainer does not apply: the sampled log-probabilities would be of a
    distribution that the trainer's are not. Temperature is applied alike on both sides."""
    if _unmodelled(sampling) == _NOTHING_UNMODELLED:
        return ""
    return next(name for name in _UNMODELLED if getattr(sampling, name) != getattr(NEUTRAL, name))


def add_segment(segments: list[Segment], *, version: int, length: int, proof: int) -> None:
    """Add tokens to the segments of a row: to the last one where it has this version and proof, else as a new one."""
    last = segments[-1] if segments else None
    if last is not None and (last.version, last.proof) == (version, proof):
        length += segments.pop().length
    segments.append(Segment(version=version, length=length, proof=proof))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What besides the weights decides a log-probability; compared part by part with the trainer's own."""

    tokenizer_digest: str
    """sha256 over tokenizer files and chat template"""
    dtype: str
    """served dtype, e.g. float32"""
    engine: str
    """hf | vllm"""
    engine_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One prompt, one completion, one reward. A record holds the rows of one group."""

    trajectory_id: TrajectoryId
    group_id: GroupId
    claim_id: ClaimId
    prompt_id: str
    task: str
    attempt: int
    index_in_group: int
    group_size: int
    worker_id: WorkerId
    incarnation: Incarnation

    prompt_token_ids: IntArray
    """[P]"""
    token_ids: IntArray
    """[T] the completion, exactly as sampled; never re-encoded from text"""
    logprobs: FloatArray
    """[T] log-probability of each sampled token, as sampled; 0.0 where loss_mask is false"""
    loss_mask: BoolArray
    """[T] false: not sampled by the policy (tool output); does not count for lag"""
    segments: tuple[Segment, ...]

    sampling: Sampling
    fingerprint: Fingerprint
    finish_reason: FinishReason
    reward: float | None
    """None: the reward function failed; `reward_error` says why"""
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_function: str
    """name@version"""
    reward_error: str | None = None

    requested_at_us: int
    started_at_us: int
    finished_at_us: int
    published_at_us: int
    """microseconds since 1970 UTC, producer clocks"""
    text: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRow:
    """One row of a record that decoded as a whole: good (`trajectory`), or refused on its own (`code`)."""

    row: int
    """row inside the record's batch"""
    row_sha256: str
    """hex, over the row's canonical bytes"""
    group_id: str
    trajectory_id: str
    claim_id: str
    trajectory: Trajectory | None
    code: str = ""
    """empty when good; otherwise it stands in the ledger as invalid:<code>"""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """PromptRequested: the trainer asks for one group. Issued only by the trainer, in its transactions."""

    group_id: GroupId
    request_position: int
    """0, 1, 2, ... over the run; request i lies in partition i mod 16"""
    prompt_id: str
    task: str
    epoch: int
    attempt: int
    group_size: int
    prompt_token_ids: IntArray
    prompt_text: str | None = None
    reference: dict[str, str] = field(default_factory=dict)
    """what the reward function needs (numbers, target, answer ...)"""
    sampling: Sampling
    intended_step: int
    """depth of the version this group is meant to update"""
    min_version: int
    """a worker waits for this version before it takes the request"""
    fallback_version: int
    """after a short wait a worker takes the request when it holds at least this version (step - max_lag)"""
    issued_at_us: int
    traceparent: str | None = None
