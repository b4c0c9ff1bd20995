"""One member of a group while it is sampled by vLLM: what it has, and what is asked for next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.ports import EngineRequest
from producers.engines.members import SampledMember
from producers.engines.vllm_sampling import sampling_arguments, seed_of


@dataclass(slots=True, kw_only=True)
class Member(SampledMember):
    """One member, and what its running request began with."""

    tokens_before: int
    """of earlier turns"""
    limit: int
    """most tokens of this completion"""
    rng_seed: int
    version: int = -1
    proof: int = -1
    """of the request that runs now"""

    def context(self) -> list[int]:
        """Everything that is there already."""
        return self.prompt + self.tokens

    def arguments(self) -> Mapping[str, Any]:
        """Of vLLM's SamplingParams, for what is left to sample."""
        before = self.tokens_before + len(self.tokens)
        seed = seed_of(self.rng_seed, self.group_id, self.index_in_group, before)
        return sampling_arguments(self.sampling, max_tokens=self.limit - len(self.tokens), seed=seed)

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
