"""The whole pipeline under seeded faults: every run ends, and every run ends right.

The real trainer, coordinator and generators run on the in-memory log under a virtual clock; a failing seed
prints the command that runs it again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from consumers.trainer.batch import TrainBatch
from schemas.headers import is_arrow
from schemas.ledger import Decision, DecisionRow, Subject
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import decode_policy_event
from schemas.topics import TopicName
from tests.sim.__main__ import replay_command
from tests.sim.faults import KINDS, Fault, FaultyWorld, Kind, faults_of, plan_of, simulate_faults
from tests.sim.invariants import records
from tests.sim.same_weights import content_digest, final_weights, scheduled
from tests.sim.verdict import Verdict, run_chunk, violations
from tests.sim.world import Plan, World

SEEDS = range(100)
"""`make sim` runs 2000, continuous integration 500: in two processes"""
CHUNK = 10
SETTINGS: dict[str, set[object]] = {
    "max_lag": {0, 1, 2, 3}, "mode": {"barrier", "rolling"}, "in_flight": {"finish", "keep"}, "state_every": {1, 2, 3},
    "order": {"issue", "ready"}, "batching": {"group", "mixed"}, "generators": {1, 2, 3}, "hold_for_in_flight": {True},
    "overlap": {False, True}, "evaluate": {False, True}, "hard_max_lag": {None, 2, 3, 5},
    "stale_decay": {0.25, 0.5, 1.0},
    "filter_zero_variance": {True}, "keep": {"all", 2, 3, 4, 5}, "groups_in_flight": {1, 2, 4},
}  # fmt: skip


@cache
def chunk(first: int) -> list[Verdict]:
    """What became of some seeds; run once, asked for by several tests."""
    return run_chunk(range(first, first + CHUNK), None)[0]


def events(world: World) -> Counter[str]:
    return Counter(decode_policy_event(record.value).type for record in records(world, TopicName.POLICY))


def decisions(world: World) -> list[DecisionRow]:
    found: list[DecisionRow] = []
    for record in records(world, TopicName.LEDGER):
        if is_arrow(record.headers):
            found += decode_decisions(record.value, record.headers)
    return found


def fault(kind: Kind, from_s: float, to_s: float, worker: str = "g0") -> Fault:
    return Fault(kind=kind, from_s=from_s, to_s=to_s, worker=worker)


@pytest.mark.parametrize("first", SEEDS[::CHUNK])
def test_runs_under_faults_end_right(first: int) -> None:
    verdicts = chunk(first)

    assert [(replay_command(v.seed), v.problems[:3]) for v in verdicts if v.problems] == []


def test_the_seeds_of_the_suite_meet_every_kind_of_fault_and_every_setting() -> None:
    plans = [plan_of(seed) for seed in SEEDS]
    kinds = Counter(fault.kind for plan in plans for fault in faults_of(plan.seed, plan))

    assert {kind for kind, count in kinds.items() if count >= 5} == set(KINDS)
    for name, values in SETTINGS.items():
        assert {getattr(plan, name) for plan in plans} >= values, name
    assert any(plan.poison_prompt is not None for plan in plans)
    assert any(plan.then_branch_from is not None for plan in plans)
    assert sum(plan.pin_version is not None for plan in plans) >= 5


def test_deaths_hit_the_places_that_matter() -> None:
    """Each at least once in a hundred seeds, or the choice of places has gone wrong."""
    verdicts = [verdict for first in SEEDS[::CHUNK] for verdict in chunk(first)]
    places = set().union(*(verdict.crash_places for verdict in verdicts))

    assert places >= {
        "t before transaction.end", "t after transaction.end", "t after store.save", "t after store.write",
        "t after learner.train", "c before transaction.end", "c after transaction.end", "g after store.fetch",
        "g after engine.load", "g before writer.send policy", "g after writer.send policy",
        "g before writer.send trajectories", "g after writer.send trajectories", "g after group.commit",
        "e before writer.send evaluations", "e after writer.send evaluations", "e after store.fetch",
    }  # fmt: skip


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    first, second = (simulate_faults(plan_of(3), tmp_path / name) for name in ("a", "b"))

    assert first.steps == second.steps
    assert [p.deaths for p in first.processes] == [p.deaths for p in second.processes]
    assert decisions(first) == decisions(second)


@pytest.mark.parametrize("seed", range(3))
def test_of_two_trainers_one_is_fenced_for_good_and_one_ends_the_run(seed: int, tmp_path: Path) -> None:
    plan = replace(plan_of(seed), crash_probability=0.0, versions=12)
    world = simulate_faults(plan, tmp_path / "store", [fault("second_trainer", 1.0, 2.0)])

    trainers = [process for process in world.processes if process.name.startswith("trainer")]
    assert violations(world) == []
    assert [(p.done, p.error, p.restarts) for p in trainers] == [(True, "fenced", 0), (True, "", 0)]


@pytest.mark.parametrize("seed", range(3))
def test_of_two_coordinators_one_is_fenced_or_only_looks_on(seed: int, tmp_path: Path) -> None:
    plan = replace(plan_of(seed), crash_probability=0.0, versions=12)
    world = simulate_faults(plan, tmp_path / "store", [fault("second_coordinator", 1.0, 2.0)])

    first, second = (process for process in world.processes if process.name.startswith("coordinator"))
    assert violations(world) == []
    assert (first.error, first.restarts, second.error) == ("fenced", 0, "")


def test_a_worker_that_pauses_longer_than_its_lease_is_expired_and_comes_back_under_a_new_name(tmp_path: Path) -> None:
    plan = Plan(seed=1, versions=30, generators=2)
    world = simulate_faults(plan, tmp_path / "store", [fault("freeze", 1.0, 15.0)])

    seen = events(world)
    assert violations(world) == []
    assert seen["WorkerExpired"] >= 1
    assert seen["WorkerJoined"] == 3
    assert seen["WorkerAdmitted"] >= 1


def test_one_living_worker_is_enough_while_the_other_cannot_load(tmp_path: Path) -> None:
    plan = Plan(seed=2, versions=12)
    world = simulate_faults(plan, tmp_path / "store", [fault("torn_after", 0.0, 10**6)])

    assert violations(world) == []
    assert events(world)["LoadFailed"] >= 1
    assert {d.decision for d in decisions(world) if d.subject is Subject.GROUP} == {Decision.TRAINED}


def test_a_broker_outage_closes_no_group_that_lies_unread_in_the_log(tmp_path: Path) -> None:
    """Away for longer than the groups' time-out: what was asked for before is trained afterwards."""
    plan = Plan(seed=4, versions=6, group_timeout_s=3.0)
    world = simulate_faults(plan, tmp_path / "store", [fault("away", 0.6, 12.0)])

    assert violations(world) == []
    assert sum(d.reason == "lost" for d in decisions(world)) <= 2 * plan.groups_per_step


