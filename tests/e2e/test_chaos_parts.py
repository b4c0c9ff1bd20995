"""The pure parts of `make chaos`: plan, phases, recovery, and the price of a crash."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.ledger import OpenGroup, PartitionProgress, Position, Settled, encode_ledger_control
from schemas.policy_events import (
    VersionActivated,
    WorkerAdmitted,
)
from tests.e2e.chaos_hits import incarnations, recovered_at_s, recovery_points, traces
from tests.e2e.chaos_plan import (
    BASELINE,
    BROKER,
    COORDINATOR,
    PROJECTOR,
    SAME,
    TRAINER,
    Fault,
    Phase,
    What,
    kills,
    plans,
    shortened,
)
from tests.e2e.chaos_price import by_phase, in_flight_loss_s, lost_groups, only_flushed, price, worker_seconds
from tests.e2e.chaos_samples import (
    GENERATOR_KILL,
    TRAINER_KILL,
    WHOLE,
    claim,
    fate,
    hit_of,
    joined,
    published,
    record,
    view_of,
)
from tests.e2e.chaos_watch import LogView, Standing, StoreView

# ---------------------------------------------------------------- plan


@pytest.mark.parametrize("seed", range(20))
def test_every_seed_plans_enough_kills_and_no_service_dies_more_often_than_it_may(seed: int) -> None:
    planned = plans(seed)
    faults = [fault for plan in planned for fault in plan.faults]
    trainer = [fault for fault in faults if fault.what is What.KILL and fault.service == TRAINER]

    assert kills(faults).total() >= 30
    assert kills(faults)[BROKER] == 3
    assert len(trainer) >= 10
    assert 2 * sum(1 for fault in trainer if fault.phase is Phase.BETWEEN) >= len(trainer)
    for plan in planned:
        deaths = kills(plan.faults)
        deaths[TRAINER] += 2 * sum(1 for fault in plan.faults if fault.what is What.FILL_DISK)
        assert max(deaths.values(), default=0) <= 5


@pytest.mark.parametrize("seed", range(20))
def test_every_seed_stops_a_generator_the_trainer_the_coordinator_and_the_broker(seed: int) -> None:
    stops = [fault for plan in plans(seed) for fault in plan.faults if fault.what is What.STOP]

    assert sorted(fault.service.partition("-")[0] for fault in stops) == [BROKER, COORDINATOR, "generator", TRAINER]


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_of_a_recovering_trainer_follows_a_kill_of_the_trainer(seed: int) -> None:
    for plan in plans(seed):
        for before, fault in zip(plan.faults, plan.faults[1:], strict=False):
            if fault.phase is Phase.RECOVERING:
                assert (before.what, before.service, fault.overlaps) == (What.KILL, TRAINER, True)
        assert not plan.faults or plan.faults[0].phase is not Phase.RECOVERING


def test_the_same_seed_gives_the_same_plan_and_the_baseline_has_no_faults() -> None:
    assert plans(3) == plans(3)
    assert plans(3) != plans(4)
    by_name = {plan.name: plan for plan in plans(3)}
    assert by_name[BASELINE].faults == ()
    assert {fault.service for fault in by_name[SAME].faults} == {TRAINER, COORDINATOR}
    assert by_name[BASELINE].settings == by_name[SAME].settings
    assert len(shortened(by_name[SAME], 2, 9).faults) == 2


# ---------------------------------------------------------------- phases


@pytest.mark.parametrize(
    ("begun", "saving", "unnamed", "batch", "phase"),
    [
        (False, True, True, True, Phase.RECOVERING),
        (True, False, False, False, Phase.AFTER_COMMIT),
        (True, False, False, True, Phase.COMPUTING),
        (True, True, False, True, Phase.SAVING),
        (True, False, True, True, Phase.BETWEEN),
        (True, True, True, True, Phase.BETWEEN),
    ],
)
def test_the_phase_follows_from_log_and_store(
    begun: bool, saving: bool, unnamed: bool, batch: bool, phase: Phase
) -> None:
    standing = Standing(
        has_begun=begun, is_saving=saving, has_unnamed_checkpoint=unnamed, next_batch_is_in=batch
    )  # fmt: skip

    assert standing.phase is phase


def test_the_next_batch_is_in_when_all_its_groups_lie_in_the_log() -> None:
    view = view_of((published(0, 1), 0.0))
    groups = tuple(
        OpenGroup(group_id=f"tiny/{name}", request_position=number, issued_at_us=1, attempt=0, intended_step=step)
        for number, (name, step) in enumerate([("a", 0), ("b", 0), ("later", 1)])
    )
    position = Position(
        open_groups=groups, next_request=3, prompt_cursor=3, partitions={0: PartitionProgress(next_offset=0)}
    )  # fmt: skip
    control = Settled(run="tiny", at_us=1, position=position, policy_read_up_to=0, reason="first")

    assert not view.next_batch_is_in()
    view.apply(record("ledger", encode_ledger_control(control)), 0.0)
    view.apply(record("trajectories", b"rows", key=b"tiny/a"), 0.0)
    assert not view.next_batch_is_in()
    view.apply(record("trajectories", b"rows", key=b"tiny/b", offset=1), 0.0)
    assert view.next_batch_is_in()


def test_only_checkpoints_newer_than_the_newest_version_can_still_become_one(tmp_path: Path) -> None:
    for name, at_s in (("a1", 1), ("given-up", 2), ("fresh", 9), (".tmp-next", 9)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (at_s, at_s))
    store = StoreView(tmp_path)

    assert store.unnamed({"a1"}, after_us=5_000_000) == {"fresh"}
    assert store.staging() == {".tmp-next"}
    store.give_up({"a1"})
    assert (store.unnamed({"a1"}, after_us=0), store.staging()) == (set(), set())


# ---------------------------------------------------------------- recovery


def test_a_trainer_has_recovered_with_the_next_version_and_not_with_one_made_before() -> None:
    hit = hit_of(TRAINER_KILL, recovered_s=None)
    before, after = (published(1, 9_999_999), 10.5), (published(2, 10_000_001), 17.0)

    assert recovered_at_s(hit, view_of(before), str, 18.0) is None
    assert recovered_at_s(hit, view_of(before, after), str, 18.0) == 17.0


def test_a_coordinator_has_recovered_when_a_version_goes_live() -> None:
    hit = hit_of(Fault(what=What.KILL, service=COORDINATOR), recovered_s=None)
    live = VersionActivated(run="tiny", at_us=11_000_000, switch="s", version=2, acks=(1,))

    assert recovered_at_s(hit, view_of((published(2, 11_000_000), 12.0)), str, 18.0) is None
    assert recovered_at_s(hit, view_of((live, 13.0)), str, 18.0) == 13.0
    stopped = hit_of(Fault(what=What.STOP, service=COORDINATOR), recovered_s=None)
    assert recovered_at_s(stopped, view_of((live, 13.0)), str, 18.0) == 13.0


def test_a_generator_has_recovered_when_a_new_incarnation_is_admitted() -> None:
    view = view_of((joined("i1"), 1.0))
    hit = hit_of(GENERATOR_KILL, recovered_s=None, incarnations=incarnations(view, "g0"))

    def admitted(incarnation: str) -> WorkerAdmitted:
        return WorkerAdmitted(run="tiny", at_us=12_000_000, worker="g0", incarnation=incarnation, version=1, ack=1)

    assert hit.incarnations == {"i1"}
    assert recovered_at_s(hit, view_of((admitted("i1"), 12.0)), str, 18.0) is None
    assert recovered_at_s(hit, view_of((admitted("i2"), 12.0)), str, 18.0) == 12.0


def test_a_projector_has_recovered_when_it_reads_again_or_the_tracker_is_back() -> None:
    killed = hit_of(Fault(what=What.KILL, service=PROJECTOR))
    locked = hit_of(Fault(what=What.LOCK_TRACKER, service=PROJECTOR))

    assert recovered_at_s(killed, LogView(), lambda: "projection_starts policy=0", 18.0) == 18.0
    assert recovered_at_s(killed, LogView(), lambda: "", 18.0) is None
    assert recovered_at_s(locked, LogView(), lambda: "projection_starts policy=0", 18.0) is None
    assert recovered_at_s(locked, LogView(), lambda: "tracker_is_back failures=2", 18.0) == 18.0


def test_deaths_and_recoveries_are_counted_from_the_logs() -> None:
    up_log = (
        "12:00 INFO driftlog.launch broker_started service=up run=tiny pid=1\n"
        "12:01 INFO driftlog.launch service_ended service=trainer run=tiny code=-9 verdict=restart\n"
        "12:01 INFO driftlog.launch restart service=trainer run=tiny deaths=1\n"
        "12:09 INFO driftlog.launch service_ended service=trainer run=tiny code=0 verdict=done\n"
    )
    trainer_log = (
        "x INFO t run_started run=tiny\nx WARNING t log_in_doubt tries=1\nx WARNING t log_in_doubt tries=2\n"
        "x INFO t resumed policy_version=1\nx ERROR r service_failed kind=StoreFull\n"
        "x INFO t resumed policy_version=1\n"
    )

    found = traces(up_log, trainer_log)

    assert found.deaths == {(TRAINER, -9): 1}
    assert found.restarts == {TRAINER: 1}
    assert (found.broker_starts, found.resumed, found.in_doubt, found.store_full) == (1, 2, 1, 1)


def test_recovery_points_are_read_as_kafka_writes_them() -> None:
    assert recovery_points("0\n2\ntiny.policy 0 33\ntiny.trajectories 3 7\n") == {
        ("tiny.policy", 0): 33,
        ("tiny.trajectories", 3): 7,
    }


# ---------------------------------------------------------------- price


def test_a_workers_seconds_are_counted_once_however_many_groups_it_samples_at_once() -> None:
    together = [claim(0, 4), claim(1, 3), claim(3, 6), claim(10, 11)]

    assert worker_seconds(together) == 7.0
    assert worker_seconds([claim(0, 4), claim(0, 4, worker="g1")]) == 8.0
    assert worker_seconds([]) == 0.0


def test_what_a_killed_worker_had_begun_and_not_finished_is_thrown_away() -> None:
    begun = {"tiny/a": 7_000_000, "tiny/b": 8_500_000}
    hit = hit_of(GENERATOR_KILL, in_flight_since_us=begun, incarnations=frozenset({"i1"}))

    assert in_flight_loss_s(hit, WHOLE) == 1.5
    assert in_flight_loss_s(replace(hit, in_flight_since_us={"tiny/a": 7_000_000}), WHOLE) == 0.0


def test_a_finished_group_is_lost_unless_it_was_trained_or_the_run_was_over() -> None:
    for reason, expected in (("lost", 1), ("stale", 1), ("run_ended", 0), ("zero_variance", 0)):
        evidence = replace(WHOLE, fates={"tiny/a": (fate("dropped", reason),)})
        assert len(lost_groups(evidence)) == expected, reason
    assert lost_groups(replace(WHOLE, fates={})) == {"tiny/a": "never decided"}
    hit = hit_of(TRAINER_KILL, groups_in_log=frozenset({"tiny/a"}))
    priced = price([hit], replace(WHOLE, fates={"tiny/a": (fate("dropped", "lost"),)}), "tiny")
    assert priced["hits"][0]["finished_loss_s"] == 3.0
    assert by_phase(priced["hits"]) == {Phase.BETWEEN: {"kills": 1, "finished_s": 3.0, "in_flight_s": 0.0}}


def test_what_is_only_in_the_page_cache_is_told_apart_from_what_is_on_the_disk() -> None:
    place = ("tiny.trajectories", 0)
    evidence = replace(WHOLE, generated={"tiny/a": (claim(5, 8, offset=0),), "tiny/b": (claim(8, 9, offset=1),)})
    hit = hit_of(Fault(what=What.KILL, service=BROKER), acknowledged={place: 2}, fsynced={place: 1})

    assert only_flushed(hit, evidence, "tiny") == {
        "records_acknowledged": 2,
        "records_fsynced": 1,
        "generation_seconds_only_flushed": 1.0,
    }
