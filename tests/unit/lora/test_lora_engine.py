"""Versions published as adapters in the engine and in a worker: with the base, without it, and with another."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from infra.model import load_policy, unique_tensors
from infra.model_adapter import load_served, serving_tensors
from producers.engines import hf
from producers.engines.hf import HfEngine, HfEngineSettings
from producers.generator import GeneratorService
from schemas.errors import CheckpointInvalid
from schemas.policy_events import LoadFailed, VersionLoaded, WorkerAdmitted
from tests.fakes.log_script import G1
from tests.fakes.lora_learners import lora_learner
from tests.fakes.policy_learners import made_batch, saved
from tests.fakes.policy_rows import generate, moved_directory, request_of, tiny_directory
from tests.fakes.virtual_clock import VirtualClock
from tests.unit.generator.generator_rig import GeneratorRig


@functools.cache
def versions() -> tuple[Path, Path]:
    """Versions 0 and 1 as adapters (made once a process; never write into them)."""
    root = Path(mkdtemp(prefix="lora-versions-"))
    made = lora_learner("adapter")
    saved(made, root / "a0")
    made.train(made_batch())
    saved(made, root / "a1")
    return root / "a0", root / "a1"


def engine(base: Path | None, **settings: Any) -> HfEngine:
    return HfEngine(HfEngineSettings(batching="mixed", threads=1, base_directory=base, **settings), VirtualClock())


def other_base(folder: Path) -> Path:
    return moved_directory(folder / "other-base", seed=5)


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("first", ["base", "adapter"])
def test_an_adapter_is_served_like_the_whole_model_it_stands_for(first: str, tmp_path: Path) -> None:
    zero, one = versions()
    whole = lora_learner("merged")
    whole.train(made_batch())
    saved(whole, tmp_path / "whole")
    made, plain = engine(tiny_directory()), engine(None)
    made.load(tiny_directory() if first == "base" else zero, 0)
    made.load(one, 1)
    plain.load(tmp_path / "whole", 1)
    answers = []
    for each in (made, plain):
        each.set_proof(1)
        answers.append(generate(each, [request_of(load_policy(tiny_directory()), "1,2=3:")]))

    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids.tobytes() == theirs.token_ids.tobytes()
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_in_half_precision_the_whole_weights_are_rounded_once() -> None:
    _, one = versions()
    made = engine(tiny_directory(), dtype="bfloat16")
    made.load(tiny_directory(), 0)
    made.load(one, 1)

    assert made._policy is not None
    whole = load_served(one, tiny_directory())
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in unique_tensors(whole.model).items()}
    assert all(torch.equal(expected[name], t) for name, t in unique_tensors(made._policy.model).items())


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("none", "this process has no base model:"),
        ("gone", "there is no directory"),
        ("other", r"this process has \w{12}"),
    ],
)
def test_a_missing_or_another_base_is_refused_before_anything_is_touched(base: str, words: str, tmp_path: Path) -> None:
    one = versions()[1]
    here = {"none": None, "gone": tmp_path / "gone", "other": other_base(tmp_path)}[base]
    made = engine(here)
    made.load(tiny_directory(), 0)

    with pytest.raises(CheckpointInvalid, match=f"is an adapter on base .*{words}.*put the base model of the run") as e:
        made.load(one, 1)

    assert not made.weights_touched()
    assert made._version == 0
    with pytest.raises(CheckpointInvalid) as again:
        engine(here).load(one, 1)
    assert str(again.value) == str(e.value)


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    model = load_policy(tiny_directory()).model
    del model.model.layers[1]

    with pytest.raises(CheckpointInvalid):
        serving_tensors(model, versions()[1], tiny_directory())


def test_a_load_that_dies_half_way_leaves_the_weights_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(tiny_directory())
    made.load(tiny_directory(), 0)

    def fails(model: Any, tensors: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(hf, "apply_weights", fails)
    with pytest.raises(MemoryError):
        made.load(versions()[1], 1)
    assert made.weights_touched()


# ---------------------------------------------------------------- a worker


class LoraShelf:
    """A store with the adapters of `versions`."""

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Any]:
        return versions()[int(manifest_uri.split("/")[1][1:])], None


class LoraRig(GeneratorRig):
    """Real engines on adapters: g0 has the base."""

    def __init__(self, root: Path) -> None:
        self.real = engine(tiny_directory())
        self.real.load(tiny_directory(), 0)
        super().__init__(root)

    def build(self, worker: str = "g0", *, engine: Any = None) -> GeneratorService:
        self.shelf = LoraShelf()  # type: ignore[assignment]
        return super().build(worker, engine=engine or self.real)


def step(rig: GeneratorRig, *services: GeneratorService, times: int = 20) -> None:
    for _ in range(times):
        for service in services:
            service.step()
        rig.clock.advance(0.1)


@pytest.mark.parametrize("base", ["none", "other"])
def test_a_late_joiner_without_the_base_fails_its_load_says_so_and_is_never_admitted(base: str, tmp_path: Path) -> None:
    rig = LoraRig(tmp_path).serving()
    rig.switch_to(1)
    joiner_engine = engine(None if base == "none" else other_base(tmp_path))
    joiner_engine.load(tiny_directory() if base == "none" else other_base(tmp_path), 0)
    joiner = rig.build("g1", engine=joiner_engine)

    step(rig, rig.service, joiner)
    rig.ask(*range(4))
    step(rig, rig.service, joiner)

    told = [event for _, event, void in rig.policy() if not void and getattr(event, "worker", "") == G1[0]]
    failures = [event for event in told if isinstance(event, LoadFailed)]
    assert failures
    assert all(f.version == 1 for f in failures)
    assert all("is an adapter on base" in f.reason and "put the base model of the run" in f.reason for f in failures)
    assert not [event for event in told if isinstance(event, VersionLoaded | WorkerAdmitted)]
    assert {row.worker_id for row in rig.rows()} == {"g0"}
    assert len(rig.groups()) == 4


def test_a_late_joiner_with_the_base_proves_the_live_version(tmp_path: Path) -> None:
    rig = LoraRig(tmp_path).serving()
    rig.switch_to(1)
    joiner_engine = engine(tiny_directory())
    joiner_engine.load(tiny_directory(), 0)
    joiner = rig.build("g1", engine=joiner_engine)

    step(rig, rig.service, joiner)

    [proof] = [e for _, e, v in rig.policy() if not v and isinstance(e, VersionLoaded) and e.worker == "g1"]
    assert proof.version == 1
    assert proof.probe_diff_new <= 1e-4
    assert np.isfinite(proof.probe_diff_new)
