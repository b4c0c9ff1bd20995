"""Trajectories to read: the best or worst of a version, or of the run, with text, reward and what became of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from consumers.offline.outcomes import Outcome, first_outcomes
from consumers.offline.run_log import RunLog
from schemas.trajectory import Trajectory

Order = Literal["best", "worst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory for a person."""

    trajectory_id: str
    task: str
    prompt_text: str | None
    text: str | None
    """None: the run did not keep text"""
    reward: float
    reward_parts: dict[str, float]
    completion_tokens: int
    finish_reason: str
    sampled_under: tuple[int, ...]
    """policy versions of its segments"""
    worker: str
    decision: str
    """trained, replayed or dropped; pending while the run has not decided"""
    reason: str
    version: int | None
    """version it was trained into"""
    policy_lag: int | None
    advantage: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def line(self) -> str:
        """One line of words."""
        what = f"{self.decision} {self.reason}".strip()
        return f"{self.reward:g}  {self.trajectory_id}  [{what}]  {self.prompt_text or ''!s} -> {self.text!r}"


def samples(run_log: RunLog, *, version: int | None = None, order: Order = "best", limit: int = 10) -> list[Sample]:
    """The `limit` trajectories with the highest or lowest reward; with `version` only those its step decided.

    Trajectories whose reward failed have none to sort by and are left out. Equal rewards: log order."""
    if limit < 1:
        raise ValueError(f"limit is {limit}, at least 1")
    sign = -1.0 if order == "best" else 1.0
    outcomes = first_outcomes(run_log, version=version)
    chosen = heapq.nsmallest(
        limit, _candidates(run_log, outcomes, version), key=lambda found: (sign * found[0], found[1])
    )
    prompts: dict[str, str | None] = {trajectory.group_id: None for _, _, trajectory, _ in chosen}
    for entry in run_log.requests():
        if entry.request is not None and entry.request.group_id in prompts:
            prompts[entry.request.group_id] = entry.request.prompt_text
    return [_sample(trajectory, found, prompts[trajectory.group_id]) for _, _, trajectory, found in chosen]


def _candidates(
    run_log: RunLog, outcomes: dict[tuple[int, int, int], Outcome], version: int | None
) -> Iterator[tuple[float, tuple[int, int, int], Trajectory, Outcome | None]]:
    for entry in run_log.trajectories():
        for row in entry.rows:
            key = (entry.partition, entry.offset, row.row)
            found = outcomes.get(key)
            if row.trajectory is None or row.trajectory.reward is None or (version is not None and found is None):
                continue
            yield row.trajectory.reward, key, row.trajectory, found


def _sample(t: Trajectory, found: Outcome | None, prompt_text: str | None) -> Sample:
    decision = None if found is None else found.decision
    return Sample(
        trajectory_id=t.trajectory_id,
        task=t.task,
        prompt_text=prompt_text,
        text=t.text,
        reward=t.reward if t.reward is not None else 0.0,
        reward_parts=dict(t.reward_parts),
        completion_tokens=len(t.token_ids),
        finish_reason=t.finish_reason,
        sampled_under=tuple(segment.version for segment in t.segments),
        worker=f"{t.worker_id}/{t.incarnation}",
        decision="pending" if decision is None else decision.decision.value,
        reason="" if decision is None else decision.reason,
        version=found.version if found is not None and decision is not None and decision.use_count > 0 else None,
        policy_lag=None if decision is None else decision.policy_lag,
        advantage=None if decision is None else decision.advantage,
    )
