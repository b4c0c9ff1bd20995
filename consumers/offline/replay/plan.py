"""Which steps to train again, and from which version on the trainer's state allows it. Pure; reads the policy fold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from consumers.offline.wholeness import Retirement
from schemas.errors import UsageError
from schemas.policy_events import VersionPublished
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus

NEWEST = -1
"""as the last version of a range"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Versions to make again, first to last in the order of the ledger."""

    first: int
    """the first step that is trained: the wanted one, or an earlier one that has to be gone through"""
    wanted: int
    last: int
    why_earlier: str = ""
    """words; empty when first is the wanted one"""
    retired: Mapping[int, Retirement] = field(default_factory=dict)
    """version -> what removed its weights"""


def plan_replay(
    fold: PolicyFold, first: int, last: int | None, retired: Mapping[int, Retirement] | None = None
) -> ReplayPlan:
    """`last`: None: `first` alone; NEWEST: to the end. UsageError says what can be asked for instead.

    `retired`: as read_policy tells it; None: a retired version is named without time and rule."""
    retired = retired or {}
    made = [number for number in fold.versions if is_made_by_a_step(fold, number)]
    if not made:
        raise UsageError("no training step was made in this run: there is nothing to train again")
    newest = max(made)
    to = first if last is None else newest if last == NEWEST else last
    if first > to:
        raise UsageError(f"--version {first} --to {to}: the range is empty")
    for number in (first, to):
        if number not in made:
            raise UsageError(f"version {number} was made by no training step ({_what_instead(fold, number, newest)})")
    start, missing = _start(fold, first, retired)
    if start is None:
        later = next((n for n in sorted(made) if n > first and _start(fold, n, retired)[0] == n), None)
        hint = "no later one has it" if later is None else f"the first that can be is {later}"
        raise UsageError(f"version {first} cannot be trained again: {missing}, and no version before has state; {hint}")
    if start == first:
        return ReplayPlan(first=first, wanted=first, last=to, retired=retired)
    if last is None:
        raise UsageError(
            f"version {first} cannot be trained again by itself: {missing}. The nearest version before it that can be "
            f"is {start}: ask for --version {start} --to {first}, which trains through those between"
        )
    why = f"{missing}: training begins with version {start} and goes through those between"
    return ReplayPlan(first=start, wanted=first, last=to, why_earlier=why, retired=retired)


def is_made_by_a_step(fold: PolicyFold, number: int) -> bool:
    """Neither version 0 nor a branch start, which is an older version under a new number."""
    state = fold.versions.get(number)
    if state is None or state.event.parent is None:
        return False
    parent = fold.versions.get(state.event.parent)
    return parent is None or parent.depth < state.depth


def same_weights_as(fold: PolicyFold, number: int) -> int:
    """The version a branch start repeats; itself otherwise."""
    state = fold.versions.get(number)
    while state is not None and state.event.parent is not None and not is_made_by_a_step(fold, number):
        number = state.event.parent
        state = fold.versions.get(number)
    return number


def has_state(fold: PolicyFold, number: int) -> VersionPublished | None:
    """Its event, when training can go on from what the store keeps of it."""
    state = fold.versions.get(number)
    if state is None or not state.event.has_state or state.status is VersionStatus.RETIRED:
        return None
    return state.event


def retired_words(number: int, retired: Mapping[int, Retirement]) -> str:
    """What became of its weights, with time and rule where they are known."""
    return f"was retired: {retired[number].words}" if number in retired else "was retired"


def _start(fold: PolicyFold, number: int, retired: Mapping[int, Retirement]) -> tuple[int | None, str]:
    """The nearest step at or before this one whose parent has state, and why it is not this one."""
    missing = ""
    step: int | None = number
    while step is not None:
        parent = fold.versions[step].event.parent
        assert parent is not None, "a step has a parent"
        if has_state(fold, parent) is not None:
            return step, missing
        missing = missing or _why_not(fold, parent, retired)
        before = same_weights_as(fold, parent)
        if has_state(fold, before) is not None:
            return step, missing
        step = before if is_made_by_a_step(fold, before) else None
    return None, missing


def _why_not(fold: PolicyFold, number: int, retired: Mapping[int, Retirement]) -> str:
    state = fold.versions.get(number)
    if state is None:
        return f"its parent, version {number}, is not in the policy topic"
    if state.status is VersionStatus.RETIRED:
        return f"its parent, version {number}, {retired_words(number, retired)}"
    return f"its parent, version {number}, was saved without optimizer state (checkpoints.state_every)"


def _what_instead(fold: PolicyFold, number: int, newest: int) -> str:
    if number == 0:
        return "it is the initial policy; ask from 1 on"
    if number in fold.versions:
        return f"it starts a branch with the weights of version {fold.versions[number].event.parent}; ask for the next"
    return f"the newest is {newest}"
