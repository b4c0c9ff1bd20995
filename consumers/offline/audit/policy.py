"""G4: what went live was proven; and what in `policy` counts for nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from consumers.offline.audit.index import RunIndex
from consumers.offline.audit.report import Findings
from consumers.offline.run_log import PolicyEntry
from schemas import policy_events as ev
from schemas.policy_fold import PolicyFold

# Written by the fenced trainer inside transactions: none of them may ever be illegal where it stands.
_TRAINER_EVENTS = (ev.RunStarted, ev.VersionPublished, ev.BranchStarted, ev.RunEnded)


def check_policy(index: RunIndex, findings: Findings) -> None:
    """Void, unreadable and altered events; activations; weak proofs."""
    voids: Counter[str] = Counter()
    examples: dict[str, str] = {}
    unreadable = []
    for entry in index.policy:
        if entry.is_damaged and entry.event is not None:
            findings.error(
                "G4.policy_record",
                f"policy@{entry.offset}",
                f"{entry.event.type}: the bytes are not those its ce_id was made from: the record was altered",
                offset=entry.offset,
            )
        if entry.event is None:
            unreadable.append(entry.offset)
        elif entry.void is not None:
            if isinstance(entry.event, _TRAINER_EVENTS):
                findings.error(
                    "G4.trainer_event_void",
                    f"policy@{entry.offset}",
                    f"{entry.void.type} is void: {entry.void.reason}",
                    offset=entry.offset,
                )
            voids[entry.void.type] += 1
            examples.setdefault(entry.void.type, f"policy@{entry.offset}: {entry.void.reason}")
    for name, count in sorted(voids.items()):
        findings.notice("G4.void_events", name, f"{count} void, the first {examples[name]}", count=count)
    if unreadable:
        findings.notice(
            "G4.unreadable_events",
            f"policy@{unreadable[0]}",
            f"{len(unreadable)} records cannot be decoded",
            count=len(unreadable),
        )
    check_activations(index.policy, index.fold, findings)
    _check_bytes(index, findings)
    weak = [(offset, proof) for offset, proof in sorted(index.fold.proofs.items()) if proof.weak]
    if weak:
        offset, proof = weak[0]
        whose = f"version {proof.version} by {proof.worker}"
        findings.notice(
            "G4.weak_proofs",
            f"policy@{offset}",
            f"{len(weak)} of {len(index.fold.proofs)} proofs are weak, the first of {whose}",
            count=len(weak),
        )


def _check_bytes(index: RunIndex, findings: Findings) -> None:
    """A worker checks the sha256 before it loads: where a proof names another one, the event was changed afterwards."""
    for entry in index.policy:
        event = entry.event
        published = index.fold.versions.get(event.version) if isinstance(event, ev.VersionLoaded) else None
        if not isinstance(event, ev.VersionLoaded) or published is None:
            continue
        if event.manifest_sha256 != published.event.manifest_sha256:
            words = (
                f"{event.worker}/{event.incarnation} proved manifest {event.manifest_sha256[:12]}... at policy@"
                f"{entry.offset}, policy@{published.offset} published {published.event.manifest_sha256[:12]}..."
            )
            findings.error("G4.other_bytes", f"version {event.version}", words, version=event.version)


def check_activations(policy: Sequence[PolicyEntry], fold: PolicyFold, findings: Findings) -> None:
    """Every activation that counts, against the acks themselves. The fold refuses a bad one; this looks again."""
    loaded = {
        entry.offset: entry.event for entry in policy if entry.is_legal and isinstance(entry.event, ev.VersionLoaded)
    }
    for entry in policy:
        if not entry.is_legal or not isinstance(entry.event, ev.VersionActivated):
            continue
        event = entry.event
        subject = f"version {event.version}"
        published = fold.versions.get(event.version)
        if not event.acks:
            findings.error(
                "G4.live_without_proof",
                subject,
                f"activated at policy@{entry.offset} on no ack at all",
                version=event.version,
            )
        for ack in event.acks:
            proof = loaded.get(ack)
            problem = None
            if proof is None or ack >= entry.offset:
                problem = f"policy@{ack} is no legal VersionLoaded before it"
            elif proof.version != event.version or proof.switch != event.switch:
                problem = f"policy@{ack} proves version {proof.version} in switch {proof.switch}"
            elif published is None or proof.manifest_sha256 != published.event.manifest_sha256:
                problem = f"policy@{ack} proves other bytes"
            if problem is not None:
                message = f"activated at policy@{entry.offset}: {problem}"
                findings.error("G4.live_without_proof", subject, message, version=event.version)
