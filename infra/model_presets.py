"""Built-in policies: the tiny model of the demo, its character tokenizer, and its warm start.

`build_policy` is random weights; `warm_start` adds a few supervised steps, so that reinforcement learning
has something to reinforce. Both are bit-equal for the same seed on the same machine type.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from infra.countdown import FOUR, PAIRS, SYMBOLS, problems, solutions
from infra.model import Policy, attention_for, make_policy, save_weights, transformers_module
from schemas.errors import ConfigError

EOS = "<eos>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Shape of a model and of its warm start."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    context_tokens: int
    warm_steps: int
    warm_batch: int
    warm_learning_rate: float
    warm_four_share: float
    """share of four-number problems in a warm-start batch"""


PRESETS = {
    "countdown-tiny": Preset(
        hidden_size=64,
        intermediate_size=256,
        layers=2,
        heads=4,
        key_value_heads=2,
        context_tokens=64,
        warm_steps=60,
        warm_batch=64,
        warm_learning_rate=2e-3,
        warm_four_share=0.2,
    )
}


def build_policy(preset: str, seed: int) -> Policy:
    """The preset's model with random weights that depend on the seed only."""
    shape = _preset(preset)
    transformers = transformers_module()
    tokenizer = _character_tokenizer(transformers, shape.context_tokens)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.hidden_size // shape.heads,
        max_position_embeddings=shape.context_tokens,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    config._attn_implementation = attention_for(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config)
    with TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        files = {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}
    files["config.json"] = config.to_json_string(use_diff=True).encode()
    return make_policy(model, tokenizer, files)


def warm_start(preset: str, seed: int, directory: Path) -> Policy:
    """Build, train supervised for the preset's few steps, and write a model directory. Returns the policy."""
    policy = build_policy(preset, seed)
    shape = _preset(preset)
    supervise(policy, shape, seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_weights(policy, directory)
    return policy


def supervise(policy: Policy, shape: Preset, seed: int) -> list[float]:
    """The supervised steps: right answers of trained problems only (held-out ones are never shown). Losses by step."""
    draw = random.Random(f"warm-start/{seed}")
    trained = [problem for problem in problems() if not problem.held_out]
    answers = {
        task: [
            (policy.encode(p.prompt), [policy.encode(text) for text in solutions(p)]) for p in trained if p.task == task
        ]
        for task in (PAIRS, FOUR)
    }
    model = policy.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.warm_learning_rate, weight_decay=0.0)
    losses = []
    for step in range(shape.warm_steps):
        # Linear warm-up over the first tenth: without it some seeds start with a spike.
        scale = min(1.0, (step + 1) / max(1, shape.warm_steps // 10))
        for group in optimizer.param_groups:
            group["lr"] = shape.warm_learning_rate * scale
        rows = []
        for _ in range(shape.warm_batch):
            prompt, texts = draw.choice(answers[FOUR if draw.random() < shape.warm_four_share else PAIRS])
            rows.append((prompt, [*draw.choice(texts), policy.eos_token_id]))
        loss = _answer_loss(model, rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.zero_grad(set_to_none=True)
    return losses


def _answer_loss(model: Any, rows: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean negative log-probability of the answers' tokens; rows are right-padded, masked by length."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    answer_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        answer_mask[row, len(prompt) : end] = True
    # Padding stands to the right and attention looks left: no mask is needed.
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    mask = answer_mask[:, 1:]
    return -torch.where(mask, logprobs, 0.0).sum() / mask.sum()


def _character_tokenizer(transformers: Any, context_tokens: int) -> Any:
    """One token a character; the end token doubles as padding, as in many real models (masks go by length).

    The unknown token is not in the vocabulary: a foreign character is an error, never silently another token.
    """
    vocabulary = {symbol: index for index, symbol in enumerate([EOS, *SYMBOLS])}
    definition = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": EOS,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"},
    }
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        path.write_text(json.dumps(definition))
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(path),
            eos_token=EOS,
            pad_token=EOS,
            clean_up_tokenization_spaces=False,
            model_max_length=context_tokens,
        )


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}: use one of {', '.join(PRESETS)}")
    return PRESETS[name]
