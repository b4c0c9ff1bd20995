"""driftlog diff RUN_A RUN_B: the same examples, order, decisions, rewards, tokens and weights, step by step?

A run is a name (in --directory) or its folder; with --directory twice, the first is A's and the second B's. Names,
workers, offsets and times may differ, and settings are told but are no difference by themselves.

Exit 0: equal. Exit 1: they differ, and the first difference is named: version, position, field, both values.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlog.broker_access import reading_broker
from driftlog.options import DEFAULT_DIRECTORY, add_json_option
from driftlog.run_directory import RunDirectory, find_run
from driftlog.run_reading import opened
from infra.runner import ExitCode
from schemas.errors import UsageError

if TYPE_CHECKING:
    from consumers.offline.diff import DiffSide

EXAMPLE = """driftlog diff long resumed
  driftlog diff here/runs/demo there/runs/demo --to 20 --json"""
_NAMES = frozenset({"run.name", "run.directory", "checkpoints.root"})
"""settings that say where a run lies"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("diff", help="compare two runs, row by row and weight by weight")
    parser.add_argument("run_a", metavar="RUN_A", help="a run's name, or its folder")
    parser.add_argument("run_b", metavar="RUN_B", help="the other one")
    parser.add_argument(
        "--directory", type=Path, action="append", metavar="DIR",
        help="where runs lie (default: runs); given twice: of A, of B",
    )  # fmt: skip
    parser.add_argument("--to", type=int, metavar="N", help="only the first N training steps")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Compare; 1 when they differ."""
    from consumers.offline.diff import diff

    folders: list[Path] = options.directory or [Path(DEFAULT_DIRECTORY)]
    if len(folders) > 2:
        raise UsageError(f"--directory is given {len(folders)} times: once for both runs, or once for each")
    runs = [_find(name, folders[place % len(folders)]) for place, name in enumerate((options.run_a, options.run_b))]
    with ExitStack() as stack:
        sides = [_opened(found, stack) for found in runs]
        report = diff(*sides, last=options.to)
    if options.json:
        print(report.to_json())
    print("\n".join(report.lines()), file=sys.stderr)
    return ExitCode.OK if report.equal else ExitCode.FAILED


def _find(name: str, directory: Path) -> RunDirectory:
    path = Path(name)
    if (path / "config.json").is_file():
        return find_run(path.resolve().parent, path.resolve().name)
    if len(path.parts) > 1:
        raise UsageError(f"{name}: no run lies there (no config.json)")
    return find_run(directory, name)


def _opened(run: RunDirectory, stack: ExitStack) -> DiffSide:
    from consumers.offline.diff import DiffSide

    config = run.stored_config()
    assert config is not None, "find_run lists only runs with a configuration"
    at = opened(config, run, stack.enter_context(reading_broker(config, run)))
    return DiffSide(at.log(), at.store(), _flat(config.model_dump(mode="json")))


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{name}.")
        elif name not in _NAMES:
            found[name] = value
    return found
