"""driftlog init: a configuration for your own model, prompts and reward, checked before it is written.

Checked: the model directory is whole and its tokenizer fits it, every prompt can be read, encoded and is short
enough, the reward can be imported and scores one example. What is wrong is said, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from driftlog.options import add_json_option
from driftlog.policies import PRESET_NAMES
from infra.runner import ExitCode
from schemas.errors import UsageError

EXAMPLE = "driftlog init --model models/mine --prompts prompts.jsonl --reward my_rewards.py:score --out my.toml"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("init", help="a configuration for your own model, prompts and reward")
    parser.add_argument(
        "--model", required=True, metavar="DIR", help=f"a Hugging Face model directory (or {', '.join(PRESET_NAMES)})"
    )
    parser.add_argument("--prompts", required=True, metavar="FILE", help=".jsonl, .parquet, or a dataset folder")
    parser.add_argument(
        "--reward", required=True, metavar="NAME", help="package.module:function, file.py:function, or a shipped one"
    )
    parser.add_argument("--prompt-column", default="", metavar="NAME", help="column of the prompt (found by itself)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (what fits, at most 256)")
    parser.add_argument("--run", default="own", metavar="NAME", help="name of the run (own)")
    parser.add_argument("--out", type=Path, default=Path("own.toml"), metavar="FILE", help="(own.toml)")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Check, write, say how to start."""
    if options.out.exists():
        raise UsageError(f"{options.out} exists already: name another file with --out")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from driftlog.own_task import OwnTask, checked_task, config_text

    own = OwnTask(
        model=options.model,
        prompts=options.prompts,
        reward=options.reward,
        prompt_column=options.prompt_column,
        max_tokens=options.max_tokens,
        run=options.run,
    )
    checked = checked_task(own)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(config_text(own, checked.max_tokens), encoding="utf-8")
    start = f"driftlog up --config {options.out}"
    if options.json:
        print(json.dumps({"config": str(options.out), "start": start, **checked.to_dict()}))
    for line in (*checked.words(), f"written: {options.out}. Start it with:", f"  {start}"):
        print(line, file=sys.stderr)
    return ExitCode.OK
