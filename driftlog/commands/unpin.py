"""driftlog unpin N: the retention rule applies to this version again."""

from __future__ import annotations

import argparse

from driftlog.options import add_run_options
from driftlog.pinning import write_pin
from schemas.policy_events import VersionUnpinned

EXAMPLE = "driftlog unpin --run demo 120"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("unpin", help="let the retention rule apply to a version again")
    parser.add_argument("version", type=int, metavar="N", help="version number")
    add_run_options(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Unpin it; 2 when it is not pinned."""
    version = options.version
    return write_pin(options, lambda run, at_us: VersionUnpinned(run=run, at_us=at_us, version=version))
