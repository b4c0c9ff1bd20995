"""driftlog samples: trajectories to read, the best or the worst of a version or of the whole run."""

from __future__ import annotations

import argparse
import json
import sys

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import opened_run
from infra.runner import ExitCode
from schemas.errors import UsageError

EXAMPLE = "driftlog samples --run demo --version 200 --worst --limit 5"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("samples", help="trajectories to read")
    add_run_options(parser)
    parser.add_argument("--version", type=int, metavar="N", help="only those decided in the step that made N")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", dest="order", action="store_const", const="best", help="highest reward (default)")
    order.add_argument("--worst", dest="order", action="store_const", const="worst", help="lowest reward")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="how many (10)")
    parser.set_defaults(order="best")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Show them; 1 when there are none."""
    from consumers.offline.samples import samples

    if options.limit < 1:
        raise UsageError(f"--limit {options.limit}: at least 1")
    with opened_run(options) as at:
        found = samples(at.log(), version=options.version, order=options.order, limit=options.limit)
    if options.json:
        print(json.dumps([sample.to_dict() for sample in found]))
    else:
        for sample in found:
            print(sample.line(), file=sys.stderr)
        if not found:
            print("no trajectory with a reward there", file=sys.stderr)
    return ExitCode.OK if found else ExitCode.FAILED
