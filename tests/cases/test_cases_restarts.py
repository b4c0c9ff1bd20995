"""Public failure cases about what outlives a process or a policy of the broker: C56, C64, C70, C105."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.checkpoint_store import FsspecCheckpointStore
from infra.ports import Message
from schemas.errors import CheckpointMissing
from schemas.ledger import Settled
from tests.cases.trainer_rig import TRAJECTORIES, TrainerRig
from tests.contract.test_checkpoint_store_contract import manifest_for, write_checkpoint
from tests.fakes.memory_log import Crash
from tests.fakes.tiny_policy import TinyLearner
from tests.unit.generator.generator_rig import GeneratorRig

TRIES = 200


def test_c56_a_step_longer_than_every_time_out_is_committed_once_and_closes_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C56: the step takes 300 s, poll limits and the groups' own time-out (60 s) pass meanwhile; an answer that
    arrives during it is trained next."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=1, versions=2).begin()
    train = TinyLearner.train

    def slow(self: TinyLearner, batch: object) -> object:
        rig.clock.advance(300.0)
        if len(rig.steps()) == 0:
            rig.answer(1)
        return train(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(TinyLearner, "train", slow)
    rig.answer(0)
    rig.step(12)

    assert [step.version_out for step in rig.steps()] == [1, 2]
    told = [(decision, reason) for _, decision, reason in rig.told()]
    assert told.count(("trained", "")) == 2
    assert [reason for _, reason in told if reason in ("lost", "incomplete")] == []


def test_c70_null_values_and_gaps_alarm_nobody(tmp_path: Path) -> None:
    """C70: a delete marker in `policy`, delete markers and compaction gaps in `workers`; a worker that starts behind
    them serves the newest version without waiting for those it never saw."""
    rig = GeneratorRig(tmp_path)
    rig.say("started")
    for version in (0, 1, 2, 3):
        rig.say("published", version)
    for beat in (b"1", b"2"):
        rig.others.send(Message(topic="demo.workers", key=b"gone/i0", value=beat, partition=0)).result(0.0)
    for topic, key in (("demo.policy", b"demo"), ("demo.workers", b"gone/i0"), ("demo.workers", b"g0/i1")):
        rig.others.send(Message(topic=topic, key=key, value=None, partition=0)).result(0.0)
    rig.log.compact("demo.workers")
    rig.step(3)
    rig.switch_to(3, publish=False)
    rig.ask(5)
    rig.until(rig.groups)

    assert rig.service._p.follower.undecodable == 1
    assert {segment.version for row in rig.rows() for segment in row.segments} == {3}
    assert [event.version for _, event, void in rig.policy() if event.type == "VersionLoaded" and not void] == [3]  # type: ignore[union-attr]


def test_c105_there_is_no_latest_pointer_and_a_reader_never_meets_half_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C105: killed before, between and after the operations of a save, 200 times; a reader looks after each."""
    root = tmp_path / "root"
    rename = os.rename
    published: list[tuple[str, str]] = []

    for number in range(TRIES):
        attempt, dies = f"a{number:03d}", number % 4
        store = FsspecCheckpointStore(str(root), "demo", fsync=False)

        def write(directory: Path, dies: int = dies) -> None:
            write_checkpoint(directory)
            if dies == 0:
                raise Crash("in the midst of the files")

        def renamed(source: object, target: object, dies: int = dies) -> None:
            if dies == 1:
                raise Crash("before the rename")
            rename(source, target)  # type: ignore[arg-type]
            if dies == 2:
                raise Crash("after the rename, before anybody was told")

        monkeypatch.setattr("infra.checkpoint_local.os.rename", renamed)
        try:
            saved = store.save(attempt, write, manifest_for(attempt))
            published.append((saved.manifest_uri, saved.manifest_sha256))
        except Crash:
            pass
        monkeypatch.setattr("infra.checkpoint_local.os.rename", rename)
        reader = FsspecCheckpointStore(str(root), "demo")
        for complete in reader.attempts()[-2:]:
            assert int(complete[1:]) % 4 >= 2, "a name without a whole checkpoint behind it"
        if published:
            reader.fetch(*published[-1])
        if dies < 2:
            with pytest.raises(CheckpointMissing):
                reader.fetch(f"demo/{attempt}/manifest.json", "0" * 64)

    assert len(published) == TRIES // 4
    assert len(reader.attempts()) == TRIES // 2


def test_c64_a_trainer_behind_the_retained_log_goes_on_at_its_start_and_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C64: the trainer was away; retention removed records that it had not decided, one of them half of a group it
    waits for. It goes on at the first that is left, the group is asked for again, and nothing is decided twice."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=1, versions=2).begin()
    rows = rig.rows(rig.requests()[0], [1, 0, 0, 1])
    rig.send(rows[:2], partition=0)
    rig.step()
    for _ in range(3):
        lost = rig.send(
            rig.rows(rig.requests()[0], [1, 0, 0, 1], key=("g9", "i9"), segments=[(0, 2, 10**6)]), partition=0
        )
    kept = rig.send(rig.rows(rig.requests()[1], [1, 0, 0, 1]), partition=0)
    rig.log.drop_before(TRAJECTORIES, 0, kept.offset)
    rig.restart()
    for _ in range(3):
        rig.wait(21)
    retry = next(request for request in rig.requests() if request.attempt == 1)
    rig.send(rig.rows(retry, [1, 0, 0, 1]))
    rig.step(12)

    assert lost.offset == kept.offset - 1
    assert [step.version_out for step in rig.steps()] == [1, 2]
    assert [
        control.reason for control in rig.controls() if isinstance(control, Settled) and "lost to" in control.reason
    ] == [f"{kept.offset} offsets of {TRAJECTORIES}[0] below {kept.offset} lost to retention"]
    trained = [name for name, decision, _ in rig.told() if decision == "trained"]
    assert trained == [retry.group_id, "sim/p000001/e0/a0"]
    assert "range_lost" in {record.message for record in caplog.records}
