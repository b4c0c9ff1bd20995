"""What an audit says: findings with evidence, how often each occurred, and which checks were made.

Every check has a name here and one line of meaning; a finding under another name cannot be made. Memory is
bounded: of each kind the first few are kept with their evidence, all of them are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

KEPT_PER_CHECK = 20
Evidence = str | int | float | bool | None


class Severity(StrEnum):
    """An error breaks a guarantee (exit 1); a notice is worth reading (exit 0)."""

    ERROR = "error"
    NOTICE = "notice"


CHECKS: dict[str, str] = {
    # G1 accounted
    "G1.ledger_record": "every ledger record is readable and is what the trainer wrote (ce_id is made of the bytes)",
    "G1.request_record": "every prompt request is readable, once, at its position's partition",
    "G1.group_undecided": "every issued group has a group decision, or is open while the run is under way",
    "G1.group_decided_twice": "no group has two group decisions",
    "G1.group_unknown": "no decision is about a group that was never issued",
    "G1.group_mismatch": "rows are trained exactly when their group is, in one transaction, all of one claim",
    "G1.trajectory_undecided": "every trajectory row in the log has a first decision",
    "G1.decided_twice": "no row or record has two first decisions",
    "G1.trained_twice": "no trajectory is trained twice",
    "G1.replay": "a replay follows a first use, keeps its advantage, and stays inside max_use",
    "G1.decision_without_row": "no decision is about something that is not in the log",
    "G1.record_split": "the rows of a record are decided in one transaction",
    "G1.row_altered": "row_sha256 of the decision is the hash of the row in the log",
    "G1.decision_altered": "ids, reward, tokens, weight and advantage of a decision agree with the row and each other",
    "G1.advantage": "advantages are finite, and equal those recomputed from the rewards in the log",
    "G1.trained_invalid": "no row that fails validation is trained",
    "G1.record_undecided": "every record that cannot be decoded has a record decision",
    "G1.dead_letter": "every refused record lies in deadletters, byte for byte",
    "G1.refused_but_decodes": "a refused record that this build can decode",
    "G1.after_end": "rows behind the end of the run: not counted, by rule",
    "G1.open": "the run is under way: what is not decided yet",
    # G2 fresh
    "G2.lag_above_limit": "no trained row has a policy lag above max_lag",
    "G2.lag_differs": "the policy lag of a decision is the one along the parent chain",
    "G2.not_an_ancestor": "no token of another branch or from the future is trained",
    "G2.limits_unknown": "the limits of every step's configuration are known",
    "G2.stale_but_fresh": "nothing is dropped as stale that is inside the limit",
    # G3 traceable
    "G3.proof": "each trained segment's proof is its worker's legal VersionLoaded, read before the step",
    "G3.not_activated": "in barrier mode each trained version was activated before the trainer decided",
    # G4 proven switch
    "G4.live_without_proof": "every version that went live stands on proofs of its own bytes",
    "G4.trainer_event_void": "no event of the trainer is void: it is fenced and writes in transactions",
    "G4.policy_record": "every policy record is what its writer wrote",
    "G4.void_events": "events that are illegal at their position and so count for nobody",
    "G4.unreadable_events": "policy records that cannot be decoded and so count for nobody",
    "G4.weak_proofs": "proofs whose probe could not tell new weights from old: the sha256 alone carries them",
    # G5 atomic step
    "G5.step_without_version": "every StepCompleted has its VersionPublished",
    "G5.version_without_step": "every VersionPublished after version 0 has its StepCompleted (a branch start has none)",
    "G5.step_order": "steps follow the parent chain, in order, each on the version before it",
    "G5.step_counts": "groups and trajectories of StepCompleted are those of its decisions",
    "G5.batch_digest": "the batch digest is the one over the trained rows in order",
    "G5.position": "each Position follows from the one before: decisions, issued requests, records read",
    "G5.run_end": "policy and ledger agree on the end of the run, and nothing is open there",
    "G5.config": "every step ran under the configuration its run segment names",
    "G5.beyond_ledger": "the run is under way: what other topics hold beyond the ledger's end",
    # the checkpoint store
    "store.checkpoint": "every version that is not retired is there, and every byte of it is as published",
    "store.manifest": "manifest and event agree",
    "store.unnamed": "directories that no event names: garbage, collected after a grace time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, or that a person should know."""

    severity: Severity
    check: str
    subject: str
    """what it is about: a trajectory, group, version, record or worker"""
    message: str
    evidence: Mapping[str, Evidence] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "severity": self.severity.value,
            "check": self.check,
            "subject": self.subject,
            "message": self.message,
            "evidence": dict(self.evidence),
        }


