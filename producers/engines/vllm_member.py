"""One member of a group while it is sampled by vLLM: what it has, and what is asked for next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infra.ports import Completion, EngineRequest
from producers.engines.vllm_sampling import sampling_arguments, seed_of
from schemas.trajectory import Sampling, Segment


@dataclass(slots=True, kw_only=True)
class Member:
    """State of one member."""

    group_id: str
    index_in_group: int
    prompt: list[int]
    """and the earlier turns, where there are any"""
    tokens_before: int
    """of earlier turns"""
    limit: int
    """most tokens of this completion"""
    sampling: Sampling
    rng_seed: int
    started_at_us: int
    version: int = -1
    proof: int = -1
    """of the request that runs now"""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def context(self) -> list[int]:
        """Everything that is there already."""
        return self.prompt + self.tokens

    def arguments(self) -> Mapping[str, Any]:
        """Of vLLM's SamplingParams, for what is left to sample."""
        before = self.tokens_before + len(self.tokens)
        seed = seed_of(self.rng_seed, self.group_id, self.index_in_group, before)
        return sampling_arguments(self.sampling, max_tokens=self.limit - len(self.tokens), seed=seed)

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add what one request sampled, under the version and proof it began with."""
        if not tokens:
            return
        self.tokens += tokens
        self.logprobs += logprobs
        length, last = len(tokens), self.segments[-1] if self.segments else None
        if last is not None and (last.version, last.proof) == (self.version, self.proof):
            self.segments.pop()
            length += last.length
        self.segments.append(Segment(version=self.version, length=length, proof=self.proof))

    def stopped(self) -> bool:
        """The last token is a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self.sampling.stop_token_ids

    def finished(self) -> bool:
        """Stopped, or out of tokens."""
        return self.stopped() or len(self.tokens) >= self.limit


def members_of(request: EngineRequest, now_us: int) -> list[Member]:
    """The members that are asked for, before their next token."""
    prompt = request.request
    ids = [*(int(token) for token in prompt.prompt_token_ids), *(int(token) for token in request.context)]
    return [
        Member(
            group_id=str(prompt.group_id),
            index_in_group=index,
            prompt=ids,
            tokens_before=len(request.context),
            limit=request.new_tokens,
            sampling=prompt.sampling,
            rng_seed=request.rng_seed,
            started_at_us=now_us,
        )
        for index in request.members
    ]


def completion(member: Member, text: str | None, now_us: int) -> Completion:
    """The finished member as the port says it."""
    return Completion(
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
