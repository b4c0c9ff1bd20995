"""driftlog coordinate: the coordinator service."""

from __future__ import annotations

import argparse

from driftlog.services import add_service_options, serve
from driftlog.wiring import build_coordinator

EXAMPLE = "driftlog coordinate --config configs/countdown.toml --run demo"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("coordinate", help="run the coordinator")
    add_service_options(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the coordinator until the run ends."""
    return serve(options, "coordinator", threads=lambda _: 1, prepare=lambda config, at: None, build=build_coordinator)
