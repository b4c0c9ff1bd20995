"""driftlog export: a run as Parquet for DuckDB, Polars and pandas (docs/queries.md), or as a local Arrow cache.

Works while the run is going: the log is read as it stands, and what is not decided yet is said. --cache makes or
extends RUN/cache, from which re-reading is many times faster; with --out the export is read from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import OpenedRun, opened_run
from infra.clock import SystemClock
from infra.revision import code_revision
from infra.runner import ExitCode
from schemas.errors import UsageError

if TYPE_CHECKING:
    from consumers.offline.cache import TrajectoryCache
    from consumers.offline.export.index import DecisionIndex
    from consumers.offline.run_log import RunLog

EXAMPLE = "driftlog export --run demo --out demo-parquet --no-text"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("export", help="a run as Parquet tables, or as a local Arrow cache")
    add_run_options(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the tables; must not exist yet")
    parser.add_argument(
        "--tables", metavar="A,B", help="of trajectories,decisions,groups,requests,steps,policy,workers (all)"
    )
    parser.add_argument("--no-tokens", action="store_true", help="without token ids and values per token")
    parser.add_argument("--no-text", action="store_true", help="without prompts and completions as text")
    parser.add_argument("--cache", action="store_true", help="make or extend the Arrow cache beside the run")
    parser.add_argument("--force", action="store_true", help="replace the export, and rebuild the cache, that is there")
    parser.add_argument("--allow-missing", action="store_true", help="go on where the log has gaps; they are listed")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Export; 1 when the log has gaps that were not accepted."""
    from consumers.offline.export import TABLES, ExportOptions, export

    if options.out is None and not options.cache:
        raise UsageError("say where to with --out DIR, or make the cache with --cache")
    names = TABLES if options.tables is None else tuple(name.strip() for name in options.tables.split(","))
    wanted = ExportOptions(
        tables=names,
        tokens=not options.no_tokens,
        text=not options.no_text,
        allow_missing=options.allow_missing,
        force=options.force,
    )
    said: dict[str, Any] = {}
    with opened_run(options) as at:
        run_log = at.log()

        def cache(index: DecisionIndex) -> TrajectoryCache:
            return _refresh(options, at, run_log, index, said)

        if options.out is None:
            cache(_ledger(run_log))
        else:
            report = export(
                run_log,
                options.out,
                wanted,
                now_us=SystemClock().now_us(),
                build=code_revision(),
                cache=cache if options.cache else None,
            )
            said |= report.to_dict()
            print("\n".join([*report.lines(), f"in {options.out}"]), file=sys.stderr)
    if options.json:
        print(json.dumps(said))
    return ExitCode.OK


def _ledger(run_log: RunLog) -> DecisionIndex:
    from consumers.offline.export.index import DecisionIndex

    index = DecisionIndex()
    for transaction in run_log.transactions():
        index.add(transaction)
    return index


def _refresh(
    options: argparse.Namespace, at: OpenedRun, run_log: RunLog, index: DecisionIndex, said: dict[str, Any]
) -> TrajectoryCache:
    from consumers.offline.cache.writer import refresh

    directory = at.run.path / "cache"
    done = refresh(
        run_log,
        directory,
        position=index.position,
        known_foreign=frozenset(index.known_foreign),
        rebuild=options.force,
        allow_missing=options.allow_missing,
    )
    rows = done.cache.manifest.rows
    said["cache"] = {"directory": str(directory), "rows": rows, "rows_before": done.rows_before}
    print(f"cache: {rows:,} rows in {directory} ({rows - done.rows_before:,} of them new)", file=sys.stderr)
    return done.cache
