"""The simulator finds bugs that are put there on purpose: each within a stated number of seeds.

Every bug is one that a change could really bring in. It is taken out again before the log is checked, because
the checks use the same fold and the same codecs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consumers import switching
from consumers.trainer import desk, pacing, positions, publication, requests, selection, service
from consumers.trainer.admission import AdmissionRules, Verdict, judge
from producers import probing, weights
from schemas import policy_fold
from schemas.ledger import Reason
from schemas.policy_events import VersionActivated
from tests.sim.faults import FaultyWorld, faults_of
from tests.sim.invariants import check
from tests.sim.stamps import check_stamps
from tests.sim.world import Plan

Patch = Callable[[pytest.MonkeyPatch], None]
CRASHES = Plan(seed=0, crash_probability=0.06, faults_until_s=12.0, limit_s=90.0)
TRAINER_DIES = replace(CRASHES, crashable=("trainer",), versions=12, groups_per_step=3)


def dropped_rows_get_no_decision(patch: pytest.MonkeyPatch) -> None:
    def take_rows(self: desk.Desk, key: Any, rows: Any, now_us: int) -> None:
        self.progress.receive(key)
        if self.assembler.add(key, rows):
            self.progress.decide(key)

    patch.setattr(desk.Desk, "take_rows", take_rows)


def the_lag_limit_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def lax(trajectory: Any, fold: Any, base: int, rules: AdmissionRules) -> Verdict:
        return judge(trajectory, fold, base, replace(rules, max_lag=10**6))

    patch.setattr(selection, "judge", lax)


def a_version_is_activated_without_acks(patch: pytest.MonkeyPatch) -> None:
    """The coordinator does not wait, and the services' fold does not void it."""

    def end_switch(fold: Any, rules: Any, now_us: int) -> Any:
        event = fold.switch.event
        return VersionActivated(run=rules.run, at_us=now_us, switch=event.switch, version=event.version, acks=())

    patch.setattr(switching, "_end_switch", end_switch)
    patch.setattr(policy_fold, "_require", lambda condition, reason: None)


def positions_skip_what_is_undecided(patch: pytest.MonkeyPatch) -> None:
    snapshot = positions.Progress.snapshot

    def skipping(self: positions.Progress) -> Any:
        return {p: progress.model_copy(update={"undecided": ()}) for p, progress in snapshot(self).items()}

    patch.setattr(positions.Progress, "snapshot", skipping)


def a_restart_decides_again(patch: pytest.MonkeyPatch) -> None:
    def from_the_start(self: positions.Progress) -> dict[int, int]:
        return dict.fromkeys(self._next, 0)

    patch.setattr(positions.Progress, "low_waters", from_the_start)
    patch.setattr(positions.Progress, "is_decided", lambda self, key: False)
    patch.setattr(positions.Progress, "decide", lambda self, key: self._undecided[key[0]].discard(key[1]))


def a_worker_acks_before_it_loads(patch: pytest.MonkeyPatch) -> None:
    """It takes over the new number and keeps the old weights, as a weight update that answered 200 and did nothing."""

    def pretend(engine: Any, directory: Path, version: int, held: int | None) -> probing.ProbeResult:
        if engine._weights is None:
            engine.load(directory, version)
        engine._version = version
        return probing.ProbeResult(diff_new=0.0, diff_old=None)

    patch.setattr(weights, "run_probe", pretend)


def a_slot_is_freed_twice(patch: pytest.MonkeyPatch) -> None:
    original = pacing.requests_to_issue

    def generous(open_groups: int, depth: int, rules: Any) -> int:
        return original(max(0, open_groups - 1), depth, rules)

    patch.setattr(requests, "requests_to_issue", generous)


def dropped_groups_are_not_replaced(patch: pytest.MonkeyPatch) -> None:
    """No settle transaction asks for new groups: the batch waits for ever."""
    patch.setattr(service, "requests_to_issue", lambda *args: 0)
    patch.setattr(service.TrainerService, "_settle_is_due", lambda self, desk: False)


def a_step_is_computed_on_weights_that_were_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """After a transaction of unknown outcome the learner keeps what it trained in vain."""
    restore, seen = publication.Publication.restore, set()

    def once(self: Any, learner: Any, published: Any) -> None:
        if id(learner) not in seen:
            restore(self, learner, published)
        seen.add(id(learner))

    patch.setattr(publication.Publication, "restore", once)


def a_group_is_dropped_and_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = desk.Desk.drop

    def drop(self: desk.Desk, buffer: Any, reason: Reason, now_us: int, detail: str = "") -> None:
        before = len(self.decisions)
        original(self, buffer, reason, now_us, detail)
        del self.decisions[before]

    patch.setattr(desk.Desk, "drop", drop)


BUGS: tuple[tuple[Patch, Plan, int, str], ...] = (
    (dropped_rows_get_no_decision, TRAINER_DIES, 5, "G1"),
    (the_lag_limit_is_ignored, replace(CRASHES, max_lag=1, run_ahead=3, versions=9), 5, "G2"),
    (a_version_is_activated_without_acks, CRASHES, 2, "G4"),
    (positions_skip_what_is_undecided, TRAINER_DIES, 8, "G1"),
    (a_restart_decides_again, TRAINER_DIES, 4, "G1"),
    (a_worker_acks_before_it_loads, replace(CRASHES, crash_probability=0.0), 1, "G3"),
    (a_slot_is_freed_twice, replace(CRASHES, crash_probability=0.0), 1, "G8"),
    (dropped_groups_are_not_replaced, replace(CRASHES, group_timeout_s=1.0), 5, "liveness"),
    (a_step_is_computed_on_weights_that_were_not_put_back, TRAINER_DIES, 8, "G5"),
    (a_group_is_dropped_and_forgotten, replace(CRASHES, group_timeout_s=2.0), 5, "G1"),
)


def found(plan: Plan, directory: Path, patch: Patch | None) -> list[str]:
    directory.mkdir()
    world = FaultyWorld(plan, directory, faults_of(plan.seed, plan, ("deferred", "freeze")), lost_acks=0.02)
    with pytest.MonkeyPatch.context() as context:
        if patch is not None:
            patch(context)
        try:
            world.run()
        except (AssertionError, KeyError) as stopped:
            return [f"stopped: {stopped!r}"]
        finally:
            world.log.available, world.log.deferred = True, False
    return check(world) or check_stamps(world)


@pytest.mark.parametrize(("patch", "plan", "within", "sign"), BUGS, ids=[bug[0].__name__ for bug in BUGS])
def test_a_planted_bug_is_found_within_the_stated_number_of_seeds(
    patch: Patch, plan: Plan, within: int, sign: str, tmp_path: Path
) -> None:
    for seed in range(within):
        problems = found(replace(plan, seed=seed), tmp_path / str(seed), patch)
        if any(problem.startswith(sign) for problem in problems):
            return
    pytest.fail(f"{patch.__name__} was not found within {within} seeds: {problems}")


@pytest.mark.parametrize("number", range(len(BUGS)), ids=[bug[0].__name__ for bug in BUGS])
def test_the_same_plans_without_the_bug_find_nothing(number: int, tmp_path: Path) -> None:
    assert found(replace(BUGS[number][1], seed=0), tmp_path / "store", None) == []
