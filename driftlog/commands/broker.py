"""driftlog broker start|stop|status|fetch: the embedded Kafka broker of a run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from driftlog.options import DEFAULT_DIRECTORY, add_json_option
from driftlog.run_directory import RunDirectory
from infra.runner import ExitCode
from schemas.errors import UsageError
from schemas.ids import run_id

EXAMPLE = "driftlog broker start --run demo"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("broker", help="start, stop, or find the embedded Kafka broker")
    parser.add_argument("action", choices=("start", "stop", "status", "fetch"))
    parser.add_argument("--run", default="demo", metavar="NAME", help="run whose log it serves (demo)")
    parser.add_argument("--directory", type=Path, default=Path(DEFAULT_DIRECTORY), metavar="DIR")
    parser.add_argument("--port", type=int, metavar="N", help="start: listen there (default: a free port)")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Do what was asked; `status` exits 1 when no broker runs."""
    from infra import local_broker

    try:
        data = RunDirectory(options.directory, run_id(options.run)).broker
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.action == "fetch":
        jars = local_broker.ensure_jars(local_broker.default_cache_dir())
        return _tell({"jars": str(jars)}, f"broker jars: {jars}", as_json=options.json)
    if options.action == "stop":
        stopped = local_broker.stop(data)
        words = f"stopped the broker of {options.run}" if stopped else f"no broker ran for {options.run}"
        return _tell({"stopped": stopped}, words, as_json=options.json)
    if options.action == "start":
        jars = local_broker.ensure_jars(local_broker.default_cache_dir())
        handle = local_broker.start(data, jars=jars, port=options.port)
        words = f"broker of {options.run}: {handle.bootstrap_servers} (process {handle.pid}, log {data / 'server.log'})"
        return _tell({**asdict(handle), "bootstrap_servers": handle.bootstrap_servers}, words, as_json=options.json)
    found = local_broker.status(data)
    if found is None:
        _tell(None, f"no broker runs for {options.run}", as_json=options.json)
        return ExitCode.FAILED
    words = f"broker of {options.run}: {found.bootstrap_servers} (process {found.pid})"
    return _tell({**asdict(found), "bootstrap_servers": found.bootstrap_servers}, words, as_json=options.json)


def _tell(content: object, words: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(content))
    else:
        print(words, file=sys.stderr)
    return ExitCode.OK
