"""What an audit says: findings with evidence, how often each occurred, and which checks were made.

Every check has a name here and one line of meaning; a finding under another name cannot be made. Memory is
bounded: of each kind the first few are kept with their evidence, all of them are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from consumers.offline.audit.checks import CHECKS, COMPARED, FAMILIES, OPTIONAL, family

__all__ = ["CHECKS", "AuditReport", "Evidence", "Finding", "Findings", "Severity", "finish"]

KEPT_PER_CHECK = 20
Evidence = str | int | float | bool | None


class Severity(StrEnum):
    """An error breaks a guarantee (exit 1); a notice is worth reading (exit 0)."""

    ERROR = "error"
    NOTICE = "notice"


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
        self.only: Callable[[Mapping[str, Evidence]], bool] | None = None
        """findings whose evidence it refuses are not made; what is said of the log as a whole always is"""

    def error(self, check: str, subject: str, message: str, **evidence: Evidence) -> None:
        """A guarantee does not hold."""
        self._add(Severity.ERROR, check, subject, message, evidence)

    def notice(self, check: str, subject: str, message: str, **evidence: Evidence) -> None:
        """Worth reading."""
        self._add(Severity.NOTICE, check, subject, message, evidence)

    def _add(self, severity: Severity, check: str, subject: str, message: str, evidence: dict[str, Evidence]) -> None:
        assert check in CHECKS, f"no such check: {check}"
        if self.only is not None and family(check) != "log" and not self.only(evidence):
            return
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
    sections: Mapping[str, Any] = field(default_factory=dict)
    """more that was measured on the way, as plain values: gaps, recompute"""

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

    def with_more(
        self, findings: Findings, counts: Mapping[str, int], families: Collection[str], sections: Mapping[str, Any]
    ) -> AuditReport:
        """And what was found beside it."""
        return replace(
            self,
            findings=_ordered([*self.findings, *findings.kept]),
            occurrences=Counter(self.occurrences) + findings.occurrences,
            counts={**self.counts, **counts},
            checks=tuple(c for c in CHECKS if c in self.checks or family(c) in families),
            sections={**self.sections, **sections},
        )

    def evidence(self) -> list[dict[str, Any]]:
        """Each check that was made: what it means, how much it went through, and what it found."""
        return [
            {
                "check": check,
                "meaning": CHECKS[check],
                "compared": self.counts.get(COMPARED[check], 0),
                "what": COMPARED[check].replace("_", " "),
                "errors": self.occurrences.get((Severity.ERROR, check), 0),
                "notices": self.occurrences.get((Severity.NOTICE, check), 0),
            }
            for check in self.checks
        ]

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
            "evidence": self.evidence(),
            **self.sections,
        }

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def text(self, *, every_check: bool = False) -> str:
        """For a person; with `every_check` a line for each."""
        state = "ended" if self.ended else "under way"
        lines = [f"audit of {self.run} ({state}): {self.errors} errors, {self.notices} notices"]
        lines.append("  " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.counts.items()))
        for finding in self.findings:
            lines.append(f"{finding.severity.value:6} {finding.check} {finding.subject}: {finding.message}")
        for (severity, check), count in sorted(self.occurrences.items()):
            if count > KEPT_PER_CHECK:
                lines.append(f"{severity.value:6} {check}: {count - KEPT_PER_CHECK} more of these")
        lines += [_check_line(one) for one in self.evidence()] if every_check else self._family_lines()
        lines.append(f"{len(self.checks)} checks made")
        return "\n".join(lines)

    def _family_lines(self) -> list[str]:
        lines = []
        for name, words in FAMILIES.items():
            made = [one for one in self.evidence() if family(one["check"]) == name]
            if made:
                errors, notices = sum(one["errors"] for one in made), sum(one["notices"] for one in made)
                lines.append(f"{name + ' ' + words:32} {len(made):3} checks, {errors} errors, {notices} notices")
        return lines


def _check_line(one: Mapping[str, Any]) -> str:
    state = "ERROR" if one["errors"] else "notice" if one["notices"] else "ok"
    return f"{state:6} {one['check']:24} {one['compared']:9,} {one['what']:22} {one['meaning']}"


def _ordered(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.severity is Severity.NOTICE))


def finish(
    run: str,
    ended: bool,
    findings: Findings,
    counts: Mapping[str, int],
    *,
    with_store: bool,
    sections: Mapping[str, Any] | None = None,
) -> AuditReport:
    """The report of what was collected, errors first."""
    made = {name for name in FAMILIES if name not in OPTIONAL or (name == "store" and with_store)}
    return AuditReport(
        run=run,
        ended=ended,
        findings=_ordered(findings.kept),
        occurrences=dict(findings.occurrences),
        counts=counts,
        checks=tuple(check for check in CHECKS if family(check) in made),
        sections=sections or {},
    )
