"""From what was read to a page of values. Pure; `driftlog report` reads, this arranges, page.py writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consumers.offline.audit.report import AuditReport
from consumers.offline.report import facts, figures_fresh, figures_learning, figures_speed, figures_versions
from consumers.offline.report.figure import Page
from consumers.offline.report.reading import RunReading
from consumers.offline.report.steps import Steps
from schemas.checkpoint import Manifest
from schemas.headers import rfc3339


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a report shows and the log alone does not tell."""

    made_at_us: int
    build: str
    """code revision that made the report"""
    audit: AuditReport | None = None
    """None: it was not made"""
    configs: Sequence[Mapping[str, Any]] = ()
    """every configuration the run had, the one in force last"""
    manifest: Manifest | None = None
    """of the newest version"""
    manifest_problem: str = ""
    """why there is none"""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """as `driftlog summary` gives it; empty when the run does not add up"""
    summary_problem: str = ""


def build_page(reading: RunReading, beside: Beside) -> Page:
    """All sections; those of a run that has just begun say what is missing."""
    steps = Steps(reading.ledger)
    max_lag = _largest_lag(beside.configs)
    sections = [
        figures_learning.learning(reading, steps),
        figures_fresh.freshness(reading, steps, max_lag),
        figures_learning.update(steps),
        figures_fresh.drops(reading, steps),
        figures_versions.versions(reading),
        figures_speed.speed(reading, steps),
        figures_versions.lineage(reading),
        facts.audit_section(beside.audit),
        facts.environment(reading, beside.manifest, beside.configs, beside.manifest_problem),
    ]
    return Page(
        run=reading.run,
        state=_state(reading),
        line=_line(reading),
        foot=f"driftlog report, made {rfc3339(beside.made_at_us)} by {beside.build}, from the log and what is "
        "stored with the run.",
        tiles=facts.tiles(reading, steps, max_lag, beside.summary),
        facts=facts.facts(reading, beside.audit, beside.summary),
        notices=_notices(reading, beside),
        sections=sections,
    )


def _state(reading: RunReading) -> str:
    if reading.policy.started_us is None:
        return "not started"
    return "ended" if reading.ledger.is_ended and reading.policy.ended_us is not None else "running"


def _line(reading: RunReading) -> str:
    policy = reading.policy
    if policy.started_us is None:
        return "The log holds nothing of this run yet."
    begun = f"Started {rfc3339(policy.started_us)[:19]}Z"
    if _state(reading) == "ended":
        return f"{begun}, ended after {facts.duration(policy.wall_s)}: {policy.end_reason}."
    return (
        f"{begun}, running: read at offset {reading.ledger.read_up_to} of the ledger and {policy.read_up_to} of "
        f"policy, after {facts.duration(policy.wall_s)}."
    )


def _notices(reading: RunReading, beside: Beside) -> list[str]:
    found = []
    if beside.audit is not None and beside.audit.errors:
        found.append(f"The audit found {facts.findings_words(beside.audit)}: see below before trusting a number.")
    if beside.summary_problem:
        found.append(f"The run does not add up: {beside.summary_problem}")
    found += [f"{gap}: what stands on them is not in this report." for gap in reading.missing]
    if reading.ledger.problems:
        found.append(f"{reading.ledger.problems} ledger records cannot be read or were altered.")
    if reading.policy.started_us is not None and not reading.ledger.versions:
        found.append("Nothing is trained yet: plots by version are empty.")
    return found


def _largest_lag(configs: Sequence[Mapping[str, Any]]) -> int | None:
    """The limit of the configuration in force."""
    if not configs:
        return None
    trainer = configs[-1].get("trainer", {})
    down_weight = trainer.get("stale_action") == "down_weight" and trainer.get("hard_max_lag") is not None
    value = trainer.get("hard_max_lag" if down_weight else "max_lag")
    return int(value) if value is not None else None
