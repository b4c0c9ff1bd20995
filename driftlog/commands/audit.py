"""driftlog audit: does the log of a run keep the guarantees? Reads log and checkpoints, trusts no service.

Exit 0: no errors (notices do not count). Exit 1: an error, named with its record. The embedded broker of a
run that is not going is started for the while.
"""

from __future__ import annotations

import argparse
import sys

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import audit_run, opened_run
from infra.runner import ExitCode

EXAMPLE = "driftlog audit --run demo --version 12 --json"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("audit", help="check a run against the guarantees")
    add_run_options(parser)
    parser.add_argument("--version", type=int, metavar="N", help="only findings about this version")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Audit; 1 when there is an error."""
    with opened_run(options) as at:
        report = audit_run(at)
    if options.version is not None:
        report = report.about_version(options.version)
    if options.json:
        print(report.to_json())
    else:
        print(report.text(), file=sys.stderr)
    return ExitCode.FAILED if report.errors else ExitCode.OK
