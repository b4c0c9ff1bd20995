"""driftlog down: stop what is left running of a run (or of every run): its `up`, its services, its broker."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from driftlog.options import DEFAULT_DIRECTORY, add_json_option
from driftlog.processes import end_leftovers
from driftlog.run_directory import RunDirectory
from infra.runner import ExitCode
from schemas.errors import UsageError

EXAMPLE = "driftlog down --run demo"
OWNER_PATIENCE_S = 45.0
SERVICE_PATIENCE_S = 15.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("down", help="stop what is left running")
    parser.add_argument("--run", metavar="NAME", help="only this run (default: every run of the directory)")
    parser.add_argument("--directory", type=Path, default=Path(DEFAULT_DIRECTORY), metavar="DIR")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Stop it in good order, then by force; 0 also when nothing ran."""
    names = [options.run] if options.run else sorted(path.name for path in options.directory.glob("*") if path.is_dir())
    if options.run and not (options.directory / options.run).is_dir():
        raise UsageError(f"no run {options.run!r} in {options.directory}")
    stopped = {name: found for name in names if (found := _stop(RunDirectory(options.directory, name)))}
    if options.json:
        print(json.dumps(stopped))
    else:
        for name, found in stopped.items():
            print(f"{name}: stopped {', '.join(found)}", file=sys.stderr)
        if not stopped:
            print("nothing was running", file=sys.stderr)
    return ExitCode.OK


def _stop(at: RunDirectory) -> list[str]:
    found = []
    owner = at.owner()
    if owner is not None:
        found.append("up")
        try:
            os.kill(owner, signal.SIGTERM)
        except ProcessLookupError:
            owner = None
        deadline_s = time.monotonic() + OWNER_PATIENCE_S
        while owner is not None and at.owner() == owner and time.monotonic() < deadline_s:
            time.sleep(0.1)
        if owner is not None and at.owner() == owner:
            os.kill(owner, signal.SIGKILL)
    found += end_leftovers(at, patience_s=SERVICE_PATIENCE_S)
    if (at.broker / "broker.json").exists():
        from infra import local_broker

        if local_broker.stop(at.broker):
            found.append("broker")
    return found
