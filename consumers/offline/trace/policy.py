"""Traces of what the policy topic is about: one version, one worker."""

from __future__ import annotations

from collections import Counter
from typing import Any

from consumers.offline.outcomes import first_outcomes
from consumers.offline.run_log import LedgerTransaction, PolicyEntry, RunLog
from consumers.offline.trace.words import Trace, proof_facts, seconds, when
from consumers.offline.wholeness import readable_transactions
from schemas import policy_events as ev
from schemas.errors import UsageError
from schemas.ledger import Decision, StepCompleted, Subject
from schemas.policy_fold import PolicyFold


def trace_version(run_log: RunLog, version: int) -> Trace:
    """Parent, step, groups, proofs by worker, time live, manifest."""
    fold = PolicyFold()
    entries = list(run_log.policy(fold))
    state = fold.versions.get(version)
    if state is None:
        raise UsageError(f"version {version}: run {run_log.run} has versions 0 to {fold.newest}")
    event = state.event
    step = next(
        (
            t
            for t in readable_transactions(run_log)
            if isinstance(t.control, StepCompleted) and t.control.version_out == version
        ),
        None,
    )
    live = _live(entries, version)
    facts: dict[str, Any] = {
        "version": version,
        "parent": event.parent,
        "depth": event.depth,
        "status": state.status.value,
        "published_at_us": event.at_us,
        "policy_offset": state.offset,
        "manifest_uri": event.manifest_uri,
        "manifest_sha256": event.manifest_sha256,
        "bytes": event.bytes,
        "optimizer_step": event.optimizer_step,
        "live": live,
        "proofs": [
            proof_facts(entry.offset, entry)
            for entry in entries
            if isinstance(entry.event, ev.VersionLoaded) and entry.event.version == version
        ],
        "step": _step_facts(step),
    }
    parent = "no parent" if event.parent is None else f"parent {event.parent}"
    lines = [
        f"published {when(event.at_us)} at policy@{state.offset}: {parent}, depth {event.depth}, {state.status.value}",
        f"manifest {event.manifest_uri} sha256 {event.manifest_sha256[:16]}..., {event.bytes:,} bytes",
        *_step_lines(step),
        *(f"{proof.get('worker', '?')}: {proof['words']}" for proof in facts["proofs"]),
        *_live_lines(live, event.at_us),
    ]
    for entry in entries:
        if (
            entry.is_legal
            and isinstance(entry.event, ev.VersionFailed | ev.LoadFailed)
            and entry.event.version == version
        ):
            lines.append(f"{entry.event.type} at policy@{entry.offset}: {entry.event.reason}")
    return Trace(kind="version", subject=str(version), facts=facts, lines=tuple(lines))


def _live(entries: list[PolicyEntry], version: int) -> dict[str, Any] | None:
    """When the version went live, and until when; None when it never was."""
    live: dict[str, Any] | None = None
    for entry in entries:
        if not entry.is_legal or not isinstance(entry.event, ev.VersionActivated):
            continue
        if live is not None:
            return live | {"until_us": entry.event.at_us, "followed_by": entry.event.version}
        if entry.event.version == version:
            live = {"from_us": entry.event.at_us, "policy_offset": entry.offset, "acks": list(entry.event.acks)}
    return live


def _live_lines(live: dict[str, Any] | None, published_at_us: int) -> list[str]:
    if live is None:
        return ["never live"]
    words = f"live {when(live['from_us'])}, {seconds(live['from_us'] - published_at_us)} after publication"
    if "until_us" in live:
        words += f", for {seconds(live['until_us'] - live['from_us'])} until version {live['followed_by']}"
    return [f"{words} (policy@{live['policy_offset']}, acks {live['acks']})"]


def _step_facts(step: LedgerTransaction | None) -> dict[str, Any] | None:
    if step is None or not isinstance(step.control, StepCompleted):
        return None
    groups = [r.group_id for r in step.decisions if r.subject is Subject.GROUP and r.decision is Decision.TRAINED]
    dropped = Counter(
        r.reason for r in step.decisions if r.subject is Subject.TRAJECTORY and r.decision is Decision.DROPPED
    )
    return {
        "transaction": step.number,
        "ledger_offset": step.offset,
        "version_in": step.control.version_in,
        "groups": groups,
        "trajectories": step.control.trajectories,
        "dropped": dict(dropped),
        "batch_digest": step.control.batch_digest,
        "policy_read_up_to": step.control.policy_read_up_to,
        "metrics": dict(step.control.metrics),
        "phase_s": dict(step.control.phase_s),
    }


def _step_lines(step: LedgerTransaction | None) -> list[str]:
    facts = _step_facts(step)
    if facts is None:
        return ["made by no training step"]
    shown = ", ".join(facts["groups"][:4]) + (" ..." if len(facts["groups"]) > 4 else "")
    batch = f"{facts['trajectories']} trajectories of {len(facts['groups'])} groups ({shown})"
    lines = [
        f"trained from version {facts['version_in']} on {batch}; ledger@{facts['ledger_offset']}",
        f"batch digest {facts['batch_digest'][:16]}...",
    ]
    if facts["dropped"]:
        lines.append(
            "dropped beside it: " + ", ".join(f"{n} {reason}" for reason, n in sorted(facts["dropped"].items()))
        )
    return lines


def trace_worker(run_log: RunLog, worker: str) -> Trace | None:
    """Incarnations, events, what it sampled and what became of that. None for a name that no worker had."""
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    for entry in run_log.policy():
        if entry.event is None or getattr(entry.event, "worker", None) != worker:
            continue
        void = "" if entry.void is None else entry.void.reason
        events.append({"policy_offset": entry.offset, "void": void, **entry.event.model_dump(mode="json")})
        mark = f" VOID: {void}" if void else ""
        lines.append(f"{when(entry.event.at_us)} policy@{entry.offset} {_event_words(entry.event)}{mark}")
    beats = [beat for beat in run_log.heartbeats() if beat.worker == worker]
    if not events and not beats:
        return None
    by_version: Counter[int] = Counter()
    became: Counter[str] = Counter()
    outcomes = first_outcomes(run_log)
    tokens = 0
    for log_entry in run_log.trajectories():
        for row in log_entry.rows:
            if row.trajectory is None or row.trajectory.worker_id != worker:
                continue
            tokens += len(row.trajectory.token_ids)
            by_version.update({segment.version for segment in row.trajectory.segments})
            found = outcomes.get((log_entry.partition, log_entry.offset, row.row))
            decision = None if found is None else found.decision
            became["pending" if decision is None else decision.reason or decision.decision.value] += 1
    lines.append(f"{became.total()} trajectories, {tokens} tokens in the log: {_counts(became)}")
    if beats:
        last = beats[-1]
        lines.append(
            f"last heartbeat {when(last.at_us)}: {last.state}, version {last.version}, {len(last.claims)} claims, "
            f"{last.tokens_per_s:.0f} tokens/s"
        )
    facts = {
        "events": events,
        "trajectories_by_version": {str(version): count for version, count in sorted(by_version.items())},
        "trajectories": dict(became),
        "tokens": tokens,
        "last_heartbeat": beats[-1].model_dump(mode="json") if beats else None,
    }
    return Trace(kind="worker", subject=worker, facts=facts, lines=tuple(lines))


def _event_words(event: ev.AnyPolicyEvent) -> str:
    words: str = event.type
    for name in ("incarnation", "version", "reason"):
        value = getattr(event, name, None)
        if value is not None:
            words += f" {name} {value}"
    return words


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.most_common()) or "none"
