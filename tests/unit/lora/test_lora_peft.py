"""peft as an independent judge: it loads what is published, and merges and differentiates as is done here."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.model import load_policy, unique_tensors
from infra.model_adapter import load_served
from tests.fakes.lora_learners import lora_learner
from tests.fakes.policy_learners import made_batch, saved
from tests.fakes.policy_rows import tiny_directory

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version published as an adapter after two steps."""
    folder = tmp_path_factory.mktemp("lora")
    made = lora_learner("adapter")
    for seed in range(2):
        made.train(made_batch(seed=seed))
    saved(made, folder / "two")
    return folder / "two"


def peft_model(directory: Path) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    peft = importlib.import_module("peft")
    return peft.PeftModel.from_pretrained(load_policy(tiny_directory()).model, str(directory), is_trainable=True)


def test_peft_merges_what_is_published_into_the_bits_that_are_served(version: Path) -> None:
    theirs = unique_tensors(peft_model(version).merge_and_unload())
    ours = unique_tensors(load_served(version, tiny_directory()).model)

    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_peft_serves_a_published_adapter_with_the_same_answers_to_rounding(version: Path) -> None:
    with torch.no_grad():
        theirs = peft_model(version)(input_ids=TOKENS).logits.log_softmax(-1)
        ours = load_served(version, tiny_directory()).model(input_ids=TOKENS).logits.log_softmax(-1)
        base = load_policy(tiny_directory()).model(input_ids=TOKENS).logits.log_softmax(-1)

    assert float((theirs - ours).abs().max()) < 1e-4
    assert float((base - ours).abs().max()) > 1e-2


def test_the_gradient_through_merged_weights_is_the_one_of_two_thin_products(version: Path) -> None:
    made = lora_learner("adapter", directory=version)
    ours, theirs = made._loaded().policy.model, peft_model(version)
    for model in (ours, theirs):
        model(input_ids=TOKENS).logits.log_softmax(-1)[..., 3].sum().backward()

    found = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.requires_grad}
    expected = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


def test_merged_versions_load_as_any_model_does(tmp_path: Path) -> None:
    made = lora_learner("merged")
    made.train(made_batch())
    saved(made, tmp_path / "one")

    whole = made._loaded().whole_tensors()
    assert all(torch.equal(whole[n], t) for n, t in unique_tensors(load_policy(tmp_path / "one").model).items())
