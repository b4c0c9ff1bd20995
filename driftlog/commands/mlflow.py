"""driftlog mlflow rebuild|compare: MLflow is the log's mirror. Make it anew from the log, or tell what differs.

rebuild shows the whole log in a new MLflow run, which takes the place of the one before when it is complete; the old
run stays as it is and names the new one. compare exits with 1 when an entry is not what the log says.
"""

from __future__ import annotations

import argparse
import json
import sys

from driftlog.mirroring import MirrorReport, compare_with_mlflow, mlflow_settings, rebuild
from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import opened_run
from infra.runner import ExitCode

EXAMPLE = """driftlog mlflow compare --run demo
  driftlog mlflow rebuild --run demo
  driftlog mlflow rebuild --run demo --tracking-uri sqlite:///fresh.db"""
_SHOWN = 40


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("mlflow", help="rebuild MLflow from the log, or compare the two")
    parser.add_argument("action", choices=("rebuild", "compare"))
    parser.add_argument("--experiment", default="", metavar="NAME", help="another experiment than the run's own")
    parser.add_argument("--tracking-uri", default="", metavar="URI", help="another MLflow than the run's own")
    add_run_options(parser)
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Do it; 1 when compare finds a difference."""
    with opened_run(options) as at:
        settings = mlflow_settings(at.config, options.tracking_uri, options.experiment)
        if options.action == "compare":
            return _tell(compare_with_mlflow(at, settings), as_json=options.json)
        run_id, skipped = rebuild(at, settings)
    where = f"{settings.tracking_uri}, experiment {settings.experiment}"
    if options.json:
        print(json.dumps({"mlflow_run": run_id, "records_skipped": skipped}))
    print(f"the log is shown by MLflow run {run_id} ({where})", file=sys.stderr)
    return ExitCode.OK


def _tell(report: MirrorReport, *, as_json: bool) -> int:
    if as_json:
        found = [{"entry": one.entry, "expected": one.expected, "actual": one.actual} for one in report.differences]
        content = {
            "mlflow_run": report.mlflow_run,
            "entries": report.entries,
            "records_behind": report.records_behind,
            "is_running": report.is_running,
            "differences": found,
        }
        print(json.dumps(content))
    for one in report.differences[:_SHOWN]:
        print(one.text(), file=sys.stderr)
    if len(report.differences) > _SHOWN:
        print(f"... and {len(report.differences) - _SHOWN} more (--json has all)", file=sys.stderr)
    if report.records_behind:
        print(f"MLflow is {report.records_behind} records behind the log", file=sys.stderr)
    if report.is_running or report.records_behind:
        print(
            "registry, aliases and open files were not compared: they follow when the projector is done",
            file=sys.stderr,
        )
    words = f"{len(report.differences)} differences" if report.differences else "as the log says"
    print(f"MLflow run {report.mlflow_run}: {report.entries} entries compared, {words}", file=sys.stderr)
    return ExitCode.FAILED if report.differences else ExitCode.OK
