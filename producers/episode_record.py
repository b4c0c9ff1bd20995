"""One episode of one member, token by token: what the policy sampled as it was sampled, observations in between.

Guarantees: a sampled token keeps its id, log-probability and segment; an observation's tokens have log-probability
0.0, loss mask false, and lie in the segment of the turn before them (the opening's in that of the first turn), so they
never name a version of their own. State of one episode; no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from infra.ports import Completion, Reward
from schemas.trajectory import Segment, add_segment


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """What there is of an episode."""

    group_id: str
    index_in_group: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """[turns] as the environment gets them"""
    observations: list[str] = field(default_factory=list)
    """what the environment said, the opening first"""
    shown: list[str] = field(default_factory=list)
    """turns and observations in order: the text of the whole"""
    opening_tokens: int = 0
    """tokens that have no segment yet: before the first turn"""
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    started_at_us: int | None = None
    finished_at_us: int = 0

    @property
    def context(self) -> tuple[int, ...]:
        """What the next turn continues."""
        return tuple(self.token_ids)

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return len(self.texts)

    def add_turn(self, completion: Completion) -> None:
        """What the engine sampled after `context`."""
        sampled = completion.loss_mask
        self.token_ids += completion.token_ids.tolist()
        self.logprobs += completion.logprobs.tolist()
        self.loss_mask += [True] * len(completion.token_ids) if sampled is None else sampled.tolist()
        for segment in completion.segments:
            length, self.opening_tokens = segment.length + self.opening_tokens, 0
            add_segment(self.segments, version=segment.version, length=length, proof=segment.proof)
        self.texts.append(completion.text or "")
        self.shown.append(self.texts[-1])
        self.finish_reason = completion.finish_reason
        if self.started_at_us is None:
            self.started_at_us = completion.started_at_us
        self.finished_at_us = completion.finished_at_us

    def add_observation(self, text: str, token_ids: Sequence[int]) -> None:
        """What the policy sees next. `token_ids`: with whatever the template puts around it."""
        count = len(token_ids)
        self.token_ids += token_ids
        self.logprobs += [0.0] * count
        self.loss_mask += [False] * count
        self.shown.append(text)
        if not self.segments:
            self.opening_tokens += count
        elif count:
            last = self.segments[-1]
            add_segment(self.segments, version=last.version, length=count, proof=last.proof)

    def completion(self, reward: Reward) -> Completion:
        """The whole episode as one completion."""
        assert self.started_at_us is not None, "an episode has at least one turn"
        return Completion(
            group_id=self.group_id,
            index_in_group=self.index_in_group,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            loss_mask=np.asarray(self.loss_mask, dtype=np.bool_),
            segments=tuple(self.segments),
            finish_reason=self.finish_reason,
            text="".join(self.shown),
            started_at_us=self.started_at_us,
            finished_at_us=self.finished_at_us,
            reward=reward,
        )
