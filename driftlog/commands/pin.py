"""driftlog pin N: keep the weights of a version, whatever checkpoints.keep says, until it is unpinned."""

from __future__ import annotations

import argparse

from driftlog.options import add_run_options
from driftlog.pinning import write_pin
from schemas.policy_events import VersionPinned

EXAMPLE = "driftlog pin --run demo 120 --reason 'best so far'"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("pin", help="keep the weights of a version")
    parser.add_argument("version", type=int, metavar="N", help="version number")
    parser.add_argument("--reason", default="pinned by hand", help="why, for whoever reads the log later")
    add_run_options(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Pin it; 2 when there is no such version, its weights are retired, or it is pinned already."""
    version, reason = options.version, options.reason
    return write_pin(options, lambda run, at_us: VersionPinned(run=run, at_us=at_us, version=version, reason=reason))
