"""The door to transformers: what is written loads elsewhere, what is wrong is refused before it does harm."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.countdown import problems
from infra.model import (
    Policy,
    apply_weights,
    check_static_files,
    dtype_groups,
    library_versions,
    load_policy,
    load_weights_in_place,
    read_weights,
    save_weights,
    tied_groups,
    tokenizer_digest,
    transformers_module,
    unique_tensors,
)
from infra.model_presets import PRESETS, build_policy, supervise, warm_start
from schemas.errors import CheckpointInvalid, ConfigError, EnvironmentMissing
from tests.fakes.policy_rows import PRESET, moved_directory, tiny_directory


def fingerprint(policy: Policy) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in unique_tensors(policy.model).values()]


def test_a_saved_policy_loads_with_plain_transformers_and_computes_the_same(tmp_path: Path) -> None:
    policy = load_policy(tiny_directory())
    save_weights(policy, tmp_path)
    transformers = transformers_module()

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    tokens = torch.tensor([tokenizer("1,2,3,4=24:")["input_ids"]])
    assert tokens[0].tolist() == policy.encode("1,2,3,4=24:")
    assert tokenizer.decode(tokens[0]) == "1,2,3,4=24:"
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, policy.model(tokens).logits)


def test_the_tiny_model_is_tiny_and_tied() -> None:
    policy = build_policy(PRESET, 0)

    assert 100_000 <= sum(tensor.numel() for tensor in unique_tensors(policy.model).values()) <= 130_000
    assert tied_groups(policy.model) == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert dtype_groups(policy.model) == {"model": "float32"}


def test_a_foreign_character_is_an_error_and_not_another_token() -> None:
    with pytest.raises(Exception, match="(?i)unk|vocabulary"):
        load_policy(tiny_directory()).encode("1?2")


def test_end_tokens_are_left_out_of_texts() -> None:
    policy = load_policy(tiny_directory())

    assert policy.decode_all([[*policy.encode("1+2"), policy.eos_token_id], [policy.eos_token_id]]) == ["1+2", ""]


def test_warm_start_is_bit_equal_for_one_seed_and_not_for_another(tmp_path: Path) -> None:
    for name in ("a", "b"):
        warm_start(PRESET, 5, tmp_path / name)

    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(files)
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    assert fingerprint(build_policy(PRESET, 5)) != fingerprint(build_policy(PRESET, 6))


def test_building_a_policy_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)

    build_policy(PRESET, 0)

    assert torch.equal(expected, torch.rand(1))


def test_the_warm_start_learns_and_never_sees_a_held_out_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build_policy(PRESET, 0)
    seen: set[str] = set()
    real = Policy.encode
    monkeypatch.setattr(Policy, "encode", lambda self, text: (seen.add(text), real(self, text))[1])

    losses = supervise(policy, replace(PRESETS[PRESET], warm_steps=20), 0)

    assert losses[-1] < 0.6 * losses[0]
    assert seen.isdisjoint(problem.prompt for problem in problems() if problem.held_out)
    assert {problem.prompt for problem in problems() if not problem.held_out} <= seen


def test_loading_in_place_moves_every_tensor_and_the_tied_head(tmp_path: Path) -> None:
    new = moved_directory(tmp_path / "new", seed=1)
    policy, expected = load_policy(tiny_directory()), load_policy(new)
    addresses = [tensor.data_ptr() for tensor in unique_tensors(policy.model).values()]

    load_weights_in_place(policy.model, new)

    assert fingerprint(expected) == fingerprint(policy)
    assert addresses == [tensor.data_ptr() for tensor in unique_tensors(policy.model).values()]
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(expected.model(tokens).logits, policy.model(tokens).logits)


def rewrite(directory: Path, change: object) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    change(tensors)  # type: ignore[operator]
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not part"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(2)}), r"model.norm.weight has shape \[2\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}), "int64"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(20, 64)}), "tied to model.embed_tokens.weight and differs"),
    ],
)
def test_a_wrong_weight_file_is_refused_by_tensor_and_nothing_moves(tmp_path: Path, change: object, words: str) -> None:
    new = moved_directory(tmp_path / "new", seed=1)
    policy = load_policy(tiny_directory())
    before = fingerprint(policy)
    rewrite(new, change)

    with pytest.raises(CheckpointInvalid, match=words):
        load_weights_in_place(policy.model, new)

    assert before == fingerprint(policy)


def test_a_tied_tensor_written_twice_is_accepted_when_both_are_the_same(tmp_path: Path) -> None:
    new = moved_directory(tmp_path / "new", seed=1)
    rewrite(new, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))

    tensors = read_weights(load_policy(tiny_directory()).model, new)

    assert "lm_head.weight" not in tensors


def shard(directory: Path, names: dict[str, str] | None = None) -> None:
    tensors = list(load_file(directory / "model.safetensors").items())
    half = len(tensors) // 2
    parts = {"model-1.safetensors": dict(tensors[:half]), "model-2.safetensors": dict(tensors[half:])}
    for file, part in parts.items():
        save_file(part, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**weight_map, **(names or {})}}))


def test_weights_in_several_files_load(tmp_path: Path) -> None:
    new = moved_directory(tmp_path / "new", seed=1)
    whole = fingerprint(load_policy(new))
    shard(new)
    policy = load_policy(tiny_directory())

    load_weights_in_place(policy.model, new)

    assert whole == fingerprint(policy)


def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    new = moved_directory(tmp_path / "new", seed=1)
    shard(new, {"x": "../tiny.safetensors"})

    with pytest.raises(CheckpointInvalid, match="not a file of that directory"):
        read_weights(load_policy(tiny_directory()).model, new)

    (new / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointInvalid, match="weight_map"):
        read_weights(load_policy(tiny_directory()).model, new)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_without_a_needed_file_is_refused_by_that_name(tmp_path: Path, name: str) -> None:
    shutil.copytree(tiny_directory(), tmp_path / "model")
    (tmp_path / "model" / name).unlink()

    with pytest.raises(EnvironmentMissing, match=name.replace(".", r"\.")):
        load_policy(tmp_path / "model")


def test_a_model_directory_with_wrong_content_is_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny_directory(), tmp_path / "model")
    rewrite(tmp_path / "model", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"missing keys: model\.norm\.weight"):
        load_policy(tmp_path / "model")

    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(tmp_path / "model")
    with pytest.raises(ConfigError, match="dtype"):
        load_policy(tiny_directory(), dtype="int8")
    with pytest.raises(ConfigError, match="no preset"):
        build_policy("gigantic", 0)


def test_files_of_another_model_or_tokenizer_are_noticed(tmp_path: Path) -> None:
    policy = load_policy(tiny_directory())
    shutil.copytree(tiny_directory(), tmp_path / "model")
    check_static_files(policy, tmp_path / "model")

    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointInvalid, match="differs"):
        check_static_files(policy, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"no tokenizer\.json"):
        check_static_files(policy, tmp_path / "model")


def test_the_tokenizer_digest_covers_the_chat_template_and_not_the_config() -> None:
    files = {"tokenizer.json": b"{}", "config.json": b"1"}

    assert tokenizer_digest(files) == tokenizer_digest({**files, "config.json": b"2"})
    assert tokenizer_digest(files) != tokenizer_digest({**files, "chat_template.jinja": b"{{ x }}"})


def test_weights_are_cast_to_the_served_precision() -> None:
    policy = load_policy(tiny_directory(), dtype="bfloat16")

    apply_weights(policy.model, read_weights(policy.model, tiny_directory()))

    assert dtype_groups(policy.model) == {"model": "bfloat16"}
    assert {"torch", "transformers"} <= set(library_versions())
