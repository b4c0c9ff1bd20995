"""Ledger rows from what became of rows, groups and records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from consumers.trainer.grouping import GroupBuffer, HeldRow
from consumers.trainer.positions import RecordKey
from consumers.trainer.replay import ReplayedRow
from schemas.errors import InvalidRecord
from schemas.ledger import INVALID_PREFIX, Decision, DecisionRow, Reason, Subject
from schemas.trajectory import DecodedRow


def dropped_row(
    held: HeldRow, reason: str, now_us: int, *, policy_lag: int | None = None, detail: str = ""
) -> DecisionRow:
    """A trajectory that is not trained. Its own refusal, when it has one, goes before the group's reason."""
    return _about_row(
        held.key,
        held.row,
        now_us,
        reason=held.refusal or reason,
        policy_lag=policy_lag,
        detail=held.detail or detail,
    )


def trained_row(held: HeldRow, *, policy_lag: int, weight: float, advantage: float, now_us: int) -> DecisionRow:
    """A trajectory's first use."""
    return _about_row(
        held.key,
        held.row,
        now_us,
        decision=Decision.TRAINED,
        policy_lag=policy_lag,
        weight=weight,
        use_count=1,
        advantage=advantage,
    )


def replayed_row(row: ReplayedRow, *, use_count: int, weight: float, now_us: int) -> DecisionRow:
    """A later use of a trajectory; not its first decision."""
    return _about_row(
        row.key,
        row.row,
        now_us,
        decision=Decision.REPLAYED,
        policy_lag=row.policy_lag,
        weight=weight,
        use_count=use_count,
        advantage=row.advantage,
    )


def group_row(group_id: str, decision: Decision, reason: str, now_us: int, detail: str = "") -> DecisionRow:
    """The one decision about an issued group."""
    return _decision(
        Subject.GROUP,
        now_us,
        group_id=group_id,
        decision=decision,
        reason=reason,
        use_count=1 if decision is Decision.TRAINED else 0,
        detail=detail,
    )


def record_row(key: RecordKey, error: InvalidRecord, now_us: int) -> DecisionRow:
    """A record that could not be decoded; its bytes go to the dead letters."""
    return _decision(
        Subject.RECORD,
        now_us,
        partition=key[0],
        offset=key[1],
        reason=f"{INVALID_PREFIX}{error.code}",
        detail=error.message[:500],
    )


def _about_row(key: RecordKey, row: DecodedRow, now_us: int, **known: Any) -> DecisionRow:
    """What every decision about a trajectory says of it; dropped until `known` says otherwise."""
    trajectory = row.trajectory
    return _decision(
        Subject.TRAJECTORY,
        now_us,
        group_id=row.group_id,
        trajectory_id=row.trajectory_id,
        partition=key[0],
        offset=key[1],
        row=row.row,
        row_sha256=row.row_sha256,
        reward=None if trajectory is None else trajectory.reward,
        completion_tokens=None if trajectory is None else len(trajectory.token_ids),
        **known,
    )


_UNKNOWN: Mapping[str, Any] = {
    "group_id": None, "trajectory_id": None, "partition": None, "offset": None, "row": None, "row_sha256": None,
    "decision": Decision.DROPPED, "reason": Reason.NONE, "policy_lag": None, "weight": 0.0, "use_count": 0,
    "reward": None, "advantage": None, "completion_tokens": None,
}  # fmt: skip


def _decision(subject: Subject, now_us: int, **known: Any) -> DecisionRow:
    """A dropped something, with nothing known about it but this. Made at once: there are hundreds in a step."""
    return DecisionRow(subject=subject, consumed_at_us=now_us, **{**_UNKNOWN, **known})


def drop_group(buffer: GroupBuffer, reason: Reason, now_us: int, detail: str = "") -> list[DecisionRow]:
    """The group and everything held for it, dropped for one reason; members of losing claims are duplicates."""
    rows = [group_row(buffer.group.group_id, Decision.DROPPED, reason, now_us, detail)]
    if buffer.winner is None:
        rows.extend(dropped_row(held, reason, now_us, detail=detail) for held in buffer.rows())
    else:
        members = buffer.claims[buffer.winner].members.values()
        rows.extend(dropped_row(held, reason, now_us, detail=detail) for held in members)
        rows.extend(losing_rows(buffer, now_us))
    return rows


def losing_rows(buffer: GroupBuffer, now_us: int) -> Iterable[DecisionRow]:
    """What is held besides the winning claim of a group that is trained."""
    detail = f"claim {buffer.winner} was complete first"
    for claim_id, claim in buffer.claims.items():
        if claim_id != buffer.winner:
            for held in (*claim.members.values(), *claim.broken):
                yield dropped_row(held, Reason.DUPLICATE, now_us, detail=detail)
    for held in buffer.refused:
        yield dropped_row(held, Reason.DUPLICATE, now_us)
