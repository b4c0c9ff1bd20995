"""driftlog generate: one generator service."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
from collections.abc import Mapping

from driftlog.policies import initial_policy
from driftlog.services import add_service_options, serve
from driftlog.wiring import build_generator

EXAMPLE = "driftlog generate --config configs/countdown.toml --run demo --worker g7"
HOST = "@host"
_LONGEST = 40


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("generate", help="run one generator")
    add_service_options(parser)
    parser.add_argument(
        "--worker", default="g0", metavar="NAME",
        help=f"name of this worker, unique in the run (g0); {HOST}: the name of the machine or container",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the generator until the run ends."""
    worker = worker_name(options.worker, os.environ)
    return serve(
        options,
        f"generator-{worker}",
        threads=lambda config: config.generator.threads,
        prepare=lambda config, at: (importlib.import_module("producers.engines.hf"), initial_policy(config, at)),
        build=lambda at: build_generator(at, worker),
        idle_wait_s=0.02,
    )


def worker_name(asked: str, environment: Mapping[str, str]) -> str:
    """The name as asked for; @host: of the machine or container, which keeps it over restarts of the process.

    >>> worker_name("g7", {}), worker_name("@host", {"HOSTNAME": "Node_3.example"})
    ('g7', 'node-3-example')
    """
    if asked != HOST:
        return asked
    host = environment.get("HOSTNAME") or socket.gethostname()
    return re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")[:_LONGEST]
