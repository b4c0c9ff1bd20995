"""What every engine does alike for one member: which sampling it takes, its random stream, its tokens, its Completion.

Imports neither torch nor an engine's library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from infra.ports import Completion
from schemas.errors import ConfigError
from schemas.trajectory import NEUTRAL, Sampling, Segment, add_segment, unmodelled_transform


@dataclass(slots=True, kw_only=True)
class SampledMember:
    """One member while it is being sampled."""

    group_id: str
    index_in_group: int
    prompt: list[int]
    """and the earlier turns, where there are any"""
    sampling: Sampling
    started_at_us: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], version: int, proof: int) -> None:
        """Add sampled tokens, stamped with the weights that sampled them."""
        if tokens:
            self.tokens += tokens
            self.logprobs += logprobs
            add_segment(self.segments, version=version, length=len(tokens), proof=proof)

    def stopped(self) -> bool:
        """The last token is a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self.sampling.stop_token_ids


def completions(
    members: Sequence[SampledMember], decode: Callable[[list[list[int]]], list[str]] | None, now_us: int
) -> list[Completion]:
    """Finished members as the port says them; `decode`: token ids to texts, None where nobody wants texts."""
    if not members:
        return []
    texts: list[str | None] = [None] * len(members)
    if decode is not None:
        texts = [*decode([member.tokens[: -1 if member.stopped() else None] for member in members])]
    return [
        Completion(
            group_id=member.group_id,
            index_in_group=member.index_in_group,
            token_ids=np.asarray(member.tokens, dtype=np.int32),
            logprobs=np.asarray(member.logprobs, dtype=np.float32),
            loss_mask=np.ones(len(member.tokens), dtype=np.bool_),
            segments=tuple(member.segments),
            finish_reason="stop" if member.stopped() else "length",
            text=text,
            started_at_us=member.started_at_us,
            finished_at_us=now_us,
        )
        for member, text in zip(members, texts, strict=True)
    ]


def stream_key(run_seed: int, group_id: str, index: int, tokens_before: int) -> bytes:
    """32 bytes that name a member's random stream from its start (0 tokens before) or from where it goes on."""
    name = f"{run_seed}/{group_id}/{index}" + (f"/{tokens_before}" if tokens_before else "")
    return hashlib.sha256(name.encode()).digest()


def refuse_sampling(sampling: Sampling, why: str) -> None:
    """ConfigError for a sampling that cannot be served; nothing is dropped silently. `why` goes behind the setting."""
    name = unmodelled_transform(sampling)
    if name:
        raise ConfigError(
            f"sampling.{name} = {getattr(sampling, name)!r}{why} (only {getattr(NEUTRAL, name)!r}): leave it out"
        )
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ConfigError(
            f"sampling.temperature = {sampling.temperature}: must be 0 (greedy, evaluation only) or above"
        )
    if sampling.max_tokens < 1:
        raise ConfigError(f"sampling.max_tokens = {sampling.max_tokens}: must be at least 1")
