"""From finished, scored completions to trajectory rows of one group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from infra.ports import Completion, Reward
from schemas.ids import GroupId, Incarnation, WorkerId, claim_id, trajectory_id
from schemas.trajectory import BoolArray, Fingerprint, PromptRequest, Trajectory


@dataclass(slots=True, kw_only=True)
class ClaimedGroup:
    """A request this worker has claimed, and what is finished of it."""

    request: PromptRequest
    partition: int
    offset: int
    incarnation: str
    """at the time of the claim"""
    claimed_at_s: float
    completions: dict[int, Completion] = field(default_factory=dict)

    def is_complete(self) -> bool:
        """Every member is finished."""
        return len(self.completions) == self.request.group_size

    def in_order(self) -> list[Completion]:
        """Completions by index."""
        return [self.completions[index] for index in sorted(self.completions)]


def trajectories(
    group: ClaimedGroup,
    *,
    worker: str,
    rewards: Sequence[Reward],
    reward_function: str,
    fingerprint: Fingerprint,
    keep_text: bool,
    now_us: int,
) -> list[Trajectory]:
    """Rows in order of the index in the group. `rewards`: in that order; `reward_function`: name@version."""
    request = group.request
    claim = claim_id(WorkerId(worker), Incarnation(group.incarnation), request.request_position)
    return [
        Trajectory(
            trajectory_id=trajectory_id(GroupId(request.group_id), completion.index_in_group),
            group_id=request.group_id,
            claim_id=claim,
            prompt_id=request.prompt_id,
            task=request.task,
            attempt=request.attempt,
            index_in_group=completion.index_in_group,
            group_size=request.group_size,
            worker_id=WorkerId(worker),
            incarnation=Incarnation(group.incarnation),
            prompt_token_ids=request.prompt_token_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            loss_mask=_loss_mask(completion),
            segments=completion.segments,
            sampling=request.sampling,
            fingerprint=fingerprint,
            finish_reason=completion.finish_reason,
            reward=score.value,
            reward_parts=dict(score.parts),
            reward_function=reward_function,
            reward_error=score.error,
            requested_at_us=request.issued_at_us,
            started_at_us=completion.started_at_us,
            finished_at_us=completion.finished_at_us,
            published_at_us=now_us,
            text=completion.text if keep_text else None,
        )
        for completion, score in zip(group.in_order(), rewards, strict=True)
    ]


def _loss_mask(completion: Completion) -> BoolArray:
    if completion.loss_mask is not None:
        return completion.loss_mask
    return np.ones(len(completion.token_ids), dtype=np.bool_)
