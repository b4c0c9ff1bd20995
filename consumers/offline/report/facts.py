"""The numbers on top, the audit, the environment and the configuration of a report. Secrets do not leave here. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from consumers.offline.audit.report import AuditReport
from consumers.offline.report.figure import Section, Table, Tile
from consumers.offline.report.reading import RunReading
from consumers.offline.report.steps import Steps
from schemas.checkpoint import Manifest

HIDDEN = "(set, not shown)"
SHOWN_FINDINGS = 60
_SECRET_SECTIONS = frozenset({"kafka.security"})
_SECRET_WORDS = re.compile(r"password|secret|token$|api_?key|credential|private", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=//)[^/@\s]+@")
_TENTHS = 10


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`section.key` -> value as text, without what must not be shown: whole secret sections, secret keys, the user
    part of an address.

    >>> flat({"mlflow": {"uri": "http://me:pw@host/"}, "kafka": {"security": {"sasl_mechanism": "PLAIN"}}})
    {'mlflow.uri': 'http://host/', 'kafka.security': '(set, not shown)'}
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name in _SECRET_SECTIONS or _SECRET_WORDS.search(key):
            found[name] = HIDDEN if value else "(not set)"
        elif isinstance(value, Mapping):
            found |= flat(value, f"{name}.") if value else {name: "{}"}
        else:
            found[name] = _USER_INFO.sub("", value if isinstance(value, str) else json.dumps(value))
    return found


# ---------------------------------------------------------------------- on top


def tiles(reading: RunReading, steps: Steps, max_lag: int | None, extra: Mapping[str, Any]) -> list[Tile]:
    """The three questions that come first: did it learn, how far off policy was it, what was lost."""
    return [_learnt(reading, extra), _off_policy(reading, steps, max_lag), _accounted(reading)]


def _learnt(reading: RunReading, extra: Mapping[str, Any]) -> Tile:
    first, last = extra.get("success_first"), extra.get("success_last")
    what = "mean reward of complete groups, first tenth to last tenth of the run"
    if first is None or last is None:
        column = [value for value in reading.ledger.column("critic/rewards/mean") if value == value]
        tenth = max(1, len(column) // _TENTHS)
        first, last = (sum(part) / len(part) if part else None for part in (column[:tenth], column[-tenth:]))
        what = "mean reward of the batches, first tenth to last tenth of the steps"
    if first is None or last is None:
        return Tile(question="Did it learn?", answer="-", detail="no training step has told a reward yet")
    held = [extra.get(f"held_out_greedy_success_{when}") for when in ("before", "after")]
    more = "" if None in held else f"; held out, greedy: {held[0]:.2f} to {held[1]:.2f}"
    return Tile(question="Did it learn?", answer=f"{first:.2f} \u2192 {last:.2f}", detail=what + more)


def _off_policy(reading: RunReading, steps: Steps, max_lag: int | None) -> Tile:
    lags = reading.ledger.lags
    total = sum(lags.values())
    if not total:
        return Tile(question="How far off policy?", answer="-", detail="nothing was trained yet")
    middle = sum(lag * count for lag, count in lags.items()) / total
    limit = "" if max_lag is None else f" of {max_lag} allowed"
    detail = f"training steps of policy lag, mean; at most {max(lags)}{limit}"
    age = reading.rows.ages.quantile(0.5)
    if age is not None:
        detail += f". Half of it was at most {age:.2g} s old"
    return Tile(
        question="How far off policy?", answer=f"{middle:.2f}", detail=detail,
        is_bad=max_lag is not None and max(lags) > max_lag,
    )  # fmt: skip


def _accounted(reading: RunReading) -> Tile:
    ledger = reading.ledger
    decided = ledger.trained.rows + ledger.dropped_rows
    open_rows = max(0, reading.rows.rows - decided)
    if not reading.rows.rows:
        return Tile(question="What became of the data?", answer="-", detail="no trajectory is in the log yet")
    reasons = sorted(ledger.dropped.items(), key=lambda item: -item[1].rows)[:3]
    why = f" ({', '.join(f'{tally.rows:,} {name}' for name, tally in reasons)})" if reasons else ""
    detail = (
        f"of {reading.rows.rows:,} trajectories were trained; {ledger.dropped_rows:,} dropped{why}, "
        f"{open_rows:,} not decided"
    )
    return Tile(
        question="What became of the data?", answer=f"{ledger.trained.rows / reading.rows.rows:.1%}", detail=detail,
        is_bad=ledger.is_ended and open_rows > 0,
    )  # fmt: skip


def facts(reading: RunReading, audit: AuditReport | None, extra: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Smaller numbers below them."""
    ledger, policy = reading.ledger, reading.policy
    live = sum(1 for life in policy.lives.values() if life.live_us is not None)
    idle = extra.get("trainer_idle_fraction"), extra.get("generator_idle_fraction")
    trained_tokens = sum(value for value in ledger.column("training/tokens") if value == value)
    found = [
        ("wall time", duration(policy.wall_s)),
        ("training steps", f"{len(ledger.versions):,}"),
        ("versions", f"{len(policy.lives):,}, {live:,} were live"),
        ("newest / live", f"{_or_none(reading.newest)} / {_or_none(reading.live)}"),
        ("workers", f"{len(policy.lanes):,}"),
        ("tokens sampled", f"{sum(h.total for h in reading.rows.tokens.values()):,.0f}"),
        ("tokens trained", f"{trained_tokens:,.0f}" if trained_tokens else "-"),
        ("idle, trainer / generators", " / ".join("-" if share is None else f"{share:.0%}" for share in idle)),
        ("audit", "not made" if audit is None else findings_words(audit)),
    ]
    if ledger.replayed:
        found.append(("uses again (replay)", f"{ledger.replayed:,}"))
    if reading.branches:
        found.append(("branches", f"{len(reading.branches) + 1:,}"))
    if policy.void_events:
        found.append(("void policy events", f"{policy.void_events:,}"))
    return found


