"""Which groups make the next batch, which are to be dropped first, and which the batch waits for. Pure.

batch.order = issue: the batch is the oldest open groups and waits for them (bounded by the group time-out);
filling it from whatever is ready would make the others stale. ready: complete groups as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from consumers.trainer.admission import Admission, AdmissionRules, Verdict, judge, verdict_key
from consumers.trainer.grouping import GroupBuffer, HeldRow
from schemas.ledger import Reason
from schemas.policy_fold import PolicyFold


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRules:
    """How a batch is put together."""

    groups_per_step: int
    order: Literal["issue", "ready"]
    min_group: int
    """usable rewards a group needs, >= 2"""
    filter_zero_variance: bool
    admission: AdmissionRules
    hold_for_in_flight: bool = False
    """stale.action = wait: hold the step that would make groups in flight too old until they are in"""
    run_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedMember:
    """A member of the winning claim."""

    held: HeldRow
    verdict: Verdict

    @property
    def trained(self) -> bool:
        """It enters the loss; a member that is only withheld keeps its reward in the baseline."""
        return self.verdict.admission is Admission.ADMIT and self.held.trajectory.reward is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A group that may be trained now, members by index."""

    buffer: GroupBuffer
    members: tuple[JudgedMember, ...]

    def baseline_rewards(self) -> list[float]:
        """Usable rewards in member order, of withheld members too."""
        return [reward for m in self.members if (reward := m.held.trajectory.reward) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoomedGroup:
    """A group that can never be trained."""

    buffer: GroupBuffer
    reason: Reason
    detail: str


@dataclass(slots=True, kw_only=True)
class Selection:
    """The outcome. `batch` is empty while something must be dropped or waited for."""

    batch: list[ReadyGroup] = field(default_factory=list)
    doomed: list[DoomedGroup] = field(default_factory=list)
    waiting_for: list[str] = field(default_factory=list)
    """ids of the groups the batch waits for"""


def select(
    buffers: Sequence[GroupBuffer],
    fold: PolicyFold,
    base: int,
    rules: SelectionRules,
    *,
    group_size: int,
    step_is_full: bool = False,
    ahead: int = 0,
) -> Selection:
    """Judge the candidates (in training order) against the weights `base` and the `ahead` steps made on it (`judge`).

    Args: step_is_full: the step takes what is left of its own groups, be it less than groups_per_step.
    """
    selection = Selection()
    ready: list[ReadyGroup] = []
    depth = fold.versions[base].depth + ahead
    if step_is_full:
        buffers = [buffer for buffer in buffers if buffer.group.intended_step <= depth]
    candidates = buffers[: rules.groups_per_step] if rules.order == "issue" else buffers
    if rules.hold_for_in_flight:
        selection.waiting_for = [
            b.group.group_id
            for b in buffers
            if b.is_incomplete(group_size)
            and depth + 1 - (b.group.intended_step - rules.run_ahead) > rules.admission.max_lag
        ]
        if selection.waiting_for:
            return selection
    if rules.order == "issue":
        # Judging costs more than this look, and it is done again for every record that arrives.
        selection.waiting_for = [b.group.group_id for b in candidates if b.is_incomplete(group_size)]
        if selection.waiting_for:
            return selection
    for buffer in candidates:
        outcome = judge_group(buffer, fold, base, rules, group_size=group_size, ahead=ahead)
        if isinstance(outcome, ReadyGroup):
            ready.append(outcome)
        elif isinstance(outcome, DoomedGroup):
            selection.doomed.append(outcome)
        else:
            selection.waiting_for.append(buffer.group.group_id)
        if len(ready) == rules.groups_per_step:
            break
    if selection.doomed:
        return selection
    if len(ready) == min(rules.groups_per_step, len(buffers)):
        selection.batch = ready
    return selection


def judge_group(
    buffer: GroupBuffer, fold: PolicyFold, base: int, rules: SelectionRules, *, group_size: int, ahead: int = 0
) -> ReadyGroup | DoomedGroup | None:
    """Ready, doomed, or None: not yet."""
    if buffer.winner is None:
        spoilt = buffer.spoilt_claim(group_size)
        if spoilt is None:
            return None
        detail = f"{len(spoilt.members)}/{group_size} members are good"
        return DoomedGroup(buffer=buffer, reason=Reason.INCOMPLETE, detail=detail)
    members = buffer.claims[buffer.winner].members
    verdicts: dict[object, Verdict] = {}
    judged = []
    for _, held in sorted(members.items()):
        key = verdict_key(held.trajectory)
        if key not in verdicts:
            verdicts[key] = judge(held.trajectory, fold, base, rules.admission, ahead=ahead)
        judged.append(JudgedMember(held=held, verdict=verdicts[key]))
    refused = [m.verdict for m in judged if m.verdict.admission is Admission.REFUSE]
    if len(refused) == len(judged):
        return DoomedGroup(buffer=buffer, reason=refused[0].reason, detail=refused[0].detail)
    if any(m.verdict.admission is Admission.WAIT for m in judged):
        return None
    group = ReadyGroup(buffer=buffer, members=tuple(judged))
    rewards = group.baseline_rewards()
    if len(rewards) < rules.min_group or not any(m.trained for m in judged):
        detail = f"{len(rewards)} usable rewards, {rules.min_group} needed"
        return DoomedGroup(buffer=buffer, reason=Reason.REWARD_FAILED, detail=detail)
    if rules.filter_zero_variance and is_zero_variance(rewards):
        return DoomedGroup(buffer=buffer, reason=Reason.ZERO_VARIANCE, detail=f"all rewards are {rewards[0]}")
    return group


def is_zero_variance(rewards: Sequence[float], relative_tolerance: float = 1e-6) -> bool:
    """max - min <= tolerance * max(1, max |r|): the group says nothing about which completion was better."""
    spread = max(rewards) - min(rewards)
    return spread <= relative_tolerance * max(1.0, *(abs(r) for r in rewards))
