"""A real engine that holds anything but the published weights never acks, however close the versions are.

Versions come from a real training step, ten tolerances apart at least; probes are the trainer's own choice.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from producers.engines import hf
from schemas.policy_events import LoadFailed, VersionLoaded
from tests.unit.generator.real_switch import RUN, TOLERANCE, CachingEngine, RealRig, rows_of_probe

NEAR, NEAR_HEADS, FAR = 2e-7, 2e-5, 1e-3
"""learning rates: versions 15 tolerances apart; versions whose output layers alone make 12; those of the demo"""
near_and_far = pytest.mark.parametrize("learning_rate", [NEAR, FAR], ids=["near", "far"])


def refused(answer: object, words: str) -> None:
    assert isinstance(answer, LoadFailed), answer
    assert words in answer.reason
    assert answer.weights_touched


@near_and_far
def test_the_right_weights_are_acked_and_the_versions_are_ten_tolerances_apart(learning_rate: float) -> None:
    rig = RealRig(learning_rate)

    answer = rig.switch()

    assert isinstance(answer, VersionLoaded)
    assert answer.probe_diff_new <= TOLERANCE / 10
    assert answer.probe_diff_old == pytest.approx(rig.distance(), rel=1e-3)
    assert answer.probe_diff_old >= 10 * TOLERANCE
    assert (learning_rate == NEAR) == (answer.probe_diff_old <= 100 * TOLERANCE)
    assert answer.probe_diff_generated is None
    assert not answer.weak
    assert rig.keeper.held == 1


@near_and_far
def test_a_file_that_was_swapped_after_it_was_verified_is_not_acked(learning_rate: float, tmp_path: Path) -> None:
    """C08: the bytes are those of version 0, the probe is that of version 1."""
    rig = RealRig(learning_rate)

    def swap(directory: Path) -> Path:
        copy = Path(shutil.copytree(directory, tmp_path / "swapped", copy_function=shutil.copy))
        copy.chmod(0o755)
        (copy / "model.safetensors").unlink()
        shutil.copy(rig.root / RUN / "a0" / "model.safetensors", copy / "model.safetensors")
        return copy

    rig.after_fetch = swap

    refused(rig.switch(), "probe differs by")
    assert rig.keeper.held is None


@near_and_far
@pytest.mark.parametrize("half", [0, 1])
def test_half_of_the_tensors_is_not_acked(learning_rate: float, half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C08: every other tensor is copied, and the load says that it went well."""
    rig = RealRig(learning_rate)
    real = hf.apply_weights

    def apply_half(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        real(model, {name: tensors[name] for name in sorted(tensors)[half::2]})

    monkeypatch.setattr(hf, "apply_weights", apply_half)

    refused(rig.switch(), "probe differs by")
    assert rig.keeper.held is None


@pytest.mark.parametrize("learning_rate", [NEAR_HEADS, FAR], ids=["near", "far"])
def test_an_old_cached_head_is_not_acked(learning_rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """C08: the output layer is tied to the embedding and has no tensor of its own; a packed copy of it stays old."""
    rig = RealRig(learning_rate)
    real = hf.apply_weights

    def keep_the_head(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        real(model, tensors)
        model.lm_head.weight = old_head

    assert rig.engine._policy is not None
    model = rig.engine._policy.model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    old_head = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    monkeypatch.setattr(hf, "apply_weights", keep_the_head)

    refused(rig.switch(), "probe differs by")
    assert rig.keeper.held is None


@near_and_far
def test_keys_that_outlive_a_load_are_caught_by_the_second_probe_and_by_that_alone(learning_rate: float) -> None:
    """C06: every given token is scored right; what is generated behind a cached prefix is not."""
    engine = CachingEngine(empties_cache=False)
    rig = RealRig(learning_rate, engine)

    answer = rig.switch()

    refused(answer, "generated tokens come from old cached keys")
    assert engine.hits > 0
    assert rig.keeper.held is None
    fresh = RealRig(learning_rate)
    fresh.switch()
    probe = rows_of_probe(rig.root, 1)
    scores, again = (e.score(probe, [1] * len(probe)) for e in (engine, fresh.engine))
    assert max(float(np.abs(a - b).max()) for a, b in zip(scores, again, strict=True)) == 0.0


@near_and_far
def test_an_engine_that_empties_its_cache_is_acked_with_both_differences(learning_rate: float) -> None:
    """C06: the same engine with a cache that a load empties."""
    answer = RealRig(learning_rate, CachingEngine(empties_cache=True)).switch()

    assert isinstance(answer, VersionLoaded)
    assert answer.probe_diff_generated is not None
    assert answer.probe_diff_generated <= TOLERANCE / 10


@near_and_far
def test_the_second_probe_can_be_forced_on_an_engine_without_a_prefix_cache(learning_rate: float) -> None:
    answer = RealRig(learning_rate, always=True).switch()

    assert isinstance(answer, VersionLoaded)
    assert answer.probe_diff_generated is not None
    assert answer.probe_diff_generated <= TOLERANCE / 10