def findings_words(audit: AuditReport) -> str:
    """How many of each."""
    counts = ((audit.errors, "error"), (audit.notices, "notice"))
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)


def duration(seconds: float) -> str:
    """For a person.

    >>> duration(75), duration(3.25), duration(7325)
    ('1 min 15 s', '3.2 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# ---------------------------------------------------------------------- audit, environment


def audit_section(audit: AuditReport | None) -> Section:
    """What the audit found."""
    if audit is None:
        lead = "The audit was not made for this report: driftlog audit makes it."
        return Section(id="audit", title="Audit", lead=lead)
    lead = (
        f"{len(audit.checks)} checks on log and checkpoints: {findings_words(audit)}. "
        "An error is a guarantee that does not hold; a notice is worth reading."
    )
    looked = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in audit.counts.items())
    rows = [(f.severity.value, f.check, f.subject, f.message) for f in audit.findings[:SHOWN_FINDINGS]]
    more = audit.errors + audit.notices - len(rows)
    note = f"Looked at: {looked}." + (f" {more} more findings are in the answer of driftlog audit." if more > 0 else "")
    table = Table(title="Findings", head=("", "check", "about", "what"), rows=rows, note=note)
    return Section(id="audit", title="Audit", lead=lead, parts=[table])


def environment(
    reading: RunReading, manifest: Manifest | None, configs: Sequence[Mapping[str, Any]], missing: str
) -> Section:
    """Where and under which settings it was trained."""
    rows: list[tuple[str, str]] = []
    if manifest is not None:
        rows += [
            ("checkpoint attempt", manifest.attempt_id),
            ("device", f"{manifest.device_type}, {manifest.threads} threads, {manifest.ranks} ranks"),
            ("dtype", ", ".join(f"{group}: {dtype}" for group, dtype in sorted(manifest.dtype.items()))),
            ("log-probability chunk", f"{manifest.logprob_chunk} tokens"),
            *((name, version) for name, version in sorted(manifest.library_versions.items())),
            *((f"fingerprint: {name}", value) for name, value in sorted(manifest.fingerprint.items())),
        ]
    rows += [
        (f"from version {version}", f"code {revision}, settings {digest[:12]}")
        for version, digest, revision in reading.ledger.segments
    ]
    parts = [
        Table(
            title="Environment", head=("", ""), rows=rows, width="half",
            note=missing or "From the manifest of the newest version, and the ledger.",
        )
    ]  # fmt: skip
    if configs:
        parts.append(_settings(configs))
    return Section(
        id="environment",
        title="Environment and configuration",
        lead="What is needed to train it again. Passwords and the like are not part of a report.",
        parts=parts,
    )


def _settings(configs: Sequence[Mapping[str, Any]]) -> Table:
    """The settings in force, and what they were before where they changed."""
    each = [flat(config) for config in configs]
    rows = []
    for name, value in each[-1].items():
        former = list(dict.fromkeys(config[name] for config in each[:-1] if config.get(name, value) != value))
        rows.append((name, value + (f"  (before: {', '.join(former)})" if former else "")))
    return Table(title="Configuration", head=("setting", "value"), rows=rows, width="half", is_folded=False)


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)
