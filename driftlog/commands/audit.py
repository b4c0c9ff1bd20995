"""driftlog audit: does the log of a run keep the guarantees? Reads log and checkpoints, trusts no service.

Exit 0: no errors (notices do not count). Exit 1: an error, named with its record. The embedded broker of a
run that is not going is started for the while.

--recompute scores random trained rows again with the weights of the versions they claim: a stamp is a worker's word.
--mlflow compares MLflow with the log. --allow-gaps audits what is left where retention removed something.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import OpenedRun, audit_run, opened_run
from infra.runner import ExitCode
from schemas.errors import DriftlogError, UsageError

if TYPE_CHECKING:
    from consumers.offline.audit.report import AuditReport

EXAMPLE = """driftlog audit --run demo --version 12 --json
  driftlog audit --run demo --recompute 50 --mlflow"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("audit", help="check a run against the guarantees")
    add_run_options(parser)
    parser.add_argument("--version", type=int, metavar="N", help="only findings about this version")
    parser.add_argument("--recompute", type=int, metavar="K", help="score K random trained rows again")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which ones (default: 0)")
    parser.add_argument("--mlflow", action="store_true", help="compare MLflow with the log too")
    parser.add_argument("--allow-gaps", action="store_true", help="judge what retention has left")
    parser.add_argument("--checks", action="store_true", help="a line for each check: what it compared, how many")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Audit; 1 when there is an error."""
    if options.recompute is not None and options.recompute < 1:
        raise UsageError(f"--recompute {options.recompute}: at least 1 row")
    with opened_run(options) as at:
        report = audit_run(at, version=options.version, allow_gaps=options.allow_gaps)
        if options.recompute is not None:
            report = _recomputed(at, report, options)
        if options.mlflow:
            report = _with_mirror(at, report)
    if options.json:
        print(report.to_json())
    else:
        print(report.text(every_check=options.checks), file=sys.stderr)
        if options.recompute is not None:
            from consumers.offline.audit.recompute import recompute_lines

            print("\n".join(recompute_lines(report.sections["recompute"])), file=sys.stderr)
    return ExitCode.FAILED if report.errors else ExitCode.OK


def _recomputed(at: OpenedRun, report: AuditReport, options: argparse.Namespace) -> AuditReport:
    import torch

    from consumers.offline.audit.recompute import RecomputeRules, recompute
    from consumers.offline.reanalyse.scoring import Rescorer
    from driftlog.policies import base_directory

    config = at.config
    torch.set_num_threads(config.trainer.threads)
    rules = RecomputeRules(
        rows=options.recompute,
        seed=options.seed,
        behaviour_tolerance=config.generator.tolerance,
        scores_tolerance=config.generator.tolerance(config.model.dtype),
        version=options.version,
    )

    def open_scorer(directory: Path) -> Rescorer:
        return Rescorer(
            directory,
            base=base_directory(at.config, at.run),
            dtype=config.model.dtype,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            logprob_chunk=config.trainer.logprob_chunk,
        )

    return recompute(report, at.log(), at.store(), open_scorer, rules)


def _with_mirror(at: OpenedRun, report: AuditReport) -> AuditReport:
    """An MLflow that cannot be asked is a finding: what the log says of the run stands without it."""
    from consumers.offline.audit.report import Findings
    from driftlog.mirroring import compare_with_mlflow, mlflow_settings

    findings, entries = Findings(), 0
    try:
        mirror = compare_with_mlflow(at, mlflow_settings(at.config))
    except DriftlogError as error:
        findings.error("mlflow.mirror", "MLflow", str(error))
    else:
        entries = mirror.entries
        for one in mirror.differences:
            findings.error("mlflow.mirror", one.entry, one.text())
        if mirror.records_behind or mirror.is_running:
            words = (
                f"{mirror.records_behind} records behind the log" if mirror.records_behind else "still being written"
            )
            findings.notice("mlflow.mirror", f"MLflow run {mirror.mlflow_run}", f"{words}: registry not compared")
    return report.with_more(findings, {"mlflow_entries": entries}, {"mlflow"}, {})
