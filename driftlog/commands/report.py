"""driftlog report: one self-contained HTML of a run, to read, to send and to keep. Reads the log; loads nothing.

Works while the run is going: it then says up to which offset it was read. Texts of prompts and completions appear only
as a few examples of the newest step; --no-text leaves them out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import OpenedRun, audit_run, opened_run
from infra.clock import SystemClock
from infra.revision import code_revision
from infra.runner import ExitCode
from infra.whole_files import write_whole
from schemas.errors import CheckpointInvalid, CheckpointMissing, CheckpointRefused, IllegalState, UsageError

if TYPE_CHECKING:
    from consumers.offline.report.reading import RunReading
    from schemas.checkpoint import Manifest

EXAMPLE = "driftlog report --run demo --out demo.html"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("report", help="one self-contained HTML of a run")
    add_run_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="one that is there is replaced")
    parser.add_argument("--no-audit", action="store_true", help="without the audit, which reads everything once more")
    parser.add_argument("--no-text", action="store_true", help="without examples of prompts and completions")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Write it."""
    from consumers.offline.report.build import build_page
    from consumers.offline.report.page import render
    from consumers.offline.report.reading import read_run

    _refuse_a_bad_target(options.out)
    with opened_run(options) as at:
        reading = read_run(at.log(), texts=not options.no_text)
        beside = _beside(at, reading, with_audit=not options.no_audit)
    page = build_page(reading, beside)
    text = render(page)
    write_whole(options.out, text)
    drawn = sum(figure.has_data for figure in page.figures())
    told: dict[str, Any] = {
        "file": str(options.out), "bytes": len(text.encode()), "state": page.state, "figures": drawn,
        "ledger_read_up_to": reading.ledger.read_up_to,
    }  # fmt: skip
    if options.json:
        print(json.dumps(told))
    print(f"{options.out}: {told['bytes'] / 1024:,.0f} KiB, {drawn} plots, the run is {page.state}", file=sys.stderr)
    return ExitCode.OK


def _beside(at: OpenedRun, reading: RunReading, *, with_audit: bool) -> Any:
    from consumers.offline.report.build import Beside

    audit = audit_run(at) if with_audit else None
    summary, problem = _summary(at)
    manifest, missing = _manifest(at, reading)
    return Beside(
        made_at_us=SystemClock().now_us(),
        build=code_revision(),
        audit=audit,
        configs=[config.model_dump(mode="json") for config in at.configs()],
        manifest=manifest,
        manifest_problem=missing,
        summary=summary,
        summary_problem=problem,
    )


def _summary(at: OpenedRun) -> tuple[dict[str, Any], str]:
    """As `driftlog summary` tells it; a run that does not add up has none, and the report says so."""
    from consumers.offline.summary import summarise

    try:
        summary = summarise(at.log()).to_dict()
    except IllegalState as error:
        return {}, str(error)
    if at.run.summary.exists():
        stored = json.loads(at.run.summary.read_text(encoding="utf-8"))
        summary |= {name: value for name, value in stored.items() if "greedy" in name}
    return summary, ""


def _manifest(at: OpenedRun, reading: RunReading) -> tuple[Manifest | None, str]:
    """Of the newest version; its weights may be retired, or elsewhere."""
    event = reading.newest_event
    if event is None:
        return None, "No version was published yet."
    try:
        return at.store().fetch(event.manifest_uri, event.manifest_sha256)[1], ""
    except (CheckpointMissing, CheckpointInvalid, CheckpointRefused) as error:
        return None, f"The manifest of version {event.version} cannot be read: {error}"


def _refuse_a_bad_target(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder: name a file")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}")
