"""Bugs planted in what becomes of old rows (stale.action), and in which versions are kept, switched to, gone on from.

A function here takes a MonkeyPatch; it is called anew for every seed, and undone before the log is judged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from consumers import switching
from consumers.trainer import desk, replay, selection, service, step
from consumers.trainer.admission import AdmissionRules, Verdict
from schemas import policy_events as ev
from schemas import policy_fold
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- stale.action


def every_row_is_weighed_alike(patch: Patch) -> None:
    """Down-weighting in name only."""
    patch.setattr(step.AgeWeights, "weight", lambda self, policy_lag: 1.0)


def hard_max_lag_is_ignored(patch: Patch) -> None:
    """What is old enough weighs so little that nobody drops it."""
    for module in (selection, replay):
        patch.setattr(module, "judge", _without_limit(module.judge))


def _without_limit(judge: Any) -> Any:
    def lax(trajectory: Any, fold: Any, base: int, rules: AdmissionRules, *, ahead: int = 0) -> Verdict:
        verdict: Verdict = judge(trajectory, fold, base, replace(rules, max_lag=10**6), ahead=ahead)
        return verdict

    return lax


def the_weight_is_that_of_one_step_more(patch: Patch) -> None:
    """Age is counted to the version that comes out of the step."""
    weight = step.AgeWeights.weight
    patch.setattr(step.AgeWeights, "weight", lambda self, policy_lag: weight(self, policy_lag + 1))


def nothing_is_held_for_groups_in_flight(patch: Patch) -> None:
    """stale.action = wait does what drop does."""
    select = selection.select

    def hasty(buffers: Any, fold: Any, base: int, rules: Any, **more: Any) -> Any:
        return select(buffers, fold, base, replace(rules, hold_for_in_flight=False), **more)

    patch.setattr(service, "select", hasty)


# ---------------------------------------------------------------------- which versions are kept


class _Unpinned:
    """A fold of which nobody has pinned anything."""

    pinned: frozenset[int] = frozenset()

    def __init__(self, fold: PolicyFold) -> None:
        self._fold = fold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fold, name)


def a_pinned_version_is_retired(patch: Patch) -> None:
    """The coordinator goes by age alone; the fold voids it, and so it says it again and again."""
    retirements = switching._retirements
    patch.setattr(switching, "_retirements", lambda fold, rules, now_us: retirements(_Unpinned(fold), rules, now_us))


def a_pin_is_forgotten_by_everybody(patch: Patch) -> None:
    """The fold takes no notice of it, so the coordinator deletes what was pinned."""
    patch.setitem(policy_fold._HANDLERS, ev.VersionPinned, lambda fold, offset, event: None)


def the_last_version_with_state_is_retired(patch: Patch) -> None:
    """Retention counts versions and does not ask what training can go on from; neither does the fold."""

    def by_age(fold: PolicyFold, rules: Any, now_us: int) -> list[ev.AnyPolicyEvent]:
        alive = sorted(number for number, state in fold.versions.items() if state.status is not VersionStatus.RETIRED)
        kept = {fold.live, fold.newest, fold.branch_from, fold.switch and fold.switch.event.version, *fold.pinned}
        return [
            ev.VersionRetired(run=rules.run, at_us=now_us, version=number, rule="by age")
            for number in alive[:-2]
            if number not in kept
        ]

    def lax(fold: PolicyFold, offset: int, event: ev.VersionRetired) -> None:
        fold.versions[event.version].status = VersionStatus.RETIRED

    patch.setattr(switching, "_retirements", by_age)
    patch.setitem(policy_fold._HANDLERS, ev.VersionRetired, lax)


# ---------------------------------------------------------------------- which version is next


def a_switch_goes_to_an_older_candidate_than_the_newest(patch: Patch) -> None:
    """One after the other, as they were published."""
    open_switch = switching._open_switch

    def in_turn(fold: PolicyFold, rules: Any, switch_id: str, now_us: int) -> Any:
        opened = open_switch(fold, rules, switch_id, now_us)
        waiting = [n for n in fold.versions if fold.live is not None and n > fold.live]
        return opened and opened.model_copy(update={"version": min(waiting, default=opened.version)})

    patch.setattr(switching, "_open_switch", in_turn)


def a_branch_does_not_abandon_what_is_open(patch: Patch) -> None:
    """Groups that were asked for on the branch that is left go on."""
    patch.setattr(desk.Desk, "abandon_everything", lambda self, now_us: self.replay.clear())


def a_restart_goes_on_from_a_version_without_state(patch: Patch) -> None:
    """Weights are all that a restart looks for: the optimizer begins anew."""
    from consumers.trainer.publication import Publication

    origin = service.branch_origin

    def newest(fold: PolicyFold, newest: int, wish: Any) -> int | None:
        return origin(fold, newest, wish) if wish is not None and wish.when_newest == newest else None

    def weights_alone(self: Any, learner: Any, published: Any) -> None:
        directory, manifest = self._store.fetch(published.manifest_uri, published.manifest_sha256)
        learner.restore(directory, with_state=manifest.has_state)

    patch.setattr(service, "branch_origin", newest)
    patch.setattr(Publication, "restore", weights_alone)
