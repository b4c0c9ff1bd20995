"""driftlog trace ID: the whole life of a trajectory, group, prompt, version or worker, as the log tells it.

With --never-trained: the prompts that were dropped and not asked for again, each attempt with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import OpenedRun, opened_run
from infra.runner import ExitCode
from schemas.errors import UsageError

EXAMPLE = (
    "driftlog trace demo/p000017/e0/a0/3\n  driftlog trace demo/p000017\n  driftlog trace --run demo 12\n"
    "  driftlog trace --run demo --never-trained"
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("trace", help="the life of a trajectory, group, prompt, version or worker")
    parser.add_argument(
        "subject",
        metavar="ID",
        nargs="?",
        help="trajectory id, group id, run/p17 or prompt:ID, version number or worker name",
    )
    parser.add_argument("--never-trained", action="store_true", help="in place of an ID: prompts that were given up")
    add_run_options(parser)
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Tell it; 2 when the log knows nothing of that id."""
    from consumers.offline.trace import trace

    if (options.subject is None) != options.never_trained:
        raise UsageError("trace: name one ID, or say --never-trained")
    if options.never_trained:
        with opened_run(options) as at:
            return _never_trained(at, as_json=options.json)
    if options.run is None and "/" in options.subject and not options.subject.startswith("prompt:"):
        options.run = options.subject.partition("/")[0]
    with opened_run(options) as at:
        found = trace(at.log(), options.subject)
    if options.json:
        print(found.to_json())
    else:
        print(found.text(), file=sys.stderr)
    return ExitCode.OK


def _never_trained(at: OpenedRun, *, as_json: bool) -> int:
    from consumers.offline.never_trained import never_trained

    found = never_trained(at.log())
    if as_json:
        print(json.dumps({"run": at.run_id, "never_trained": [prompt.to_dict() for prompt in found]}, indent=2))
    else:
        lines = [f"run {at.run_id}: {len(found)} prompts were never trained", *(f"  {p.words}" for p in found)]
        print("\n".join(lines), file=sys.stderr)
    return ExitCode.OK