@pytest.mark.parametrize("generators", [1, 2, 3])
def test_without_faults_nothing_is_dropped(generators: int, tmp_path: Path) -> None:
    world = FaultyWorld(Plan(seed=5, generators=generators), _fresh(tmp_path), [], lost_acks=0.0)
    world.run()

    assert violations(world) == []
    assert {d.decision for d in decisions(world)} == {Decision.TRAINED}


def test_at_max_lag_zero_the_run_ends_and_every_row_has_lag_zero(tmp_path: Path) -> None:
    world = FaultyWorld(Plan(seed=6, max_lag=0, run_ahead=0), _fresh(tmp_path), [], lost_acks=0.0)
    world.run()

    rows = [d for d in decisions(world) if d.subject is Subject.TRAJECTORY]
    assert violations(world) == []
    assert Counter((d.decision, d.policy_lag) for d in rows) == {(Decision.TRAINED, 0): 36}


@pytest.mark.parametrize(("run_ahead", "max_lag"), [(1, 1), (1, 3), (2, 2)])
def test_the_lag_that_is_reached_is_the_run_ahead(run_ahead: int, max_lag: int, tmp_path: Path) -> None:
    plan = Plan(seed=7, max_lag=max_lag, run_ahead=run_ahead)
    world = FaultyWorld(plan, _fresh(tmp_path), [], lost_acks=0.0)
    world.run()

    assert violations(world) == []
    assert max(d.policy_lag or 0 for d in decisions(world)) <= run_ahead


def test_at_max_lag_zero_the_weights_do_not_depend_on_schedule_or_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests, the same weights, the same samples: whoever ran when, and whoever died."""
    monkeypatch.setattr(TrainBatch, "digest", property(content_digest))
    calm = Plan(seed=8, max_lag=0, run_ahead=0, group_timeout_s=10_000.0)
    runs = [(calm, schedule) for schedule in (1, 2, 3)]
    runs += [
        (replace(calm, crash_probability=0.05, crashable=who, faults_until_s=10.0), schedule)
        for schedule, who in enumerate([("trainer",), ("coordinator",), ("trainer", "coordinator", "g")] * 2)
    ]
    runs += [(replace(plan, overlap=True), schedule) for plan, schedule in runs[1::3]]  # there is nothing to overlap
    runs += [(replace(plan, evaluate=True), schedule) for plan, schedule in runs[1:4]]  # beside training, never in it
    found = {}
    for number, (plan, schedule) in enumerate(runs):
        world = scheduled(plan, _fresh(tmp_path / str(number)), schedule)
        # The digest is another one here, and the audit says so.
        assert [p for p in violations(world) if "G5.batch_digest" not in p] == [], (plan, schedule)
        found[number] = final_weights(world)

    assert len(set(found.values())) == 1, found


def test_another_seed_of_the_run_gives_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainBatch, "digest", property(content_digest))
    plans = [Plan(seed=seed, max_lag=0, run_ahead=0) for seed in (8, 9)]
    worlds = [scheduled(plan, _fresh(tmp_path / str(plan.seed)), 1) for plan in plans]

    assert final_weights(worlds[0]) != final_weights(worlds[1])


def _fresh(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory
