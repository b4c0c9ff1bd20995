"""`audit`: do the guarantees hold for this run? Asks the log and the checkpoint store, trusts no service.

The parts: groups (G1, requests and groups), rows (G1, rows and records), fresh (G2, G3),
policy (G4), steps and scores (G5), replayable (G6), store, gaps (what cannot be seen). Beside it:
recompute. Memory is bounded by the ids of the run; payloads are streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from consumers.offline.audit.fresh import FreshAudit, check_advantages
from consumers.offline.audit.gaps import find_gaps, report_gaps, require_readable
from consumers.offline.audit.groups import check_groups, check_ledger_records, check_requests
from consumers.offline.audit.index import AuditRules, Rules, RunIndex, index_counts, read_index, rules_from_configs
from consumers.offline.audit.policy import check_policy
from consumers.offline.audit.replayable import Stored, check_replayable
from consumers.offline.audit.report import CHECKS, AuditReport, Evidence, Finding, Findings, Severity, finish
from consumers.offline.audit.rows import RowAudit
from consumers.offline.audit.scores import check_scores
from consumers.offline.audit.steps import check_positions, check_run, check_steps
from consumers.offline.audit.store import check_store
from consumers.offline.run_log import RunLog
from infra.ports import CheckpointStore
from schemas.errors import UsageError
from schemas.ledger import StepCompleted
from schemas.topics import TOPICS, TopicName

__all__ = [
    "CHECKS",
    "AuditReport",
    "AuditRules",
    "Finding",
    "Severity",
    "audit",
    "rules_from_configs",
]


def audit(
    run_log: RunLog,
    rules: Rules,
    store: CheckpointStore | None = None,
    *,
    version: int | None = None,
    allow_gaps: bool = False,
) -> AuditReport:
    """Every check on one run. Without a store the checkpoints are not looked at.

    `rules`: one AuditRules, or one for each config digest (`rules_from_configs`). `version`: only findings about it.
    RangeMissing when retention has removed something, unless `allow_gaps`: then what is left is judged."""
    findings = Findings()
    index = read_index(run_log)
    require_readable(index)
    gaps = find_gaps(run_log, index, allowed=allow_gaps)
    if version is not None:
        findings.only = _about(index, version)
    limits = _limits(index, rules, findings)
    check_ledger_records(index, findings)
    check_requests(index, findings, gaps)
    check_groups(index, findings, gaps)
    fresh = FreshAudit(index, limits, findings)
    rows = RowAudit(index, limits, fresh.judge, findings, gaps)
    for entry in run_log.trajectories():
        rows.add(entry)
    rows.finish()
    recomputed = check_advantages(index, rows.groups, limits, findings, gaps)
    check_policy(index, findings)
    check_steps(index, findings)
    scores = check_scores(index, run_log, findings, gaps)
    check_positions(index, rows.offsets, findings, gaps)
    check_run(index, findings)
    report_gaps(gaps, findings)
    counts = index_counts(index) | {
        "partitions": sum(TOPICS[TopicName(name.rpartition(".")[2])].cleanup == "delete" for name, _ in run_log.ends),
        "trajectory_records": rows.counts["records"],
        "trajectory_rows": rows.counts["rows"],
        "rows_trained": fresh.trained,
        "rows_replayed": fresh.replayed,
        "rows_after_end": rows.counts["rows_after_end"],
        "records_refused": rows.counts["undecodable_records"],
        "max_policy_lag_trained": fresh.max_lag_trained,
        "advantages_recomputed": recomputed,
        "scores": scores,
    }
    checkpoints: dict[int, Stored] | None = None
    if store is not None:
        counts["checkpoints_verified"], checkpoints = check_store(index, store, findings)
    counts |= check_replayable(index, checkpoints, findings)
    sections = {"gaps": gaps.to_list(), "not_judged": dict(gaps.not_judged)} if gaps.ranges else {}
    return finish(
        run_log.run, index.ended is not None, findings, counts, with_store=store is not None, sections=sections
    )


def _about(index: RunIndex, version: int) -> Callable[[Mapping[str, Evidence]], bool]:
    """Whether a finding is about that version: itself, its step's transaction, or a policy event that names it."""
    if version not in index.fold.versions and all(step.version_out != version for _, step in index.steps()):
        raise UsageError(f"--version {version}: run {index.run} has versions 0 to {index.fold.newest}")
    numbers = {transaction.number for transaction, step in index.steps() if step.version_out == version}
    offsets = {entry.offset for entry in index.policy if getattr(entry.event, "version", None) == version}
    return lambda evidence: (
        evidence.get("version") == version
        or evidence.get("transaction") in numbers
        or evidence.get("offset") in offsets
    )


def _limits(index: RunIndex, rules: Rules, findings: Findings) -> Callable[[int], AuditRules | None]:
    """Limits by transaction number: those of the step's own configuration."""
    if isinstance(rules, AuditRules):
        return lambda transaction: rules
    unknown: set[str] = set()
    by_transaction: dict[int, AuditRules | None] = {}
    current: AuditRules | None = next(iter(rules.values()), None)
    for transaction in index.transactions:
        if isinstance(transaction.control, StepCompleted):
            digest = transaction.control.config_digest
            current = rules.get(digest)
            if current is None and digest not in unknown:
                unknown.add(digest)
                findings.error(
                    "G2.limits_unknown",
                    f"config {digest[:12]}",
                    f"version {transaction.control.version_out} was trained under it; it is not stored with the run",
                    version=transaction.control.version_out,
                )
        by_transaction[transaction.number] = current
    return by_transaction.get
