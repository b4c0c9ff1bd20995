"""driftlog greedy: greedy success of the initial policy and of one version (started by `driftlog up`)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from driftlog.options import add_config_options, config_of
from driftlog.run_directory import write_json
from infra.runner import ExitCode

EXAMPLE = "driftlog greedy --config runs/demo/config.json --manifest URI --sha256 HEX --out greedy.json"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command; it is not listed."""
    parser = commands.add_parser("greedy")
    add_config_options(parser)
    parser.add_argument("--manifest", required=True, metavar="URI")
    parser.add_argument("--sha256", required=True, metavar="HEX")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure, write, done."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from driftlog.greedy import greedy_report

    config, at = config_of(options)
    report = greedy_report(config, at, options.manifest, options.sha256)
    write_json(options.out, {**report, "manifest_sha256": options.sha256})
    return ExitCode.OK
