"""driftlog project: the projector to MLflow."""

from __future__ import annotations

import argparse
import importlib

from driftlog.services import add_service_options, serve
from driftlog.wiring import build_projector

EXAMPLE = "driftlog project --config configs/countdown.toml --run demo"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("project", help="show a run in MLflow while it goes on")
    add_service_options(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the projector until the run ended and all of it is shown."""
    return serve(
        options,
        "projector",
        threads=lambda _: 1,
        prepare=lambda config, at: importlib.import_module("infra.mlflow_tracker"),
        build=build_projector,
        idle_wait_s=0.2,
    )
