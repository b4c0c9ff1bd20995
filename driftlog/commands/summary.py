"""driftlog summary: what a run came to, added up from its log (`driftlog up` writes it as summary.json)."""

from __future__ import annotations

import argparse
import json
import sys

from driftlog.finish import summarise_run, summary_text
from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import opened_run
from infra.runner import ExitCode

EXAMPLE = "driftlog summary --run demo --json"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("summary", help="what a run came to")
    add_run_options(parser)
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Add it up; the greedy numbers are those of the last `driftlog up`."""
    with opened_run(options) as at:
        summary = summarise_run(at, lambda words: print(words, file=sys.stderr))
        if at.run.summary.exists():
            stored = json.loads(at.run.summary.read_text(encoding="utf-8"))
            summary |= {name: value for name, value in stored.items() if "greedy" in name}
    if options.json:
        print(json.dumps(summary))
    else:
        print("\n".join(summary_text(summary)).strip(), file=sys.stderr)
    return ExitCode.FAILED if summary["audit_findings"] else ExitCode.OK
