"""Public failure cases about the log, through the real services: C55, C58, C61, C62, C67, C71."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.ports import Message
from schemas.headers import DEAD_CODE, DEAD_OFFSET, DEAD_PARTITION, DEAD_TOPIC
from schemas.ids import GroupId
from schemas.ledger import Subject
from schemas.topics import TopicName
from schemas.trajectory_codec import encode_group, group_message_headers
from schemas.trajectory_schema import TRAJECTORY
from tests.cases.damage import without_column
from tests.cases.trainer_rig import TRAJECTORIES, TrainerRig
from tests.fakes.log_script import group
from tests.unit.generator.generator_rig import GeneratorRig


def fill(rig: TrainerRig, partition: int, count: int) -> None:
    """Records below the ones a case is about: of groups nobody asked for."""
    rows = group(GroupId("sim/p000000/e9/a0"), [1.0], group_size=4, segments=[(0, 1, 3)])
    for _ in range(count):
        rig.send(rows, partition=partition)


def named(rig: GeneratorRig, position: int) -> str:
    return f"demo/p{position:06d}/e0/a0"


@pytest.mark.parametrize("side", ["client", "broker"])
def test_c55_an_oversize_group_is_split_and_its_sibling_delivered(tmp_path: Path, side: str) -> None:
    """C55: the record is too large for the topic (only the broker's answer says so) or for any record at all (refused
    before it is sent); a small group of the same batch goes through, and both are trained data in the end."""
    rig = GeneratorRig(tmp_path).serving()
    rig.ask(0)
    rig.until(rig.groups)
    whole = max(len(record.value or b"") for record in rig.records(TopicName.TRAJECTORIES))
    with pytest.MonkeyPatch.context() as patch:
        if side == "broker":
            for partition in range(4):
                rig.log.partition("demo.trajectories", partition).max_message_bytes = whole - 200
        else:
            from schemas import trajectory_codec

            limits = replace(trajectory_codec.WRITER_LIMITS, max_bytes=whole - 200)
            patch.setattr(trajectory_codec, "WRITER_LIMITS", limits)
        rig.ask(1)
        rig.ask(2, group_size=1)
        rig.until(lambda: len(rig.rows()) == 4 + 4 + 1)
        rig.step(3)

    sizes = [(r.key or b"").decode() for r in rig.records(TopicName.TRAJECTORIES)]
    assert sizes.count(named(rig, 1)) == 2, "two halves"
    assert sizes.count(named(rig, 2)) == 1
    assert [rig.committed(p) for p in (0, 1, 2)] == [1, 1, 1]


def test_c55_rows_that_can_not_be_sent_at_all_are_lost_with_group_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C55: not even one row fits; the worker says which group, goes on, and does not generate it for ever."""
    rig = GeneratorRig(tmp_path).serving()
    for partition in range(4):
        rig.log.partition("demo.trajectories", partition).max_message_bytes = 100
    rig.ask(0)
    rig.until(lambda: rig.committed(0) == 1)

    lost = [record.driftlog_fields for record in caplog.records if record.message == "rows_lost"]  # type: ignore[attr-defined]
    assert [fields["group"] for fields in lost] == [named(rig, 0)] * 4
    assert "larger than 100 bytes" in lost[0]["reason"]
    assert len(rig.service._outbox) == 0


def test_c58_undecodable_records_go_to_the_dead_letters_and_block_nothing(tmp_path: Path) -> None:
    """C58: offsets 21 good, 22 random bytes, 23 good, 24 valid Arrow without a column; then a restart."""
    rig = TrainerRig(tmp_path, groups_per_step=2, run_ahead=0, versions=2).begin()
    fill(rig, 0, 21)
    first, second = (rig.rows(request, [1, 0, 0, 1]) for request in rig.requests()[:2])
    value = encode_group(second)
    rig.send(first, partition=0)
    rig.send_bytes(b"\x00\x01random", partition=0)
    rig.send(second, partition=0)
    damaged = without_column(value, "token_ids")
    headers = TRAJECTORY.headers(rows=4, value=damaged, source="g0", at_us=0, event_id="x")
    rig.send_bytes(damaged, headers, partition=0)
    rig.log.next_commit = "aborted"
    rig.step(1)
    unwritten = (rig.records(TopicName.DEADLETTERS), rig.committed()[0])
    rig.step(12)
    rig.wait(2)
    dead = rig.records(TopicName.DEADLETTERS)
    rig.restart()
    rig.wait(2)

    assert unwritten == ([], 0), "no dead letter, no progress"
    assert [step.groups for step in rig.steps()] == [2]
    assert [letter.value for letter in dead] == [b"\x00\x01random", damaged]
    where = [[letter.header(name) for name in (DEAD_TOPIC, DEAD_PARTITION, DEAD_OFFSET)] for letter in dead]
    assert where == [[b"sim.trajectories", b"0", b"22"], [b"sim.trajectories", b"0", b"24"]]
    assert dead[1].header(DEAD_CODE) == b"schema_missing:token_ids"
    assert rig.committed()[0] == 25
    assert len(rig.records(TopicName.DEADLETTERS)) == 2
    told = [(d.offset, d.reason) for d in rig.decisions() if d.subject is Subject.RECORD]
    assert told == [
        (22, f"invalid:{(dead[0].header(DEAD_CODE) or b'').decode()}"),
        (24, "invalid:schema_missing:token_ids"),
    ]


