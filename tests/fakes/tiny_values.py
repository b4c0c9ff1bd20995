"""Values a TinyRun is made of: decisions, requests, a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from schemas.checkpoint import Manifest
from schemas.errors import InvalidRecord
from schemas.ids import GroupKey, RunId, group_id
from schemas.ledger import Decision, DecisionRow, OpenGroup, Subject
from schemas.trajectory import DecodedRow, PromptRequest, Sampling

RUN = RunId("tiny")
GROUP_SIZE = 2
CONFIG_DIGEST = "c0nf19"


def manifest(attempt: str, version: int) -> Manifest:
    """Of a version trained from the one before it."""
    return Manifest(
        run=RUN,
        attempt_id=attempt,
        parent=version - 1 if version else None,
        dtype={"all": "float32"},
        probe_sha256="p",
        fingerprint={},
        optimizer_step=version,
        has_state=True,
        library_versions={"torch": "1"},
        threads=1,
        device_type="cpu",
        logprob_chunk=512,
        code_revision="r",
        config_digest=CONFIG_DIGEST,
    )


def request(key: GroupKey, position: int, step: int, live: int, now_us: int) -> PromptRequest:
    """A request for one group."""
    return PromptRequest(
        group_id=group_id(key),
        request_position=position,
        prompt_id=f"prompt-{key.prompt}",
        task="tiny",
        epoch=0,
        attempt=key.attempt,
        group_size=GROUP_SIZE,
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        prompt_text="one, two:",
        sampling=Sampling(),
        intended_step=step,
        min_version=live,
        fallback_version=max(0, live - 1),
        issued_at_us=now_us,
    )


def open_group(asked: PromptRequest) -> OpenGroup:
    """Its entry in the open set."""
    return OpenGroup(
        group_id=asked.group_id,
        request_position=asked.request_position,
        issued_at_us=asked.issued_at_us,
        attempt=asked.attempt,
        intended_step=asked.intended_step,
    )


def refused_record(key: tuple[int, int], error: InvalidRecord, now_us: int) -> DecisionRow:
    """The decision about a record that cannot be decoded."""
    row = group_decision("", Decision.DROPPED, f"invalid:{error.code}", now_us)
    return dataclasses.replace(row, subject=Subject.RECORD, group_id=None, partition=key[0], offset=key[1])


def group_decision(group: str, decision: Decision, reason: str, now_us: int) -> DecisionRow:
    """The decision about a group."""
    return DecisionRow(
        subject=Subject.GROUP,
        group_id=group,
        trajectory_id=None,
        partition=None,
        offset=None,
        row=None,
        row_sha256=None,
        decision=decision,
        reason=reason,
        policy_lag=None,
        weight=0.0,
        use_count=int(decision is Decision.TRAINED),
        reward=None,
        advantage=None,
        completion_tokens=None,
        consumed_at_us=now_us,
    )


def trained_decisions(key: tuple[int, int], rows: Sequence[DecodedRow], lag: int, now_us: int) -> list[DecisionRow]:
    trajectories = [row.trajectory for row in rows if row.trajectory is not None]
    rewards = [t.reward or 0.0 for t in trajectories]
    mean = sum(rewards) / len(rewards)
    return [
        DecisionRow(
            subject=Subject.TRAJECTORY,
            group_id=t.group_id,
            trajectory_id=t.trajectory_id,
            partition=key[0],
            offset=key[1],
            row=row.row,
            row_sha256=row.row_sha256,
            decision=Decision.TRAINED,
            reason="",
            policy_lag=lag,
            weight=1.0,
            use_count=1,
            reward=t.reward,
            advantage=(t.reward or 0.0) - mean,
            completion_tokens=len(t.token_ids),
            consumed_at_us=now_us,
        )
        for row, t in zip(rows, trajectories, strict=True)
    ]


def dropped_decisions(key: tuple[int, int], rows: Sequence[DecodedRow], reason: str, now_us: int) -> list[DecisionRow]:
    return [
        dataclasses.replace(
            decision, decision=Decision.DROPPED, reason=reason, policy_lag=None, weight=0.0, use_count=0, advantage=None
        )
        for decision in trained_decisions(key, rows, 0, now_us)
    ]
