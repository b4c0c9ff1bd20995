"""Where a training step's time goes: what was waited for is told apart from what was worked."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.trainer.batch import TrainBatch
from tests.cases.trainer_rig import TrainerRig


def test_the_time_between_calls_that_found_nothing_and_the_next_is_waiting(tmp_path: Path) -> None:
    rig = TrainerRig(tmp_path).begin()
    rig.clock.advance(3.0)
    rig.step(1)
    rig.clock.advance(1.0)
    rig.answer(0, 1)
    rig.step()

    phases = rig.steps()[0].phase_s
    assert phases["waiting"] == pytest.approx(4.0)
    assert phases["waiting"] <= phases["whole"]
    assert rig.steps()[0].metrics["trainer/idle_fraction"] == pytest.approx(phases["waiting"] / phases["whole"])


def test_what_a_step_computes_is_no_waiting_and_each_step_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = TrainerRig(tmp_path).begin()
    train = rig.trainer._p.learner.train

    def slow(batch: TrainBatch) -> object:
        rig.clock.advance(5.0)
        return train(batch)

    monkeypatch.setattr(rig.trainer._p.learner, "train", slow)
    rig.clock.advance(2.0)
    rig.answer(0, 1)
    rig.step()
    rig.go_live(1)
    rig.answer(2, 3, version=1)
    rig.step()

    first, second = [step.phase_s for step in rig.steps()]
    assert (first["waiting"], first["train"]) == (pytest.approx(2.0), pytest.approx(5.0))
    assert (second["waiting"], second["train"]) == (pytest.approx(0.0), pytest.approx(5.0))
