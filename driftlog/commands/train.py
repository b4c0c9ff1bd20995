"""driftlog train: the trainer service."""

from __future__ import annotations

import argparse
import importlib

from driftlog.policies import initial_policy
from driftlog.services import add_service_options, serve
from driftlog.wiring import Site
from infra.runner import Assembly

EXAMPLE = "driftlog train --config configs/countdown.toml --run demo"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("train", help="run the trainer")
    add_service_options(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the trainer until the configured versions are trained."""
    return serve(
        options,
        "trainer",
        threads=lambda config: config.trainer.threads,
        prepare=lambda config, at: (importlib.import_module("driftlog.wiring_trainer"), initial_policy(config, at)),
        build=_build,
    )


def _build(at: Site) -> Assembly:
    from driftlog.wiring_trainer import build_trainer

    return build_trainer(at)
