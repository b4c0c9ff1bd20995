"""driftlog evaluate: the evaluator of a run."""

from __future__ import annotations

import argparse
import importlib

from driftlog.policies import initial_policy
from driftlog.services import add_service_options, serve

EXAMPLE = "driftlog evaluate --config configs/countdown.toml --run demo --set evaluation.every_versions=10"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("evaluate", help="ask held-out prompts of the versions of a run")
    add_service_options(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Evaluate until the run ended and its newest version is evaluated."""
    return serve(
        options,
        "evaluator",
        threads=lambda config: config.evaluation.threads,
        prepare=lambda config, at: (importlib.import_module("producers.engines.hf"), initial_policy(config, at)),
        # Only here: it imports torch, and the thread settings must stand before.
        build=lambda at: importlib.import_module("driftlog.wiring_evaluation").build_evaluator(at),
        idle_wait_s=0.1,
    )
