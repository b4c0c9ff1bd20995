"""driftlog init-policy: make the initial policy of a preset, as a Hugging Face model directory."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from driftlog.options import add_json_option
from driftlog.policies import PRESET_NAMES, make_preset
from infra.runner import ExitCode
from schemas.errors import UsageError

EXAMPLE = "driftlog init-policy countdown-tiny --out policies/tiny"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("init-policy", help="make a preset's initial policy")
    parser.add_argument("preset", metavar="PRESET", help=", ".join(PRESET_NAMES))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="must not exist yet")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(0)")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Make it; the same preset and seed give the same bytes on the same machine type."""
    if options.preset not in PRESET_NAMES:
        raise UsageError(f"no preset {options.preset!r}: use one of {', '.join(PRESET_NAMES)}")
    if options.out.exists():
        raise UsageError(f"{options.out} exists already: name a new directory with --out")
    # One thread: the order of sums, and with it the bytes, would depend on the number of cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    make_preset(options.preset, options.seed, options.out)
    if options.json:
        print(json.dumps({"preset": options.preset, "seed": options.seed, "directory": str(options.out)}))
    else:
        print(f"{options.preset}, seed {options.seed}: {options.out}", file=sys.stderr)
    return ExitCode.OK
