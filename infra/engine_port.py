"""The port of the engines: what is asked, what comes back, and what an engine promises.

Adapters: producers/engines/. One contract suite (tests/contract/engine_contract.py) holds them to this page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The outcome of scoring one completion. A failure is not a zero: value is None and `error` says why."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the engine is asked for: one group from its prompt on, or one member of it from a later turn on."""

    request: PromptRequest
    rng_seed: int
    """run seed; the engine derives each member's stream from (seed, group_id, index), and with a context from
    (seed, group_id, index, length of the context)"""
    member: int | None = None
    """only this member of the group is sampled; None: all"""
    context: tuple[int, ...] = ()
    """tokens after the prompt that are there already (earlier turns); the Completion holds only what follows them"""

    def __post_init__(self) -> None:
        if self.member is not None and not 0 <= self.member < self.request.group_size:
            raise ConfigError(f"{self.request.group_id}: member {self.member} of a group of {self.request.group_size}")
        if self.context and self.member is None:
            raise ConfigError(f"{self.request.group_id}: a context belongs to one member: name it")
        if self.context and self.new_tokens < 1:
            raise ConfigError(
                f"{self.request.group_id}: a context of {len(self.context)} tokens leaves none of sampling.max_tokens "
                f"= {self.request.sampling.max_tokens}"
            )

    @property
    def members(self) -> range:
        """Indices that are sampled."""
        return range(self.request.group_size) if self.member is None else range(self.member, self.member + 1)

    @property
    def new_tokens(self) -> int:
        """Most tokens of a completion: sampling.max_tokens counts the context too."""
        return self.request.sampling.max_tokens - len(self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished member of a group."""

    group_id: str
    index_in_group: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length", "abort"]
    text: str | None
    started_at_us: int
    finished_at_us: int
    loss_mask: npt.NDArray[np.bool_] | None = None
    """False: not sampled by the policy (tool output); None: all sampled"""
    reward: Reward | None = None
    """given by an environment; None: a reward function judges"""

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy sampled."""
        return len(self.token_ids) if self.loss_mask is None else int(self.loss_mask.sum())


class GenerationEngine(Protocol):
    """Samples completions. Not thread-safe, except that `load`, `score` and `generate_greedily` may run on another
    thread while paused."""

    def submit(self, request: EngineRequest) -> None:
        """Queue one group, or one member of it."""
        ...

    def poll(self) -> Sequence[Completion]:
        """Do a bounded amount of work (one decode step of what runs) and return members finished by it."""
        ...

    def busy(self) -> bool:
        """`poll` has something to do."""
        ...

    def computes_alone(self) -> bool:
        """Nothing is left for `poll` to do until the engine rings: it computes elsewhere. False: `poll` computes."""
        ...

    def running_groups(self) -> frozenset[str]:
        """Group ids queued or running, also while they wait for an environment."""
        ...

    def pause(self, mode: Literal["finish", "keep"]) -> None:
        """finish: let running groups end through `poll`, admit none; keep: freeze at once."""
        ...

    def load(self, directory: Path, version: int) -> None:
        """Replace the weights in place and forget every cache; segments of later tokens name `version` with the
        proof set by `set_proof`. CheckpointInvalid before anything was touched, or `weights_touched()` is True."""
        ...

    def weights_touched(self) -> bool:
        """A load began to replace weights and did not end well: serve nothing until a full good load."""
        ...

    def set_proof(self, proof: int) -> None:
        """The policy offset of this worker's VersionLoaded for the loaded version."""
        ...

    def resume(self) -> None:
        """Go on after pause."""
        ...

    def score(
        self, token_ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Sequence[npt.NDArray[np.float32]]:
        """Temperature-1 log-probability of each token after the prompt, per sequence, through the generating path."""
        ...

    def prefix_block(self) -> int:
        """Tokens a block of the prefix cache: keys and values that outlive a request. 0: none do."""
        ...

    def generate_greedily(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        """The `tokens` likeliest tokens after each prompt and their temperature-1 log-probabilities, through the path
        and the caches of `poll`. Needs whole weights, no proof; what runs stays where it is."""
        ...

    def identity(self) -> Mapping[str, str]:
        """engine, engine_version, dtype, tokenizer_digest: the fingerprint parts."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...
