"""`audit`: do the guarantees hold for this run? Asks the log and the checkpoint store, trusts no service.

The parts: audit_groups (G1, requests and groups), audit_rows (G1, rows and records), audit_fresh (G2, G3),
audit_policy (G4), audit_steps (G5), audit_store. Memory is bounded by the ids of the run; payloads are streamed.
"""

from __future__ import annotations

from collections.abc import Callable

from consumers.offline.audit_fresh import FreshAudit, check_advantages
from consumers.offline.audit_groups import check_groups, check_ledger_records, check_requests
from consumers.offline.audit_index import AuditRules, Rules, RunIndex, read_index, rules_from_configs
from consumers.offline.audit_policy import check_policy
from consumers.offline.audit_report import CHECKS, AuditReport, Finding, Findings, Severity, finish
from consumers.offline.audit_rows import RowAudit
from consumers.offline.audit_steps import check_positions, check_run, check_steps
from consumers.offline.audit_store import check_store
from consumers.offline.run_log import RunLog
from infra.ports import CheckpointStore
from schemas.ledger import StepCompleted

__all__ = [
    "CHECKS",
    "AuditReport",
    "AuditRules",
    "Finding",
    "Severity",
    "audit",
    "rules_from_configs",
]


def audit(run_log: RunLog, rules: Rules, store: CheckpointStore | None = None) -> AuditReport:
    """Every check on one run. Without a store the checkpoints are not looked at.

    `rules`: one AuditRules, or one for each config digest (`rules_from_configs`)."""
    findings = Findings()
    index = read_index(run_log)
    limits = _limits(index, rules, findings)
    check_ledger_records(index, findings)
    check_requests(index, findings)
    check_groups(index, findings)
    fresh = FreshAudit(index, limits, findings)
    rows = RowAudit(index, limits, fresh.judge, findings)
    for entry in run_log.trajectories():
        rows.add(entry)
    rows.finish()
    recomputed = check_advantages(index, rows.groups, limits, findings)
    check_policy(index, findings)
    check_steps(index, findings)
    check_positions(index, rows.offsets, findings)
    check_run(index, findings)
    counts = {
        "versions": len(index.fold.versions),
        "groups_issued": len(index.issued),
        "trajectory_records": rows.counts["records"],
        "trajectory_rows": rows.counts["rows"],
        "rows_trained": fresh.trained,
        "rows_replayed": fresh.replayed,
        "rows_after_end": rows.counts["rows_after_end"],
        "records_refused": rows.counts["undecodable_records"],
        "ledger_transactions": len(index.transactions),
        "policy_events": len(index.policy),
        "max_policy_lag_trained": fresh.max_lag_trained,
        "advantages_recomputed": recomputed,
    }
    checks = [name for name in CHECKS if not name.startswith("store.")]
    if store is not None:
        counts["checkpoints_verified"] = check_store(index, store, findings)
        checks = list(CHECKS)
    return finish(run_log.run, index.ended is not None, findings, counts, checks)


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
