"""driftlog trace ID: the whole life of a trajectory, a group, a version or a worker, as the log tells it."""

from __future__ import annotations

import argparse
import sys

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import opened_run
from infra.runner import ExitCode

EXAMPLE = "driftlog trace demo/p000017/e0/a0/3\n  driftlog trace --run demo 12"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("trace", help="the life of a trajectory, group, version or worker")
    parser.add_argument("subject", metavar="ID", help="trajectory id, group id, version number or worker name")
    add_run_options(parser)
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Tell it; 2 when the log knows nothing of that id."""
    from consumers.offline.trace import trace

    if options.run is None and "/" in options.subject:
        options.run = options.subject.partition("/")[0]
    with opened_run(options) as at:
        found = trace(at.log(), options.subject)
    if options.json:
        print(found.to_json())
    else:
        print(found.text(), file=sys.stderr)
    return ExitCode.OK
