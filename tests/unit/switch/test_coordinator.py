"""The coordinator on the in-memory log: when a time-out is certain, who is fenced, what a restart grants."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from consumers.coordinator import CoordinatorPorts, CoordinatorService, CoordinatorSettings, SwitchesKeepFailing
from consumers.switching import SwitchRules
from infra.policy_follower import PolicyFollower
from infra.ports import Message
from schemas.errors import Fenced, LogUnavailable
from schemas.headers import control_headers
from schemas.heartbeat import Heartbeat
from schemas.ids import RunId
from schemas.policy_events import AnyPolicyEvent, encode_policy_event
from tests.fakes.log_script import G0, PolicyScript
from tests.fakes.memory_log import Crash, MemoryLog
from tests.fakes.virtual_clock import VirtualClock

POLICY, WORKERS = "demo.policy", "demo.workers"


class NoStore:
    """Records deletions; `error` is raised instead."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.error: Exception | None = None

    def delete(self, manifest_uri: str) -> None:
        if self.error is not None:
            raise self.error
        self.deleted.append(manifest_uri)

    def collect_garbage(self, keep_uris: Collection[str], **limits: object) -> list[str]:
        return []


class Rig:
    """A policy topic written by the test, and coordinators that read it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        self.log.client("setup").admin().create_topics("demo")
        self.writer = self.log.client("others").writer()
        self.store = NoStore()
        self.ids = 0
        self.beats = 0

    def say(self, tell: str, *args: object, **kwargs: object) -> None:
        """Write one event, spelled as PolicyScript spells it."""
        script = PolicyScript()
        getattr(script, tell)(*args, **kwargs)
        for event in script.events:
            value = encode_policy_event(event)
            self.writer.send(
                Message(topic=POLICY, key=b"demo", value=value, headers=control_headers(event, value, "t"))
            )

    def beat(self, key: tuple[str, str] = G0) -> None:
        self.beats += 1
        value = Heartbeat(
            run="demo", at_us=self.beats, worker=key[0], incarnation=key[1], sequence=self.beats, state="ready",
            version=0, claims=(), tokens_total=0, groups_total=0, tokens_per_s=0.0, idle_fraction=0.0,
        )  # fmt: skip
        self.writer.send(Message(topic=WORKERS, key=b"k", value=value.model_dump_json().encode()))

    def coordinator(self, name: str = "coordinator", *, min_workers: int = 1, keep: int = 0) -> CoordinatorService:
        client = self.log.client(name)
        rules = SwitchRules(
            run="demo", mode="barrier", switch_deadline_s=8.0, keep=keep or "all", min_workers=min_workers
        )
        settings = CoordinatorSettings(run=RunId("demo"), rules=rules, lease_s=6.0, failed_switches_in_row=3)
        ports = CoordinatorPorts(
            writer=client.transactional_writer("demo-coordinator"),
            open_policy=lambda: PolicyFollower(client.reader({POLICY: 1}, "beginning"), POLICY),
            open_workers=lambda: client.reader({WORKERS: 1}, "beginning"),
            store=self.store,  # type: ignore[arg-type]
            clock=self.clock,
            new_id=self._new_id,
        )
        return CoordinatorService(settings, ports)

    def _new_id(self) -> str:
        self.ids += 1
        return f"id{self.ids}"

    def events(self) -> list[AnyPolicyEvent]:
        follower = PolicyFollower(self.log.client("check").reader({POLICY: 1}, "beginning"), POLICY)
        return [event for _, event, void in follower.advance() if not void]

    def types(self) -> list[str]:
        return [event.type for event in self.events()]

    def go_live(self, service: CoordinatorService) -> None:
        """g0 proves version 0."""
        self.say("started")
        self.say("published", 0)
        self.say("joined", G0)
        self.beat()
        settle(service)
        self.say("loaded", G0, 0, self.switch())
        settle(service)
        assert self.types()[-1] == "VersionActivated"

    def switch(self) -> str:
        return next(e.switch for e in reversed(self.events()) if e.type == "SwitchStarted")  # type: ignore[union-attr]


def settle(service: CoordinatorService, steps: int = 12) -> None:
    """Step until nothing happens any more."""
    for _ in range(steps):
        service.step()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_worker_is_expired_after_its_lease_with_its_last_heartbeat(rig: Rig) -> None:
    service = rig.coordinator()
    rig.go_live(service)
    rig.clock.advance(5.9)
    settle(service)
    before = "WorkerExpired" in rig.types()
    rig.clock.advance(0.2)
    settle(service)

    expired = rig.events()[-1]
    assert not before
    assert (expired.type, expired.last_heartbeat_at_us, expired.last_heartbeat_offset) == ("WorkerExpired", 1, 0)


def test_a_heartbeat_that_lies_unread_in_the_log_saves_the_worker(rig: Rig) -> None:
    """The coordinator was paused: the lease is over on its clock, but the heartbeat was written in time."""
    service = rig.coordinator()
    rig.go_live(service)
    rig.clock.advance(5)
    rig.beat()
    rig.clock.advance(5)
    settle(service)

    assert "WorkerExpired" not in rig.types()


def test_heartbeats_behind_a_full_poll_are_read_before_the_lease_is_judged(rig: Rig) -> None:
    service = rig.coordinator()
    rig.go_live(service)
    rig.clock.advance(7)
    for _ in range(600):
        rig.beat(("g9", "i1"))
    rig.beat()
    settle(service)

    assert "WorkerExpired" not in rig.types()


def test_an_undecodable_heartbeat_is_no_heartbeat_and_stops_nothing(rig: Rig) -> None:
    service = rig.coordinator()
    rig.go_live(service)
    rig.clock.advance(7)
    rig.writer.send(Message(topic=WORKERS, key=b"k", value=b"{"))
    settle(service)

    assert rig.types()[-1] == "WorkerExpired"


def test_timers_stand_still_while_an_open_transaction_hides_the_end_of_policy(rig: Rig) -> None:
    service = rig.coordinator()
    rig.go_live(service)

    def die_inside(name: str, phase: str) -> None:
        if name == "transaction.end":
            raise Crash(name)

    writer = rig.log.client("trainer", on_call=die_inside).transactional_writer("demo-trainer")
    writer.init()
    rig.clock.advance(5.5)
    with pytest.raises(Crash):
        writer.commit([Message(topic=POLICY, key=b"demo", value=b"{}")])
    rig.clock.advance(1)
    settle(service)
    hidden = rig.types()
    rig.clock.advance(10)
    settle(service)

    assert "WorkerExpired" not in hidden
    assert rig.types()[-1] == "WorkerExpired"


def test_a_coordinator_that_starts_waits_for_what_an_open_transaction_hides(rig: Rig) -> None:
    """Found by the simulator: its own switch lay behind it, and was opened a second time."""
    service = rig.coordinator()
    rig.go_live(service)

    def die_inside(name: str, phase: str) -> None:
        if name == "transaction.end":
            raise Crash(name)

    writer = rig.log.client("trainer", on_call=die_inside).transactional_writer("demo-trainer")
    writer.init()
    rig.say("published", 1)
    with pytest.raises(Crash):
        writer.commit([Message(topic=POLICY, key=b"demo", value=b"{}")])
    settle(service)
    successor = rig.coordinator()
    settle(successor)
    rig.clock.advance(10)
    settle(successor)

    follower = PolicyFollower(rig.log.client("check").reader({POLICY: 1}, "beginning"), POLICY)
    started = [void for _, event, void in follower.advance() if event.type == "SwitchStarted"]
    assert started == [False, False], "one for version 0, one for version 1, none of them void"


def test_a_switch_deadline_expires_the_worker_that_did_not_answer(rig: Rig) -> None:
    service = rig.coordinator()
    rig.go_live(service)
    rig.say("published", 1)
    settle(service)
    for _ in range(2):
        rig.clock.advance(4.1)
        rig.beat()
        settle(service)

    assert [e.reason for e in rig.events() if e.type == "WorkerExpired"] == ["switch_deadline"]  # type: ignore[union-attr]
    assert rig.types()[-1] == "VersionFailed"


def test_an_ack_that_lies_unread_beats_the_deadline(rig: Rig) -> None:
    service = rig.coordinator()
    rig.go_live(service)
    rig.say("published", 1)
    settle(service)
    rig.clock.advance(9)
    rig.beat()
    rig.say("loaded", G0, 1, rig.switch())
    settle(service)

    assert rig.types()[-1] == "VersionActivated"


def test_a_restarted_coordinator_grants_one_lease_of_grace(rig: Rig) -> None:
    rig.go_live(rig.coordinator("c1"))
    rig.clock.advance(20)
    second = rig.coordinator("c2")
    settle(second)
    rig.clock.advance(5.9)
    settle(second)
    graced = "WorkerExpired" in rig.types()
    rig.clock.advance(0.2)
    settle(second)

    assert not graced
    assert rig.types()[-1] == "WorkerExpired"


def test_a_fenced_coordinator_stops_for_good_and_writes_nothing(rig: Rig) -> None:
    first = rig.coordinator("c1")
    rig.go_live(first)
    second = rig.coordinator("c2")
    settle(second)
    rig.say("published", 1)

    for _ in range(2):
        with pytest.raises(Fenced):
            settle(first)
    settle(second)
    assert rig.types().count("SwitchStarted") == 2


def test_its_own_decision_is_read_back_before_the_next(rig: Rig) -> None:
    service = rig.coordinator()
    rig.say("started")
    rig.say("published", 0)
    rig.say("joined", G0)
    settle(service, 30)

    assert rig.types().count("SwitchStarted") == 1


def test_an_unknown_outcome_is_looked_up_in_the_log_and_not_written_twice(rig: Rig) -> None:
    for fate in ("committed", "aborted"):
        fresh = Rig()
        service = fresh.coordinator()
        fresh.say("started")
        fresh.say("published", 0)
        fresh.say("joined", G0)
        fresh.log.next_commit = fate  # type: ignore[assignment]
        settle(service)

        assert fresh.types().count("SwitchStarted") == 1


def test_a_broker_that_stays_away_is_given_up_after_a_bounded_number_of_tries(rig: Rig) -> None:
    service = rig.coordinator()
    rig.log.available = False

    with pytest.raises(LogUnavailable):
        settle(service, 11)


def test_the_first_switch_waits_a_little_for_the_wanted_number_of_workers(rig: Rig) -> None:
    service = rig.coordinator(min_workers=2)
    rig.say("started")
    rig.say("published", 0)
    rig.say("joined", G0)
    settle(service)
    alone = rig.types()
    for _ in range(4):
        rig.clock.advance(2.6)
        rig.beat()
        settle(service)

    assert alone[-1] == "WorkerJoined"
    assert rig.types()[-1] == "SwitchStarted"


def test_failed_switches_are_tried_again_with_growing_waits_and_then_stop_the_run(rig: Rig) -> None:
    service = rig.coordinator()
    rig.say("started")
    rig.say("published", 0)
    rig.say("joined", G0)
    waits = []
    for _ in range(2):
        settle(service)
        rig.say("load_failed", G0, 0, rig.switch())
        settle(service)
        waited, before = 0.0, rig.types().count("SwitchStarted")
        while rig.types().count("SwitchStarted") == before:
            rig.clock.advance(0.5)
            waited += 0.5
            rig.beat()
            settle(service, 4)
        waits.append(waited)
    rig.say("load_failed", G0, 0, rig.switch())

    assert waits == [1.0, 2.0]
    with pytest.raises(SwitchesKeepFailing, match="3 switches failed in a row: no worker left: g0/i1: load failed"):
        settle(service)


def test_a_version_is_deleted_after_its_retirement_was_read_back(rig: Rig) -> None:
    service = rig.coordinator(keep=2)
    rig.go_live(service)
    for version in (1, 2, 3):
        rig.say("published", version)
    settle(service)

    assert [e.version for e in rig.events() if e.type == "VersionRetired"] == [1]  # type: ignore[union-attr]
    assert rig.store.deleted == ["demo/a1/manifest.json"]


def test_a_deletion_that_fails_stops_nothing(rig: Rig) -> None:
    service = rig.coordinator(keep=2)
    rig.go_live(service)
    rig.store.error = OSError("read-only file system")
    for version in (1, 2, 3):
        rig.say("published", version)
    settle(service)

    assert rig.types()[-1] == "VersionRetired"


def test_the_end_of_the_run_finishes_it_but_an_old_end_may_be_about_to_be_extended(rig: Rig) -> None:
    service = rig.coordinator("c1")
    rig.go_live(service)
    rig.say("ended", 0)
    settle(service)
    late = rig.coordinator("c2")
    settle(late)
    early = late.finished
    rig.clock.advance(6.1)
    settle(late)

    assert service.finished
    assert (early, late.finished) == (False, True)
