"""Public failure cases about checkpoints, through the services that write and read them: C99, C101."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import CheckpointError, CheckpointInvalid
from schemas.policy_events import LoadFailed
from tests.cases.trainer_rig import TrainerRig
from tests.fakes.memory_log import Crash
from tests.fakes.tiny_policy import TinyLearner
from tests.sim.faults import FaultyWorld
from tests.sim.invariants import check
from tests.sim.stamps import check_stamps
from tests.sim.world import Plan


def tamper(file: Path, text: str) -> None:
    file.parent.chmod(0o755)
    file.chmod(0o644)
    file.write_text(text)


def test_c99_a_trainer_killed_half_way_through_a_save_leaves_the_version_before_as_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C99: killed at half of writing version 2; the successor goes on from version 1, and so does everybody else."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=1, versions=3).begin()
    rig.answer(0)
    rig.step()
    rig.go_live(1)
    save = TinyLearner.begin_save

    def half(self: TinyLearner, directory: Path, **options: Any) -> None:
        (directory / "model.safetensors").write_text("half of the wei")
        raise Crash("power cut")

    monkeypatch.setattr(TinyLearner, "begin_save", half)
    rig.answer(1)
    with pytest.raises(Crash):
        rig.step(8)
    monkeypatch.setattr(TinyLearner, "begin_save", save)
    complete = list(rig.world.store().attempts())
    newest = rig.fold().newest
    rig.restart()
    rig.step(4)

    assert newest == 1
    assert len(complete) == 2
    assert [step.version_out for step in rig.steps()] == [1, 2]
    lags = [d.policy_lag for d in rig.decisions() if d.policy_lag is not None]
    assert lags == [0] * 4 + [1] * 4
    published = rig.fold().versions[2].event
    assert published.manifest_uri.split("/")[-2] not in complete


def test_c99_a_run_whose_trainer_dies_in_many_saves_ends_right(tmp_path: Path) -> None:
    """C99 in the whole pipeline: every other save dies half way, in the weights or in the probe, while generators load
    what is published."""
    world = FaultyWorld(Plan(seed=3, versions=4), tmp_path, [], lost_acks=0.0)
    saves = 0
    save = TinyLearner.begin_save

    def dying(self: TinyLearner, directory: Path, **options: Any) -> Callable[[], None]:
        nonlocal saves
        saves += 1
        finish = save(self, directory, **options)
        if saves % 4 == 1:
            (directory / "model.safetensors").write_text("half")
            raise Crash("planted")

        def finish_half() -> None:
            (directory / "probe.arrow").write_text("half")
            raise Crash("planted")

        return finish_half if saves % 4 == 3 else finish

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TinyLearner, "begin_save", dying)
        world.run()

    assert (check(world) or check_stamps(world)) == []
    assert world.process("trainer").restarts >= 4


@pytest.mark.parametrize("what", ["weights", "manifest"])
def test_c101_a_trainer_whose_checkpoint_does_not_match_stops_and_never_starts_afresh(
    tmp_path: Path, what: str
) -> None:
    """C101: weights and manifest of version 1 do not belong together; the restart says so and changes nothing."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=1, versions=3).begin()
    rig.answer(0)
    rig.step()
    place = tmp_path / Path(rig.fold().versions[1].event.manifest_uri).parent
    if what == "weights":
        tamper(place / "model.safetensors", "f" * 64)
    else:
        other = tmp_path / Path(rig.fold().versions[0].event.manifest_uri)
        tamper(place / "manifest.json", other.read_text())
    controls = len(rig.controls())
    rig.log.crash("trainer")
    rig.trainer = rig.build()
    found: list[Any] = [rig.error() for _ in range(3)]

    errors = [error for error in found if error is not None]
    assert isinstance(errors[0], CheckpointInvalid)
    assert "sha256" in str(errors[0])
    assert len(rig.controls()) == controls
    assert rig.fold().segment == 0


def test_c101_workers_refuse_weights_that_do_not_match_and_keep_the_version_they_hold(tmp_path: Path) -> None:
    """C101 on the other side: the files of version 1 are replaced before anybody has loaded it."""
    world = FaultyWorld(
        Plan(seed=5, versions=2, generators=1, limit_s=30.0, max_lag=3, run_ahead=0), tmp_path, [], lost_acks=0.0
    )
    seen: list[LoadFailed] = []
    damaged = False
    drive = world._drive

    def watching(process: Any, now_s: float) -> None:
        nonlocal damaged
        drive(process, now_s)
        trainer = world.process("trainer").service
        fold = getattr(getattr(trainer, "follower", None), "fold", None)
        if fold is not None and fold.newest == 1 and not damaged:
            damaged = True
            place = tmp_path / Path(fold.versions[1].event.manifest_uri).parent
            tamper(place / "model.safetensors", "f" * 64)

    world._drive = watching  # type: ignore[method-assign]
    try:
        world.run()
    except CheckpointError as error:  # pragma: no cover - no service may let it through
        pytest.fail(str(error))
    reader = world.log.client("check").reader({"sim.policy": 1}, "beginning")
    from schemas.policy_events import decode_policy_event

    events = [decode_policy_event(record.value) for record in reader.poll(10_000)]
    seen = [event for event in events if isinstance(event, LoadFailed)]
    activated = [event.version for event in events if event.type == "VersionActivated"]

    assert damaged
    assert seen
    assert seen[0].version == 1
    assert "sha256" in seen[0].reason
    assert not seen[0].weights_touched
    assert 1 not in activated
