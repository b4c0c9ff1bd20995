"""Model directories for measurements: LLaMAs of a wanted size with random weights over the demo's few characters.

Nearly all bytes are layers. `two_seconds` is the one whose training step takes about that long on one core.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from infra.model import attention_for, make_policy, save_weights, transformers_module
from infra.model_presets import build_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int


SHAPES = {
    "small": Shape(hidden=96, intermediate=256, layers=2, heads=4),
    "two_seconds": Shape(hidden=192, intermediate=512, layers=4, heads=4),
    "large": Shape(hidden=1024, intermediate=2816, layers=10, heads=16),
}


def make_model(shape: Shape, directory: Path) -> None:
    """A model directory with random weights and the demo's tokenizer."""
    donor = build_policy("countdown-tiny", 0)
    transformers = transformers_module()
    config = transformers.LlamaConfig(
        vocab_size=len(donor.tokenizer), hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=donor.tokenizer.eos_token_id,
        pad_token_id=donor.tokenizer.pad_token_id, bos_token_id=None, architectures=["LlamaForCausalLM"],
        dtype="float32",
    )  # fmt: skip
    config._attn_implementation = attention_for(config)
    torch.manual_seed(0)
    files = {**donor.static_files, "config.json": config.to_json_string(use_diff=True).encode()}
    directory.mkdir()
    save_weights(make_policy(transformers.LlamaForCausalLM(config), donor.tokenizer, files), directory)
