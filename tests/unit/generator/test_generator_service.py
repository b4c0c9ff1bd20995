"""The generator service: it takes requests only when proven, publishes before it commits, and leaves in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.ports import Message
from schemas.topics import TopicName
from tests.fakes.log_script import G1
from tests.fakes.tiny_policy import TinyEngine
from tests.unit.generator.generator_rig import GeneratorRig


@pytest.fixture
def rig(tmp_path: Path) -> GeneratorRig:
    return GeneratorRig(tmp_path).serving()


def name(position: int) -> str:
    return f"demo/p{position:06d}/e0/a0"


def test_a_request_becomes_a_published_group_and_is_committed_afterwards(rig: GeneratorRig) -> None:
    rig.ask(3)
    rig.until(lambda: rig.groups() == [name(3)])
    rig.step(2)

    rows = rig.rows()
    assert [row.index_in_group for row in rows] == [0, 1, 2, 3]
    assert {(row.worker_id, row.incarnation, row.claim_id) for row in rows} == {("g0", "i1", "g0/i1/3")}
    assert {segment.version for row in rows for segment in row.segments} == {0}
    assert {segment.proof for row in rows for segment in row.segments} == {rig.last_ack(0)}
    assert rig.committed(3) == 1


def test_nothing_is_committed_before_the_group_is_acknowledged(rig: GeneratorRig) -> None:
    rig.ask(3)
    rig.step(1)
    rig.log.deferred = True
    rig.step(10)
    before = rig.committed(3)
    rig.log.deferred = False
    rig.step(3)

    assert before in (None, 0)
    assert rig.committed(3) == 1


def test_claims_stand_in_the_heartbeat_before_generation_starts(rig: GeneratorRig) -> None:
    claimed_at_submit = []
    submit = rig.engine.submit

    def watching(request: Any) -> None:
        claimed_at_submit.append(request.request.group_id in rig.beats()[-1].claims)
        submit(request)

    rig.engine.submit = watching  # type: ignore[method-assign]
    rig.ask(0, 1, 2)
    rig.until(lambda: len(rig.groups()) == 3)

    assert claimed_at_submit == [True, True, True]


def test_an_unproven_worker_takes_no_request(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    rig.say("published", 0)
    rig.ask(0)
    rig.step(20)

    assert rig.types() == ["RunStarted", "VersionPublished", "WorkerJoined"]
    assert not rig.engine.busy()


def test_under_a_barrier_a_proven_worker_waits_for_the_activation(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    rig.say("published", 0)
    rig.step(3)
    rig.say("switched", "s0", 0, [rig.service.me])
    rig.ask(0)
    ack = rig.until(lambda: rig.last_ack(0))
    rig.step(20)
    waiting = rig.groups()
    rig.say("activated", "s0", 0, [ack])
    rig.until(lambda: rig.groups() == [name(0)])

    assert waiting == []


def test_a_request_for_a_version_not_held_waits_for_it(rig: GeneratorRig) -> None:
    rig.say("published", 1)
    rig.ask(0, min_version=1, fallback_version=1)
    rig.step(30)
    parked = rig.groups()
    rig.switch_to(1, publish=False)
    rig.until(lambda: rig.groups() == [name(0)])

    assert parked == []
    assert {segment.version for row in rig.rows() for segment in row.segments} == {1}


def test_after_a_short_wait_a_request_is_taken_under_an_older_allowed_version(rig: GeneratorRig) -> None:
    rig.say("published", 1)
    rig.ask(0, min_version=1, fallback_version=0)
    rig.step(8)
    parked = rig.groups()
    rig.step(12)

    assert parked == []
    assert rig.groups() == [name(0)]


def test_a_request_the_trainer_no_longer_waits_for_is_skipped_and_committed(rig: GeneratorRig) -> None:
    rig.say("published", 1)
    rig.ask(0, min_version=1, fallback_version=1)
    rig.step(3)
    # The next version says that everything below request 5 is decided; PolicyScript always says 0.
    _publish(rig, 2, oldest_open_request=5)
    rig.step(3)
    rig.ask(7, min_version=0)
    rig.until(lambda: rig.groups() == [name(7)])
    rig.step(3)

    assert rig.groups() == [name(7)]
    assert rig.committed(0) == 1


def _publish(rig: GeneratorRig, version: int, *, oldest_open_request: int) -> None:
    from schemas.headers import control_headers
    from schemas.policy_events import encode_policy_event
    from tests.fakes.log_script import PolicyScript

    script = PolicyScript()
    script.published(version)
    event = script.events[0].model_copy(update={"oldest_open_request": oldest_open_request})
    value = encode_policy_event(event)
    rig.others.send(Message(topic="demo.policy", key=b"demo", value=value, headers=control_headers(event, value, "t")))


def test_the_number_of_groups_in_flight_is_bounded(rig: GeneratorRig) -> None:
    rig.engine._polls_per_group = 10**6
    rig.ask(*range(12))
    rig.step(30)

    assert len(rig.engine.running_groups()) == 4


def test_a_full_writer_stops_admission_and_everything_arrives_once_there_is_room(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path, in_flight_bytes=30_000).serving()
    rig.log.deferred = True
    rig.ask(*range(12))
    rig.step(40)
    taken = len(rig.service._outbox) + len(rig.engine.running_groups())
    rig.log.deferred = False
    rig.until(lambda: len(rig.groups()) == 12, steps=200)

    assert taken <= 4
    assert len(rig.rows()) == 48


def test_a_worker_asked_to_stop_finishes_publishes_and_leaves(rig: GeneratorRig) -> None:
    rig.ask(0, 1)
    rig.until(rig.engine.busy)
    rig.service.request_stop("signal")
    rig.ask(2)
    rig.until(lambda: rig.service.finished)

    assert sorted(rig.groups()) == [name(0), name(1)]
    assert rig.types()[-1] == "WorkerLeft"
    assert rig.log.group("demo-generators").members == [], "what it did not take goes to others at once"


def test_a_worker_that_cannot_read_policy_to_its_end_admits_nothing_after_one_lease(rig: GeneratorRig) -> None:
    """Its reader hangs while the log grows: it may have lost its standing without knowing."""
    follower = rig.service._p.follower
    follower.advance = lambda max_records=500: []  # type: ignore[method-assign]
    rig.say("published", 1)
    rig.step(90)
    rig.ask(0)
    rig.step(20)

    assert rig.groups() == []
    assert not rig.engine.busy()


def test_a_broker_that_is_away_for_a_while_stops_nothing_for_good(rig: GeneratorRig) -> None:
    rig.ask(0)
    rig.step(1)
    rig.log.available = False
    rig.step(100)
    rig.log.available = True
    rig.ask(1)
    rig.until(lambda: len(rig.groups()) == 2)

    assert sorted(rig.groups()) == [name(0), name(1)]


def test_an_expired_worker_that_lives_joins_again_under_a_new_incarnation(rig: GeneratorRig) -> None:
    first = rig.last_ack(0)
    rig.say("expired", rig.service.me)
    rig.step(2)
    again = rig.service.me
    ack = rig.until(lambda: rig.last_ack(0) != first and rig.last_ack(0))
    rig.ask(0)
    rig.step(10)
    before = rig.groups()
    rig.say("admitted", again, 0, ack)
    rig.until(lambda: rig.groups() == [name(0)])

    assert again == ("g0", "i2")
    assert before == []
    assert {(row.incarnation, row.segments[0].proof) for row in rig.rows()} == {("i2", ack)}


def test_a_worker_that_was_replaced_by_a_newer_process_of_its_name_stops(rig: GeneratorRig) -> None:
    rig.say("joined", ("g0", "i77"))
    rig.step(3)

    assert rig.service.finished
    assert rig.service.me == ("g0", "i1")


def test_a_worker_stops_when_the_run_has_ended(rig: GeneratorRig) -> None:
    rig.say("ended", 0)
    rig.step(3)

    assert rig.service.finished


def test_a_worker_that_starts_after_the_end_waits_one_lease_for_an_extension(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    rig.say("published", 0)
    rig.say("ended", 0)
    rig.step(50)
    waiting = rig.service.finished
    rig.step(20)

    assert (waiting, rig.service.finished) == (False, True)
    assert "WorkerJoined" not in rig.types()


def test_a_worker_that_waits_for_an_extension_joins_it(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    rig.say("published", 0)
    rig.say("ended", 0)
    rig.step(10)
    rig.say("started", segment=1)
    rig.step(3)

    assert rig.types()[-1] == "WorkerJoined"


def test_a_worker_whose_join_reached_the_log_behind_the_end_of_the_run_stops_as_well(tmp_path: Path) -> None:
    """Found by the simulator: cut off while it joined, it waited for ever for a run that had ended."""
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    rig.say("published", 0)
    rig.log.deferred = True
    rig.step(3)
    held, rig.log._pending, rig.log.deferred = rig.log._pending, [], False
    rig.say("ended", 0)
    rig.log._pending = held
    rig.step(10)
    joined = rig.types()[-1]
    rig.step(70)

    assert joined == "WorkerJoined"
    assert rig.service.finished


def test_a_join_that_was_not_delivered_is_sent_again(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    rig.log.next_send = "lost"
    rig.step(5)

    assert rig.types() == ["RunStarted", "WorkerJoined"]


def test_nothing_is_done_before_policy_was_read_to_the_end_it_had_at_the_start(tmp_path: Path) -> None:
    """Replaying old activations would load checkpoints that are long retired."""
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    for version in range(700):
        rig.say("published", version)
    rig.service.step()
    joined_early = "WorkerJoined" in rig.types()
    rig.step(3)

    assert not joined_early
    assert "WorkerJoined" in rig.types()


def test_a_request_that_cannot_be_read_goes_to_the_dead_letters_and_stops_nothing(rig: GeneratorRig) -> None:
    rig.others.send(Message(topic="demo.prompts", key=b"k", value=b"no request", partition=0))
    rig.ask(16)
    rig.until(lambda: rig.groups() == [name(16)])
    rig.step(2)

    [dead] = rig.records(TopicName.DEADLETTERS)
    assert dead.value == b"no request"
    assert dead.header("dead-code") == b"no_schema_header"
    assert rig.committed(0) == 2


def test_a_request_that_comes_back_while_it_is_running_is_not_generated_twice(rig: GeneratorRig) -> None:
    """A rebalance takes its partition away and gives it back: the request is read again from the committed offset."""
    rig.engine._polls_per_group = 6
    rig.ask(15)
    rig.until(rig.engine.busy)
    others = [rig.log.client(f"o{i}").group_reader("demo-generators", "demo.prompts") for i in range(15)]
    rig.step(1)
    taken_away = 15 not in rig.service._p.prompts.assignment()
    for other in others:
        other.close()
    rig.until(lambda: rig.groups() == [name(15)])
    rig.step(10)

    assert taken_away
    assert len(rig.rows()) == 4
    assert rig.committed(15) == 1


def test_only_an_admitted_worker_holds_partitions(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path)
    members = rig.log.group("demo-generators").members
    rig.say("started")
    rig.step(10)
    joined = len(members)
    rig.say("published", 0)
    rig.switch_to(0, publish=False)
    rig.step(2)
    admitted = len(members)
    rig.say("expired", rig.service.me)
    rig.step(4)

    assert (joined, admitted, len(members)) == (0, 1, 0)


def test_an_event_that_cannot_be_sent_now_is_no_reason_to_die(rig: GeneratorRig) -> None:
    """Every send is refused for a while, as by a writer that replaces its client after a failed delivery."""
    rig.ask(0)
    rig.until(rig.engine.busy)
    client = rig.service._p.writer._client  # type: ignore[attr-defined]
    room, client.in_flight_bytes = client.in_flight_bytes, 0
    rig.say("published", 1)
    rig.say("switched", "s1", 1, [rig.service.me])
    rig.others.send(Message(topic="demo.prompts", key=b"k", value=b"no request", partition=0))
    rig.step(30)
    client.in_flight_bytes = room
    rig.until(lambda: rig.last_ack(1))

    assert rig.until(lambda: rig.groups() == [name(0)])


def test_two_workers_share_the_requests(rig: GeneratorRig) -> None:
    second = rig.build("g1", engine=TinyEngine(rig.clock))

    def both(times: int = 1) -> None:
        for _ in range(times):
            rig.step()
            second.step()

    both(12)
    ack = rig.last_ack(0)
    rig.say("admitted", (G1[0], second.me[1]), 0, ack)
    both(3)
    rig.ask(*range(16))
    both(40)

    assert sorted(rig.groups()) == [name(i) for i in range(16)]
    assert {row.worker_id for row in rig.rows()} == {"g0", "g1"}
    assert len(rig.rows()) == 64


def test_heartbeats_count_and_say_what_the_worker_does(rig: GeneratorRig) -> None:
    rig.ask(0)
    rig.until(lambda: rig.groups() == [name(0)])
    rig.step(25)

    beats = rig.beats()
    assert [beat.sequence for beat in beats] == list(range(len(beats)))
    assert beats[-1].groups_total == 1
    assert beats[-1].tokens_total == sum(len(row.token_ids) for row in rig.rows())
    assert (beats[-1].state, beats[-1].version, beats[-1].claims) == ("ready", 0, ())
    assert "serving" in {beat.state for beat in beats}
    assert 0.0 <= beats[-1].idle_fraction <= 1.0
