"""The command line: `driftlog VERB` or `python -m driftlog VERB`.

Exit codes: 0 fine, 1 a finding or a failed run, 2 usage or configuration, 3 fenced. Data goes to stdout,
words to stderr. Errors of our own are one message without a traceback; anything else is a defect and shows one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from infra.runner import ExitCode, exit_code, say_on_stderr
from schemas.errors import DriftlogError, EnvironmentMissing

VERBS = (
    "up", "down", "status", "summary", "audit", "lineage", "diff", "replay", "trace", "samples", "reanalyse",
    "export", "report", "pin", "unpin", "init", "doctor", "plan", "broker", "topics", "acl", "prepare", "init-policy",
    "generate", "train", "coordinate", "project", "evaluate", "mlflow", "greedy",
)  # fmt: skip
HIDDEN = frozenset({"greedy"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser, runners = _parser()
    options = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
    if options.verb is None:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    try:
        _refuse_foreign_schemas()
        return int(runners[options.verb].run(options))
    except DriftlogError as error:
        say_on_stderr(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        say_on_stderr("interrupted")
        return ExitCode.FAILED
    except BrokenPipeError:
        # `driftlog status | head`: the reader is gone, which is no failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


def _parser() -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    parser = argparse.ArgumentParser(
        prog="driftlog",
        description="Asynchronous reinforcement learning of language models through a Kafka log.",
        epilog="start here:  driftlog up --config configs/countdown.toml     then:  driftlog audit",
    )
    commands = parser.add_subparsers(dest="verb", metavar="VERB", title="commands")
    runners = {}
    for verb in VERBS:
        module = importlib.import_module(f"driftlog.commands.{verb.replace('-', '_')}")
        added = module.add(commands)
        added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.description = (module.__doc__ or "").strip()
        added.epilog = f"example:\n  {module.EXAMPLE}"
        runners[verb] = module
    return parser, runners


def _refuse_foreign_schemas() -> None:
    """Imports are plain names: a stranger's `schemas` before ours on the path would be taken for the contract."""
    import schemas

    ours = Path(__file__).resolve().parents[1] / "schemas"
    found = Path(schemas.__file__ or "").resolve().parent
    if found != ours:
        raise EnvironmentMissing(f"the package `schemas` comes from {found}, not from {ours}: remove it from the path")


if __name__ == "__main__":
    raise SystemExit(main())
