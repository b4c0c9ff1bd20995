"""Groups of the log judged again, at the instants they were decided, by any rules: ready, dropped, or waiting.

The trainer's own functions judge. What time decided (a group that was lost, a poisoned prompt, the end of the run) no
rule can decide again: it is carried over as recorded, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from consumers.offline.reanalyse.stream import RecordedGroup, RecordedTransaction
from consumers.offline.trained_steps import StepRow
from consumers.trainer.grouping import Claim, GroupBuffer, HeldRow
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.selection import DoomedGroup, ReadyGroup, SelectionRules, judge_group
from consumers.trainer.step import Advantages, AgeWeights
from schemas.ledger import DecisionRow, Reason
from schemas.trajectory import DecodedRow, Trajectory

JUDGED_AGAIN = frozenset(
    {Reason.STALE, Reason.OTHER_BRANCH, Reason.ZERO_VARIANCE, Reason.REWARD_FAILED, Reason.SUPPORT_MISMATCH}
)
"""reasons that follow from rows, settings and policy"""
CARRIED_OVER: Mapping[str, str] = {
    Reason.LOST: "no row came in time",
    Reason.INCOMPLETE: "members were missing when time was up, or did not validate",
    Reason.UNPROVEN: "a proof that never appeared in policy, or names another weight",
    Reason.ABANDONED: "another branch began",
    Reason.RUN_ENDED: "the run ended first",
    Reason.POISON_PROMPT: "its prompt killed workers",
    Reason.STEP_FAILED: "the step could not be computed",
    Reason.DUPLICATE: "another claim was complete first",
    Reason.CONFLICT: "the same claim and index with other bytes",
    Reason.GROUP_CLOSED: "its group was decided already",
}
"""reason -> what decided it; and every invalid:<code>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReanalysisRules:
    """What a trainer decides by and what it computes from what it decided: of the run itself, or others."""

    selection: SelectionRules
    group_size: int
    age_weights: AgeWeights
    advantages: Advantages
    learner: LearnerSettings
    fingerprint: Mapping[str, str]
    """of the trainer"""
    ranks: int = 1
    """processes of the trainer: they cut a step into other sums"""

    @property
    def largest_lag(self) -> int:
        """Nothing older is trained."""
        return self.selection.admission.max_lag


class Fate(StrEnum):
    """What becomes of a group."""

    TRAINED = "trained"
    DROPPED = "dropped"
    WAITING = "waiting"
    """not yet: it would have been decided at a later instant than the recorded one"""
    CARRIED_OVER = "carried_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """One group by one set of rules."""

    recorded: RecordedGroup
    fate: Fate
    reason: str = ""
    """why it is dropped"""
    ready: ReadyGroup | None = None
    """where it is trained"""
    row_fates: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    """(partition, offset, row) of members -> "" when trained, else the reason; other rows are carried over"""

    def fate_of(self, row: DecisionRow) -> str:
        """ "" for a row that is trained, else why it is dropped."""
        return self.row_fates.get(place(row), row.reason or self.reason)


Reward = Callable[[RecordedGroup, Trajectory], tuple[float | None, str | None]]
"""(group, row) -> reward and what failed"""


def place(row: DecisionRow) -> tuple[int, int, int]:
    """Where a decided row lies."""
    return (
        -1 if row.partition is None else row.partition,
        -1 if row.offset is None else row.offset,
        -1 if row.row is None else row.row,
    )


def judged(
    group: RecordedGroup,
    at: RecordedTransaction,
    rules: ReanalysisRules,
    *,
    reward: Reward | None = None,
) -> JudgedGroup:
    """The group under these rules, with the rewards of `reward` or its own. Against what the trainer could know."""
    members = group.members()
    if not _can_be_judged(group, members, rules.group_size):
        return carried_over(group)
    buffer = _buffer(group, members, reward)
    outcome = judge_group(buffer, at.fold, at.base, rules.selection, group_size=rules.group_size)
    if outcome is None:
        fates = {place(row.decision): Fate.WAITING.value for row in members}
        return JudgedGroup(recorded=group, fate=Fate.WAITING, reason=Fate.WAITING, row_fates=fates)
    if isinstance(outcome, DoomedGroup):
        fates = {place(row.decision): outcome.reason.value for row in members}
        return JudgedGroup(recorded=group, fate=Fate.DROPPED, reason=outcome.reason, row_fates=fates)
    return JudgedGroup(recorded=group, fate=Fate.TRAINED, ready=outcome, row_fates=_member_fates(outcome))


def carried_over(group: RecordedGroup) -> JudgedGroup:
    """As recorded."""
    return JudgedGroup(recorded=group, fate=Fate.CARRIED_OVER, reason=group.decision.reason)


def _can_be_judged(group: RecordedGroup, members: tuple[StepRow, ...], group_size: int) -> bool:
    """Rules decided it, and all that they looked at is in the log."""
    return (group.was_trained or group.decision.reason in JUDGED_AGAIN) and len(members) == group_size


def _member_fates(group: ReadyGroup) -> dict[tuple[int, int, int], str]:
    return {
        (*member.held.key, member.held.row.row): ""
        if member.trained
        else (member.verdict.reason.value or Reason.REWARD_FAILED.value)
        for member in group.members
    }


def _buffer(group: RecordedGroup, members: tuple[StepRow, ...], reward: Reward | None) -> GroupBuffer:
    """The group as the trainer held it when its claim was complete."""
    held: dict[int, HeldRow] = {}
    for member in members:
        row, trajectory = member.row, member.trajectory
        assert row is not None and trajectory is not None
        partition, offset, _ = place(member.decision)
        held[trajectory.index_in_group] = HeldRow(
            key=(partition, offset), row=_rewarded(group, row, trajectory, reward)
        )
    claim = next(iter(held.values())).trajectory.claim_id
    return GroupBuffer(group.opened, claims={claim: Claim(members=held)}, winner=claim)


def _rewarded(group: RecordedGroup, row: DecodedRow, trajectory: Trajectory, reward: Reward | None) -> DecodedRow:
    if reward is None:
        return row
    value, error = reward(group, trajectory)
    return replace(row, trajectory=replace(trajectory, reward=value, reward_error=error))


def rederived(group: RecordedGroup, found: JudgedGroup) -> str:
    """How the run's own rules and the ledger differ over a group and its members; "" when they agree.

    Advantages and weights are compared with the step, where all its groups are known."""
    if found.fate is Fate.CARRIED_OVER:
        return ""
    said = "trained" if group.was_trained else f"dropped: {group.decision.reason}"
    now = "trained" if found.fate is Fate.TRAINED else f"{found.fate}: {found.reason}"
    if said != now:
        return f"{group.group_id}: the ledger says {said}, its own rules say {now}"
    if found.ready is None:
        return ""
    lags = {(*m.held.key, m.held.row.row): m.verdict.policy_lag for m in found.ready.members}
    for row in group.members():
        decision = row.decision
        told = (decision.reason, decision.policy_lag)
        again = (found.row_fates[place(decision)], lags[place(decision)])
        if told != again:
            return f"{decision.trajectory_id}: the ledger says (reason, lag) {told}, its own rules say {again}"
    return ""
