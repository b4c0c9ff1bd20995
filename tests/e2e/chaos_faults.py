"""Injects faults into a run that is under way, and proves that each of them fired."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from schemas.policy_events import VersionActivated, VersionPublished, WorkerExpired
from tests.e2e.chaos_disk import SmallDisk
from tests.e2e.chaos_hits import Hit, recovery_points, worker_of
from tests.e2e.chaos_plan import BROKER, COORDINATOR, GENERATORS, LEASE_S, PROJECTOR, TRAINER, Fault, Phase, What
from tests.e2e.chaos_stage import TURN_S, Stage

SETTLED_S = 0.3
"""a commit that was on its way to the broker when the trainer was stopped is visible by then"""
TRANSACTION_S = 11.5
"""the broker has ended an open transaction by then: its time-out, its clean-up interval, and a little"""
COORDINATOR_S = LEASE_S + 2.0
"""every lease is over on the coordinator's clock by then, while heartbeats lie in the log that it has not read"""
BROKER_S = 8.0
"""longer than the session of a member of the prompts group (6 s), shorter than requests, transactions and leases"""
_AIM_LIMIT_S = 180.0
_WORK_LIMIT_S = 8.0


def inject(stage: Stage, fault: Fault, random_: random.Random, disk: SmallDisk | None) -> Hit:
    """Do it; returns when it has hit, and for a fault that lasts, when it was taken back."""
    if fault.what is What.STOP:
        return _stop(stage, fault, random_)
    if fault.what is What.LOCK_TRACKER:
        return _lock_tracker(stage, fault)
    if fault.what is What.FILL_DISK:
        assert disk is not None, "this run has no disk that can be filled"
        return _fill_disk(stage, fault, random_, disk)
    if fault.service == TRAINER:
        return _kill_trainer(stage, fault, random_)
    if fault.service == BROKER:
        return _kill_broker(stage, fault)
    return _kill_other(stage, fault)


# ---------------------------------------------------------------- kills


def _kill_trainer(stage: Stage, fault: Fault, random_: random.Random) -> Hit:
    with _trainer_at(stage, fault.phase, random_) as phase:
        open_transaction = phase is Phase.BETWEEN and stage.watch.has_open_transaction()
        stage.kill(TRAINER)
        hit = stage.hit(fault, phase, "gone" + (", with an open transaction" if open_transaction else ""))
        hit.open_transaction = open_transaction
        stage.store.give_up(stage.watch.view.attempts)
    return hit


def _kill_broker(stage: Stage, fault: Fault) -> Hit:
    with stage.frozen_trainer() as phase:
        acknowledged = stage.watch.acknowledged()
        stage.watch.catch_up()
        stage.kill(BROKER)
        hit = stage.hit(fault, phase, "gone")
    hit.acknowledged = acknowledged
    points = stage.run.broker / "log" / "recovery-point-offset-checkpoint"
    hit.fsynced = recovery_points(points.read_text(encoding="ascii")) if points.exists() else {}
    return hit


def _kill_other(stage: Stage, fault: Fault) -> Hit:
    """A generator dies at work: as soon as a heartbeat names groups it has begun."""
    worker, view = worker_of(fault.service), stage.watch.view
    stage.until(lambda: stage.pid(fault.service) is not None, f"{fault.service} to be there", _AIM_LIMIT_S)
    if fault.service in GENERATORS:
        before = view.beats.get(worker)
        deadline_s = time.monotonic() + _WORK_LIMIT_S

        def begins_work() -> bool:
            beat = view.beats.get(worker)
            fresh = beat is not None and beat != before and bool(beat.claims)
            return fresh or time.monotonic() > deadline_s

        stage.until(begins_work, f"{fault.service} to begin a group", _AIM_LIMIT_S)
    stage.kill(fault.service)
    killed_s, killed_us = time.monotonic(), time.time_ns() // 1_000
    with stage.frozen_trainer() as phase:
        if phase is Phase.RECOVERING:
            stage.watch.catch_up()
        hit = stage.hit(fault, phase, "gone")
    hit.at_s, hit.at_us = killed_s, killed_us
    if fault.service in GENERATORS:
        hit.in_flight_since_us = view.claims(worker)
    return hit


