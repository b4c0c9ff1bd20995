"""driftlog generate: one generator service."""

from __future__ import annotations

import argparse
import importlib

from driftlog.policies import initial_policy
from driftlog.services import add_service_options, serve
from driftlog.wiring import build_generator

EXAMPLE = "driftlog generate --config configs/countdown.toml --run demo --worker g7"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("generate", help="run one generator")
    add_service_options(parser)
    parser.add_argument("--worker", default="g0", metavar="NAME", help="name of this worker, unique in the run (g0)")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the generator until the run ends."""
    return serve(
        options,
        f"generator-{options.worker}",
        threads=lambda config: config.generator.threads,
        prepare=lambda config, at: (importlib.import_module("producers.engines.hf"), initial_policy(config, at)),
        build=lambda at: build_generator(at, options.worker),
        idle_wait_s=0.02,
    )
