"""Adapters in the learner: what is trained, what is published, and that a restore goes on bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from consumers.trainer.learner_lora import lora_layers
from consumers.trainer.learner_settings import LearnerSettings, LoraSettings
from infra.model import load_policy, unique_tensors
from infra.model_adapter import load_served, serving_tensors
from producers.engines.hf import HfEngine, HfEngineSettings
from schemas.checkpoint import Manifest
from schemas.errors import CheckpointInvalid, ConfigError
from schemas.probe_codec import decode_probe
from tests.fakes.lora_learners import fresh_lora_learner, lora_learner, lora_settings
from tests.fakes.policy_learners import made_batch, saved
from tests.fakes.policy_rows import moved_directory, tiny_directory
from tests.fakes.virtual_clock import VirtualClock

both_forms = pytest.mark.parametrize("publish", ["merged", "adapter"])


def served(directory: Path) -> dict[str, torch.Tensor]:
    """The whole weights of a published directory, for a worker that has the base."""
    return serving_tensors(load_policy(tiny_directory()).model, directory, tiny_directory())


# ---------------------------------------------------------------- training


@both_forms
def test_version_zero_serves_the_base_exactly(publish: str, tmp_path: Path) -> None:
    saved(lora_learner(publish), tmp_path / "zero")

    base = unique_tensors(load_policy(tiny_directory()).model)
    found = served(tmp_path / "zero")
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in base.items())


def test_only_adapters_have_a_gradient_and_optimizer_state(tmp_path: Path) -> None:
    made = lora_learner()
    model = made._loaded().policy.model
    base = {name: tensor.detach().clone() for name, tensor in unique_tensors(model).items() if "lora_" not in name}

    made.train(made_batch())
    files = saved(made, tmp_path / "one")

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.{part}" for name in lora_layers(model) for part in ("lora_A", "lora_B")}
    assert len(lora_layers(model)) == 14  # 7 linear layers in each of 2 blocks; not the output layer
    moments = load_file(tmp_path / "one" / "optimizer.safetensors")
    assert {key.rpartition(".")[0] for key in moments} == trained
    assert all(torch.equal(unique_tensors(model)[name], tensor) for name, tensor in base.items())
    assert "lora.safetensors" in files


def test_both_forms_of_a_version_serve_the_same_bits(tmp_path: Path) -> None:
    for publish in ("merged", "adapter"):
        made = lora_learner(publish)
        made.train(made_batch())
        saved(made, tmp_path / publish)

    merged, adapter = served(tmp_path / "merged"), served(tmp_path / "adapter")

    assert all(torch.equal(merged[name], tensor) for name, tensor in adapter.items())
    base = unique_tensors(load_policy(tiny_directory()).model)
    moved = {name for name, tensor in adapter.items() if not torch.equal(tensor, base[name])}
    assert len(moved) == 14
    assert "model.safetensors" not in {path.name for path in (tmp_path / "adapter").iterdir()}


def test_the_forward_pass_of_the_trainer_is_that_of_the_served_weights_bit_for_bit(tmp_path: Path) -> None:
    made = lora_learner("adapter")
    made.train(made_batch())
    saved(made, tmp_path / "one")

    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        trained = made._loaded().policy.model(input_ids=tokens).logits
        published = load_served(tmp_path / "one", tiny_directory()).model(input_ids=tokens).logits
    assert torch.equal(trained, published)


def test_the_forward_pass_in_bfloat16_is_that_of_the_served_weights_too(tmp_path: Path) -> None:
    made = lora_learner("adapter", dtype="bfloat16")
    made.train(made_batch())
    saved(made, tmp_path / "one")

    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    model, whole = made._loaded().policy.model, load_served(tmp_path / "one", tiny_directory()).model
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(input_ids=tokens).logits, whole(input_ids=tokens).logits)


def test_the_first_values_follow_from_seed_and_name_and_leave_the_generator_untouched(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    values = []
    for place, seed in enumerate((0, 0, 1)):
        torch.manual_seed(99)  # what the learner does at its start with its own seed changes nothing
        made = lora_learner("adapter", seed=seed)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(state, torch.get_rng_state())
        values.append(saved(made, tmp_path / str(place))["adapter_model.safetensors"])
    torch.set_rng_state(before)

    assert values[0] == values[1] != values[2]
    tensors = load_file(tmp_path / "0" / "adapter_model.safetensors")
    a = [tensor for name, tensor in tensors.items() if ".lora_A." in name]
    assert all(float(tensor.abs().max()) <= tensor.shape[1] ** -0.5 for tensor in a)
    assert len({tensor.numpy().tobytes() for tensor in a}) == len(a)
    assert all(not tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


def test_a_refreshed_reference_is_the_merged_policy() -> None:
    made = lora_learner(reference_directory=tiny_directory(), reference_version=0, reference_refresh_every=1)

    made.train(made_batch())

    reference = made._reference
    assert reference is not None
    policy = made._loaded().whole_tensors()
    assert all(torch.equal(policy[name], tensor) for name, tensor in reference.whole_tensors().items())


def test_gradient_checkpointing_gives_the_same_bits(tmp_path: Path) -> None:
    files = []
    for name, on in (("without", False), ("with", True)):
        made = lora_learner("adapter", gradient_checkpointing=on)
        made.train(made_batch())
        files.append(saved(made, tmp_path / name)["adapter_model.safetensors"])

    assert files[0] == files[1]


# ---------------------------------------------------------------- restoring


@both_forms
def test_three_steps_a_stop_and_three_more_are_six_in_one_go(publish: str, tmp_path: Path) -> None:
    batches = [made_batch(seed=seed) for seed in range(6)]
    straight, first = lora_learner(publish), lora_learner(publish)
    for batch in batches:
        expected = straight.train(batch)
    for batch in batches[:3]:
        first.train(batch)
    saved(first, tmp_path / "middle")
    second = fresh_lora_learner(publish)
    second.restore(tmp_path / "middle", with_state=True)
    for batch in batches[3:]:
        outcome = second.train(batch)

    assert dict(expected.metrics) == dict(outcome.metrics)
    assert expected.rng_digest == outcome.rng_digest
    assert saved(straight, tmp_path / "straight") == saved(second, tmp_path / "again")


@both_forms
def test_a_restore_in_place_forgets_what_was_trained_since(publish: str, tmp_path: Path) -> None:
    made = lora_learner(publish)
    made.train(made_batch(seed=1))
    at_one = saved(made, tmp_path / "one")
    made.train(made_batch(seed=2))

    made.restore(tmp_path / "one", with_state=True)

    again = saved(made, tmp_path / "again")
    at_one.pop("probe.arrow"), again.pop("probe.arrow")
    assert at_one == again


@both_forms
def test_a_copy_is_what_a_save_would_have_written_whatever_is_trained_since(publish: str, tmp_path: Path) -> None:
    made = lora_learner(publish)
    made.train(made_batch())
    expected = saved(made, tmp_path / "at_once")
    copy = made.copy()
    made.train(made_batch(seed=8))
    tmp_path.joinpath("later").mkdir()
    copy.save(tmp_path / "later")

    assert {path.name: path.read_bytes() for path in sorted((tmp_path / "later").iterdir())} == expected


def test_merged_weights_alone_cannot_be_trained_on(tmp_path: Path) -> None:
    made = lora_learner()
    made.train(made_batch())
    (tmp_path / "one").mkdir()
    made.save(tmp_path / "one", with_state=False)

    with pytest.raises(CheckpointInvalid, match="merged weights without lora.safetensors"):
        lora_learner(directory=tmp_path / "one")


def test_an_adapter_on_another_base_is_not_trained_on(tmp_path: Path) -> None:
    saved(lora_learner("adapter"), tmp_path / "zero")
    other = moved_directory(tmp_path / "other", seed=3)

    with pytest.raises(CheckpointInvalid, match="the trainer's base .* is .*put the base model"):
        lora_learner("adapter", lora={"base_directory": other}, directory=tmp_path / "zero")


@both_forms
@pytest.mark.parametrize(
    ("change", "words"),
    [({"rank": 2}, "rank 4|configured adapters"), ({"target_modules": ("q_proj",)}, "14 modules|configured adapters")],
)
def test_adapters_of_another_shape_are_refused(
    publish: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved(lora_learner(publish), tmp_path / "zero")
    made = fresh_lora_learner(publish, lora=change)

    with pytest.raises(CheckpointInvalid, match=words):
        made.restore(tmp_path / "zero", with_state=True)


@both_forms
def test_another_alpha_or_base_is_refused(publish: str, tmp_path: Path) -> None:
    saved(lora_learner(publish), tmp_path / "zero")
    other = moved_directory(tmp_path / "other", seed=3)

    for change in ({"alpha": 16.0}, {"base_directory": other}):
        made = fresh_lora_learner(publish, lora=change)
        with pytest.raises(CheckpointInvalid, match=r"cannot change within a run|put the base model of the run"):
            made.restore(tmp_path / "zero", with_state=True)


# ---------------------------------------------------------------- settings and records


def test_targets_are_chosen_by_the_last_part_of_their_names() -> None:
    made = lora_learner(lora={"target_modules": ("q_proj", "down_proj")})

    names = sorted(lora_layers(made._loaded().policy.model))
    assert len(names) == 4
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "down_proj"}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "nowhere"])
def test_a_target_that_can_have_no_adapter_is_refused_with_the_names_that_can(target: str) -> None:
    with pytest.raises(ConfigError, match=f"named '{target}'.*it has .*q_proj"):
        lora_learner(lora={"target_modules": (target,)})


@both_forms
def test_the_manifest_names_the_adapter_and_its_base(publish: str) -> None:
    made = lora_learner(publish)
    manifest = Manifest(
        run="t", attempt_id="a", parent=0, has_state=True, code_revision="r", config_digest="c",
        **made.manifest_fields(),
    )  # fmt: skip

    assert manifest.lora is not None
    assert (manifest.lora.rank, manifest.lora.alpha, manifest.lora.publish) == (4, 8.0, publish)
    assert manifest.lora.modules == 14
    assert len(manifest.lora.base_sha256) == 64
    assert json.loads(manifest.encode())["lora"]["publish"] == publish


@pytest.mark.parametrize(("name", "value"), [("rank", 0), ("alpha", 0.0), ("publish", "both")])
def test_settings_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"lora.{name} = "):
        lora_settings(**{name: value})


def test_shards_are_refused() -> None:
    lora = LoraSettings(rank=1, alpha=1.0, base_directory=tiny_directory())
    with pytest.raises(ConfigError, match="adapters are not sharded"):
        LearnerSettings(lora=lora, parallel="fsdp")


# ---------------------------------------------------------------- damaged directories


def _without(directory: Path, name: str) -> None:
    (directory / name).unlink()


def _changed(directory: Path, key: str, value: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def _tensors(directory: Path, change: Any) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    first = sorted(tensors)[0]
    change(tensors, first)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: _without(d, "base.json"), "base.json cannot be read"),
        (lambda d: _without(d, "adapter_config.json"), "adapter_config.json cannot be read"),
        (lambda d: _without(d, "adapter_model.safetensors"), "not a complete safetensors file"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"half"), "not a complete safetensors file"),
        (lambda d: _changed(d, "use_dora", True), "use_dora"),
        (lambda d: _changed(d, "modules_to_save", ["lm_head"]), "modules_to_save"),
        (lambda d: _changed(d, "r", 3), "does not have rank 3"),
        (lambda d: _tensors(d, lambda t, first: t.pop(first)), "is missing"),
        (lambda d: _tensors(d, lambda t, first: t.update(more=t[first].clone())), "belongs to no module"),
        (lambda d: _tensors(d, lambda t, first: t.update({first: t[first].half()})), "not float32"),
        (lambda d: _tensors(d, lambda t, first: t.update({first: t[first][:, :-1].contiguous()})), "its weight"),
        (lambda d: shutil.copy(tiny_directory() / "model.safetensors", d), "holds both"),
        (lambda d: (d / "config.json").write_text("{}"), "differs from that of the loaded model"),
    ],
)
def test_a_damaged_adapter_is_refused_with_file_and_fault(damage: Any, words: str, tmp_path: Path) -> None:
    saved(lora_learner("adapter"), tmp_path / "zero")
    damage(tmp_path / "zero")

    with pytest.raises(CheckpointInvalid, match=words):
        load_served(tmp_path / "zero", tiny_directory())


def test_the_probe_of_an_adapter_is_reproduced_by_whoever_has_the_base(tmp_path: Path) -> None:
    made = lora_learner("adapter")
    made.train(made_batch())
    files = saved(made, tmp_path / "one")
    settings = HfEngineSettings(batching="group", threads=1, base_directory=tiny_directory())
    engine = HfEngine(settings, VirtualClock())
    engine.load(tmp_path / "one", 1)
    probe = decode_probe(files["probe.arrow"])
    scores = engine.score([s.token_ids.tolist() for s in probe], [s.prompt_length for s in probe])
    assert max(float(np.abs(a - s.logprobs).max()) for a, s in zip(scores, probe, strict=True)) <= 1e-4