def test_c61_the_committed_offset_is_the_next_one_to_read(tmp_path: Path) -> None:
    """C61: the last trained record is 41; after a restart reading begins at 42, and nothing is behind."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=2).begin()
    fill(rig, 0, 41)
    placed = rig.send(rig.rows(rig.requests()[0], [1, 0, 0, 1]), partition=0)
    rig.step(6)
    before = rig.told(Subject.TRAJECTORY)
    rig.restart()
    positions = rig.trainer._p.trajectories.positions()

    assert placed.offset == 41
    assert rig.committed()[0] == 42
    assert positions[TRAJECTORIES, 0] == 42 == rig.trainer._p.trajectories.end_offsets()[TRAJECTORIES, 0]
    assert rig.told(Subject.TRAJECTORY) == before


def test_c62_every_partition_of_a_mixed_batch_is_committed(tmp_path: Path) -> None:
    """C62: partition 0 holds 10 and 11, partition 1 holds 5, partition 2 holds 7; all are trained in one step."""
    rig = TrainerRig(tmp_path, groups_per_step=4, run_ahead=0, versions=2).begin()
    for partition, below in ((0, 10), (1, 5), (2, 7)):
        fill(rig, partition, below)
    for request, partition in zip(rig.requests(), (0, 0, 1, 2), strict=True):
        rig.send(rig.rows(request, [1, 0, 0, 1]), partition=partition)
    rig.step(6)
    trained = [(d.partition, d.offset) for d in rig.decisions() if d.decision.value == "trained" and d.row == 0]
    before = rig.told(Subject.TRAJECTORY)
    rig.restart()
    rig.wait(2)

    assert trained == [(0, 10), (0, 11), (1, 5), (2, 7)]
    assert rig.committed() == {0: 12, 1: 6, 2: 8, 3: 0}
    assert rig.told(Subject.TRAJECTORY) == before


@pytest.mark.parametrize("fate", ["aborted", None])
def test_c67_records_of_an_aborted_transaction_are_never_seen(tmp_path: Path, fate: Any) -> None:
    """C67: a producer writes the group in a transaction that is aborted, then again in one that commits."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=1).begin()
    rows = rig.rows(rig.requests()[0], [1, 0, 0, 1])
    value = encode_group(rows)
    message = Message(
        topic=TRAJECTORIES, key=b"k", value=value, headers=group_message_headers(rows, value, "g"), partition=0
    )
    writer = rig.log.client("producer").transactional_writer("somebody")
    writer.init()
    rig.log.next_commit = fate
    if fate is None:
        writer.commit([message])  # not aborted: what comes later is the same group once more
    else:
        with pytest.raises(Exception, match="outcome unknown"):
            writer.commit([message])
        writer.init()
    rig.step(3)
    early = rig.told()
    writer.commit([message])
    rig.step(3)
    rig.wait(2)

    trained = [(d.offset, d.decision.value) for d in rig.decisions() if d.decision.value == "trained" and d.row == 0]
    assert len(trained) == 1
    assert early == ([] if fate else rig.told())
    assert trained[0][0] == (2 if fate else 0), "behind the aborted record and its marker"


def test_c71_a_worker_told_to_stop_delivers_everything_before_it_ends(tmp_path: Path) -> None:
    """C71 (i): four groups are under way or waiting for their acknowledgements; the broker is reachable."""
    rig = GeneratorRig(tmp_path).serving()
    rig.ask(*range(4))
    rig.step(1)
    rig.log.deferred = True
    rig.step(30)
    rig.service.request_stop("signal")
    rig.step(5)
    waiting = rig.service.finished
    rig.log.deferred = False
    rig.until(lambda: rig.service.finished)

    assert not waiting
    assert len(rig.rows()) == 16
    assert rig.service._p.writer.close(5.0) == 0


def test_c71_what_could_not_be_delivered_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C71 (ii): the broker stays away; the writer counts what it gives up, the worker names the groups, and none of
    their requests was committed, so another worker does them again."""
    caplog.set_level(logging.INFO)
    rig = GeneratorRig(tmp_path).serving()
    rig.ask(*range(4))
    rig.step(1)
    rig.log.available = False
    rig.step(30)
    rig.service.request_stop("signal")
    rig.step(20)
    finished = rig.service.finished
    rig.service.close()
    undelivered = rig.service._p.writer.close(5.0)

    assert not finished
    assert undelivered >= 4
    [left] = [record.driftlog_fields for record in caplog.records if record.message == "left_unpublished"]  # type: ignore[attr-defined]
    assert left["groups"] == 4
    assert left["ids"].split() == [named(rig, position) for position in range(4)]
    assert [rig.committed(p) for p in range(4)] in ([None] * 4, [0] * 4)