@contextmanager
def _trainer_at(stage: Stage, wanted: Phase | None, random_: random.Random) -> Iterator[Phase]:
    """The trainer, standing still in that phase as log and store tell it. Tries until it is; leaves it running."""
    deadline_s = time.monotonic() + _AIM_LIMIT_S
    while True:
        assert time.monotonic() < deadline_s, f"the trainer was never caught {wanted}"
        with _urgent():
            _await_trigger(stage, wanted, random_)
            try:
                pid = stage.stop(TRAINER)
            except (AssertionError, ProcessLookupError):
                continue  # it died of something else meanwhile
        try:
            phase = stage.standing().phase
            if phase is wanted is Phase.BETWEEN:
                time.sleep(SETTLED_S)  # not a wait for something: the time in which a commit would show
                phase = stage.standing().phase
            if wanted is None or phase is wanted:
                yield phase
                return
            stage.say(f"    aimed at {wanted}, found {phase}: once more")
        finally:
            _go_on(pid)


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # it was killed: that is what it was stopped for


@contextmanager
def _urgent() -> Iterator[None]:
    """Run before the services where we may: on busy cores a moment of a few hundredths of a second is missed."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _await_trigger(stage: Stage, wanted: Phase | None, random_: random.Random) -> None:
    """Until the wanted phase may have begun. Log and store say afterwards whether it has."""
    if wanted is Phase.RECOVERING:
        stage.until(lambda: stage.pid(TRAINER) is not None, "a new trainer", _AIM_LIMIT_S)
        _turn_for(stage, random_.uniform(0.2, 2.5))
    elif wanted in (Phase.SAVING, Phase.BETWEEN):
        _await_store(stage, staging=wanted is Phase.SAVING)
        if wanted is Phase.BETWEEN:
            time.sleep(random_.choice((0.0, random_.uniform(0.0, 0.03))))  # into the transaction, now and then
    elif wanted is Phase.COMPUTING:
        stage.until(stage.watch.view.next_batch_is_in, "a whole batch in the log", _AIM_LIMIT_S)
        _turn_for(stage, random_.uniform(0.0, 0.2))
    else:
        stage.for_versions(1)
        if wanted is None:
            _turn_for(stage, random_.uniform(0.0, 0.5))


def _turn_for(stage: Stage, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        stage.turn()
        time.sleep(TURN_S)


def _await_store(stage: Stage, *, staging: bool) -> None:
    """Until a checkpoint appears under its temporary or its final name. Looks every half millisecond: the time between
    the final name and the commit is some hundredths of a second."""
    stage.turn()
    known, changed_ns = stage.store.names(), stage.store.changed_ns()
    next_turn_s = deadline_s = time.monotonic()
    while time.monotonic() < deadline_s + _AIM_LIMIT_S:
        now_ns = stage.store.changed_ns()
        if now_ns != changed_ns:
            changed_ns = now_ns
            fresh = stage.store.names() - known
            if any(name.startswith(".") == staging for name in fresh):
                return
        if time.monotonic() > next_turn_s:
            stage.turn()
            next_turn_s = time.monotonic() + 0.05
        time.sleep(0.0005)
    raise AssertionError("no checkpoint was written")


# ---------------------------------------------------------------- faults that last


def _stop(stage: Stage, fault: Fault, random_: random.Random) -> Hit:
    if fault.service == TRAINER:
        return _stop_trainer(stage, fault, random_)
    if fault.service == COORDINATOR:
        return _stop_coordinator(stage, fault)
    return _stop_broker(stage, fault) if fault.service == BROKER else _stop_generator(stage, fault)


def _stop_generator(stage: Stage, fault: Fault) -> Hit:
    """Longer than its lease: it is expired, and comes back under a new name."""
    worker, begun = worker_of(fault.service), len(stage.watch.view.policy)
    pid = stage.stop(fault.service)

    def expired() -> bool:
        news = [seen.event for seen in stage.watch.view.policy[begun:]]
        return any(isinstance(event, WorkerExpired) and event.worker == worker for event in news)

    try:
        stage.until(expired, f"{worker} to be expired", 4 * LEASE_S)
        with stage.frozen_trainer() as phase:
            hit = stage.hit(fault, phase, f"{worker} was expired while it stood still")
    finally:
        os.kill(pid, signal.SIGCONT)
    hit.at_s = time.monotonic()
    return hit


def _stop_trainer(stage: Stage, fault: Fault, random_: random.Random) -> Hit:
    """Longer than its transaction may last: whatever it was about to commit is aborted, by the broker or by itself."""
    with _trainer_at(stage, fault.phase, random_) as phase:
        version, begun = stage.watch.view.version, len(stage.watch.view.policy)
        open_transaction = stage.watch.has_open_transaction()
        _turn_for(stage, TRANSACTION_S)
        news = [seen.event for seen in stage.watch.view.policy[begun:]]
        assert not any(isinstance(event, VersionPublished) for event in news), "a trainer that stands still published"
        words = "an open transaction" if open_transaction else "no transaction begun"
        hit = stage.hit(fault, phase, f"stood still for {TRANSACTION_S:g} s at version {version}, {words}")
        hit.open_transaction = open_transaction
        hit.attempts = frozenset()  # its own checkpoint may still be committed when no transaction was begun
    return hit


def _stop_coordinator(stage: Stage, fault: Fault) -> Hit:
    """Longer than every lease: nothing goes live meanwhile, and afterwards it expires nobody who wrote heartbeats."""
    pid = stage.stop(COORDINATOR)
    try:
        with stage.frozen_trainer() as phase:
            stage.watch.catch_up()
            hit = stage.hit(fault, phase, "")
        begun = len(stage.watch.view.policy)
        _turn_for(stage, COORDINATOR_S)
        stage.watch.catch_up()
        news = [seen.event for seen in stage.watch.view.policy[begun:]]
        assert not any(isinstance(event, VersionActivated) for event in news), "a version went live without coordinator"
        hit.evidence = f"stood still for {COORDINATOR_S:g} s, nothing went live"
        stage.say(f"    {hit.evidence}")
    finally:
        os.kill(pid, signal.SIGCONT)
    hit.at_s = time.monotonic()
    return hit


def _stop_broker(stage: Stage, fault: Fault) -> Hit:
    """Its connections stay and nobody answers. No process ends over it, and nothing is committed meanwhile."""
    with stage.frozen_trainer() as phase:
        stage.watch.catch_up()
        pid = stage.stop(BROKER)
        hit = stage.hit(fault, phase, "")
    try:
        _turn_for(stage, BROKER_S)
        assert stage.watch.view.version == hit.version, "a version was committed by a broker that stands still"
        hit.evidence = f"stood still for {BROKER_S:g} s, nothing was committed"
        stage.say(f"    {hit.evidence}")
    finally:
        os.kill(pid, signal.SIGCONT)
    hit.at_s = time.monotonic()
    return hit


def _lock_tracker(stage: Stage, fault: Fault) -> Hit:
    """Another process holds MLflow's database. Training goes on; the projector says so and tries again."""
    mark = len(stage.words(PROJECTOR))
    with closing(sqlite3.connect(stage.site.runs / "mlflow.db", isolation_level=None, timeout=30.0)) as database:
        database.execute("BEGIN EXCLUSIVE")
        version = stage.watch.view.version
        stage.until(lambda: "tracker_unavailable" in stage.words(PROJECTOR)[mark:], "the projector to notice", 120.0)
        stage.until(lambda: stage.watch.view.version >= version + 2, "training to go on", 60.0)
        with stage.frozen_trainer() as phase:
            hit = stage.hit(fault, phase, "the projector found it locked, versions were committed meanwhile")
        hit.log_mark = len(stage.words(PROJECTOR))
        database.execute("ROLLBACK")
    hit.at_s = time.monotonic()
    return hit


def _fill_disk(stage: Stage, fault: Fault, random_: random.Random, disk: SmallDisk) -> Hit:
    """No byte is left from the middle of a save on. The trainer ends over it in the middle of writing, and the next one
    because it asks first; published versions stay as they are."""
    mark = len(stage.words(TRAINER))
    with _trainer_at(stage, fault.phase, random_) as phase:
        disk.fill(stage.pid(TRAINER) or 0)
    version = stage.watch.view.version

    def refusals() -> int:
        return sum(1 for line in stage.words(TRAINER)[mark:].splitlines() if disk.refused(line))

    stage.until(lambda: refusals() >= disk.refusals, "the trainer to find the store full", 120.0)
    assert stage.watch.view.version <= version + 1, "versions were published into a full store"
    hit = stage.hit(fault, phase, f"{disk.kind}: {refusals()} trainers found no room")
    disk.empty()
    hit.at_s = time.monotonic()
    return hit
