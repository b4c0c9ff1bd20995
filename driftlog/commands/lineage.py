"""driftlog lineage: where a version comes from, down to version 0, and what came of it.

Without --version the tree of all versions, one line each, branches indented; --dot writes it for graphviz.
"""

from __future__ import annotations

import argparse
import sys

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import opened_run
from infra.runner import ExitCode
from schemas.errors import UsageError

EXAMPLE = """driftlog lineage --run demo --version 12
  driftlog lineage --run demo --dot | dot -Tsvg > lineage.svg"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("lineage", help="where a version comes from, and what came of it")
    add_run_options(parser)
    parser.add_argument("--version", type=int, metavar="N", help="one version in full")
    parser.add_argument("--dot", action="store_true", help="the tree as a graph for graphviz, on stdout")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Tell it; 2 for a version that was never published."""
    from consumers.offline.lineage import read_lineage
    from consumers.offline.lineage.tree import tree_dot, tree_json, tree_lines
    from consumers.offline.lineage.version import version_lineage

    if options.dot and (options.version is not None or options.json):
        raise UsageError("lineage: --dot draws the whole tree; it goes without --version and --json")
    with opened_run(options) as at:
        if options.version is not None:
            found = version_lineage(at.log(), options.version)
            _say(found.to_json() if options.json else found.text(), data=options.json)
            return ExitCode.OK
        tree = read_lineage(at.log())
    if options.dot:
        _say(tree_dot(tree), data=True)
    else:
        _say(tree_json(tree) if options.json else "\n".join(tree_lines(tree)), data=options.json)
    return ExitCode.OK


def _say(text: str, *, data: bool) -> None:
    print(text, file=sys.stdout if data else sys.stderr)
