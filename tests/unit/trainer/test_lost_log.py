"""A log that is empty although the store holds the run: the trainer begins nothing, and no checkpoint is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consumers.garbage import kept_uris
from schemas.errors import CheckpointInvalid, DriftlogError, EnvironmentMissing
from schemas.topics import TopicName
from tests.cases.trainer_rig import TrainerRig
from tests.fakes.memory_log import Crash
from tests.sim.world import World

MUCH_LATER_US = 4_000_000_000_000_000


def rig_on(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> TrainerRig:
    """A trainer with an empty log on that store. Attempt ids of each are its own, as uuids are."""
    numbers = iter(range(1000))
    monkeypatch.setattr(World, "new_id", lambda self: f"{name}{next(numbers):03d}")
    return TrainerRig(directory, groups_per_step=1, run_ahead=1, versions=3)


def trained(directory: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerRig:
    """A run with versions 0, 1 and 2."""
    rig = rig_on(directory, "old", monkeypatch).begin()
    for position in (0, 1):
        rig.answer(position)
        rig.step(8)
    assert [step.version_out for step in rig.steps()] == [1, 2]
    return rig


def first_error(rig: TrainerRig) -> DriftlogError | None:
    """Of as many steps as a beginning takes."""
    return next((error for error in (rig.error() for _ in range(6)) if error is not None), None)


def test_a_run_whose_log_is_lost_is_not_begun_over_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = trained(tmp_path, monkeypatch)
    newest = old.fold().versions[2].event.manifest_uri.split("/")[1]
    before = list(old.world.store().attempts())
    rig = rig_on(tmp_path, "new", monkeypatch)
    error = first_error(rig)

    assert isinstance(error, EnvironmentMissing)
    place = tmp_path / "sim" / newest
    assert "the log has no record of run 'sim'" in str(error)
    assert f"trained versions of it: 2, the furthest (optimizer step 2) in {place}." in str(error)
    assert f"--run NAME --set model.init={place}" in str(error)
    assert list(rig.world.store().attempts()) == before
    assert [rig.records(name) for name in (TopicName.POLICY, TopicName.LEDGER, TopicName.PROMPTS)] == [[], [], []]


def test_without_the_guard_a_garbage_round_takes_the_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(trained(tmp_path, monkeypatch).world.store().attempts())
    monkeypatch.setattr("consumers.trainer.publication.Publication.require_untrained", lambda self: None)
    rig = rig_on(tmp_path, "new", monkeypatch)
    rig.step(4)
    removed = rig.world.store().collect_garbage(kept_uris(rig.fold()), grace_s=3600.0, now_us=MUCH_LATER_US, at_most=9)

    assert list(removed) == before


def test_a_first_attempt_that_died_before_its_commit_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rig_on(tmp_path, "first", monkeypatch)

    def dies(*_: object, **__: Any) -> None:
        raise Crash("after the save, before the transaction")

    monkeypatch.setattr(first.trainer._transactor, "begin", dies)
    with pytest.raises(Crash):
        first.step(4)
    left = list(first.world.store().attempts())
    first.log.crash("trainer")
    first.trainer = first.build()
    first.begin()

    assert len(left) == 1
    assert list(first.fold().versions) == [0]


@pytest.mark.parametrize("again", [1, 3])
def test_a_run_that_is_in_the_log_is_resumed_however_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    rig = trained(tmp_path, monkeypatch)
    for _ in range(again):
        rig.restart()
    rig.answer(2)
    rig.step(12)

    assert [step.version_out for step in rig.steps()] == [1, 2, 3]


def test_a_version_0_that_nothing_was_trained_from_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig_on(tmp_path, "old", monkeypatch).begin()
    rig = rig_on(tmp_path, "new", monkeypatch).begin()

    assert list(rig.fold().versions) == [0]


def test_a_manifest_that_cannot_be_read_is_a_stop_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = trained(tmp_path, monkeypatch)
    place = tmp_path / Path(old.fold().versions[2].event.manifest_uri)
    place.chmod(0o644)
    place.write_text("{}")
    error = first_error(rig_on(tmp_path, "new", monkeypatch))

    assert isinstance(error, CheckpointInvalid)
    assert str(place.parent) in str(error)
