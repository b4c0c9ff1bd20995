"""Branches: going on from an older version, asked for or because the newest has no optimizer state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from consumers.trainer.branching import BranchWish
from schemas.headers import event_type
from schemas.ledger import Decision, Reason, Subject
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName
from tests.sim.invariants import check, records
from tests.sim.world import Plan, World, simulate


def folded(world: World) -> PolicyFold:
    fold = PolicyFold()
    for record in records(world, TopicName.POLICY):
        fold.apply(record.offset, decode_policy_event(record.value))
    return fold


def go_on(world: World, plan: Plan) -> None:
    """Start every process of an ended run again under another plan."""
    world.plan = plan
    for process in world.processes:
        process.service, process.done = None, False
    world.run()


def test_a_run_that_ended_goes_on_from_an_older_version_under_new_numbers(tmp_path: Path) -> None:
    world = simulate(Plan(seed=1, versions=4, limit_s=4000), tmp_path / "run")
    go_on(world, replace(world.plan, branch=BranchWish(from_version=2, when_newest=4)))
    fold = folded(world)

    assert check(world) == []
    assert [(fold.versions[v].event.parent, fold.versions[v].depth) for v in (5, 6, 7)] == [(2, 2), (5, 3), (6, 4)]
    assert fold.versions[5].event.manifest_sha256 == fold.versions[2].event.manifest_sha256
    assert fold.lag(4, 7) is Reason.OTHER_BRANCH
    assert fold.live == 7


def test_a_trainer_that_dies_after_the_branch_does_not_branch_again(tmp_path: Path) -> None:
    world = simulate(Plan(seed=2, versions=4, limit_s=4000), tmp_path / "run")
    plan = replace(
        world.plan, branch=BranchWish(from_version=1, when_newest=4), crash_probability=0.05, faults_until_s=200.0
    )
    go_on(world, plan)
    starts = [r for r in records(world, TopicName.POLICY) if event_type(r.headers) == "BranchStarted"]

    assert check(world) == []
    assert world.process("trainer").restarts > 0
    assert len(starts) == 1


@pytest.mark.parametrize("seed", range(6))
def test_sparse_state_costs_steps_after_a_crash_and_nothing_else(tmp_path: Path, seed: int) -> None:
    plan = Plan(seed=seed, versions=7, state_every=3, crash_probability=0.04, crashable=("trainer",))
    world = simulate(plan, tmp_path / "run")
    fold = folded(world)

    assert check(world) == []
    branched = [
        v for v, state in fold.versions.items() if v > 0 and state.depth == fold.versions[state.event.parent].depth
    ]
    assert all(fold.versions[fold.versions[v].event.parent].event.has_state for v in branched)
    assert fold.versions[fold.newest].event.has_state, "the last version can always be extended"


def test_groups_open_at_the_branch_are_abandoned_and_asked_for_again(tmp_path: Path) -> None:
    world = World(Plan(seed=3, versions=8, limit_s=4000), tmp_path / "run")
    while folded(world).newest != 5:
        process = world.random.choice(world.processes)
        world._drive(process, world.clock.monotonic_s())
        world.clock.advance(0.005)
    world._die(world.process("trainer"), "killed by the test", world.clock.monotonic_s())
    world.plan = replace(world.plan, branch=BranchWish(from_version=3, when_newest=folded(world).newest))
    world.run()
    decisions = [
        row
        for record in records(world, TopicName.LEDGER)
        if event_type(record.headers) == "DecisionsRecorded"
        for row in decode_decisions(record.value, record.headers)
    ]
    abandoned = [d.group_id for d in decisions if d.subject is Subject.GROUP and d.reason == Reason.ABANDONED]

    assert check(world) == []
    assert abandoned
    trained = {d.group_id for d in decisions if d.subject is Subject.GROUP and d.decision is Decision.TRAINED}
    assert {group.replace("/a0", "/a1") for group in abandoned} <= trained