class Findings:
    """Collects. Mutable; lives for one audit."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.occurrences: Counter[tuple[Severity, str]] = Counter()

    def error(self, check: str, subject: str, message: str, **evidence: Evidence) -> None:
        """A guarantee does not hold."""
        self._add(Severity.ERROR, check, subject, message, evidence)

    def notice(self, check: str, subject: str, message: str, **evidence: Evidence) -> None:
        """Worth reading."""
        self._add(Severity.NOTICE, check, subject, message, evidence)

    def _add(self, severity: Severity, check: str, subject: str, message: str, evidence: dict[str, Evidence]) -> None:
        assert check in CHECKS, f"no such check: {check}"
        self.occurrences[severity, check] += 1
        if self.occurrences[severity, check] <= KEPT_PER_CHECK:
            self.kept.append(
                Finding(severity=severity, check=check, subject=subject, message=message, evidence=evidence)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The answer of one audit."""

    run: str
    ended: bool
    findings: Sequence[Finding]
    """at most KEPT_PER_CHECK a check and severity, errors first"""
    occurrences: Mapping[tuple[Severity, str], int]
    counts: Mapping[str, int]
    """what was looked at"""
    checks: Sequence[str]
    """names of the checks that were made"""

    @property
    def errors(self) -> int:
        """How many errors there are, those not kept included."""
        return sum(count for (severity, _), count in self.occurrences.items() if severity is Severity.ERROR)

    @property
    def notices(self) -> int:
        """How many notices there are."""
        return sum(count for (severity, _), count in self.occurrences.items() if severity is Severity.NOTICE)

    def about_version(self, version: int) -> AuditReport:
        """Only the findings whose evidence names this version."""
        kept = [finding for finding in self.findings if finding.evidence.get("version") == version]
        occurrences = Counter((finding.severity, finding.check) for finding in kept)
        return replace(self, findings=kept, occurrences=occurrences)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "run": self.run,
            "ended": self.ended,
            "errors": self.errors,
            "notices": self.notices,
            "findings": [finding.to_dict() for finding in self.findings],
            "occurrences": {
                f"{severity.value} {check}": n for (severity, check), n in sorted(self.occurrences.items())
            },
            "counts": dict(self.counts),
            "checks": list(self.checks),
        }

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def text(self) -> str:
        """For a person."""
        state = "ended" if self.ended else "under way"
        lines = [f"audit of {self.run} ({state}): {self.errors} errors, {self.notices} notices"]
        lines.append("  " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.counts.items()))
        for finding in self.findings:
            lines.append(f"{finding.severity.value:6} {finding.check} {finding.subject}: {finding.message}")
        for (severity, check), count in sorted(self.occurrences.items()):
            if count > KEPT_PER_CHECK:
                lines.append(f"{severity.value:6} {check}: {count - KEPT_PER_CHECK} more of these")
        lines.append(f"{len(self.checks)} checks made")
        return "\n".join(lines)


def finish(run: str, ended: bool, findings: Findings, counts: Mapping[str, int], checks: Sequence[str]) -> AuditReport:
    """The report of what was collected, errors first."""
    ordered = sorted(findings.kept, key=lambda finding: finding.severity is Severity.NOTICE)
    return AuditReport(
        run=run,
        ended=ended,
        findings=tuple(ordered),
        occurrences=dict(findings.occurrences),
        counts=counts,
        checks=tuple(checks),
    )
