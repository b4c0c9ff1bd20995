"""Tiny policies of a shape that vLLM's CPU build can run (its attention knows no head of 16), and their variants."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch

from infra.model import load_policy, make_policy, save_weights, transformers_module, unique_tensors
from infra.model_presets import PRESETS, supervise
from tests.fakes.policy_rows import PRESET, tiny_directory

POSITIONS = 256


@functools.cache
def served_directory(*, tied: bool = True) -> Path:
    """A saved policy with a few supervised steps (made once a process; never write into it)."""
    torch.set_num_threads(1)
    small = load_policy(tiny_directory())
    shape = json.loads(small.static_files["config.json"])
    shape |= {"head_dim": 32, "max_position_embeddings": POSITIONS, "tie_word_embeddings": tied}
    directory = Path(mkdtemp(prefix="served-policy-"))
    files = {**small.static_files, "config.json": json.dumps(shape, indent=2).encode()}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    transformers = transformers_module()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    policy = make_policy(model, small.tokenizer, files)
    supervise(policy, replace(PRESETS[PRESET], warm_steps=12), 0)
    save_weights(policy, directory)
    return directory


def moved_from(source: Path, target: Path, seed: int, scale: float = 0.05) -> Path:
    """The policy with noise on its weights: clearly another version."""
    policy = load_policy(source)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in unique_tensors(policy.model).values():
            tensor.add_(scale * torch.randn(tensor.shape, generator=noise))
    target.mkdir(exist_ok=True)
    save_weights(policy, target)
    return target
