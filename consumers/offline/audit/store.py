"""The checkpoint store against the events: every byte of every version that is not retired."""

from __future__ import annotations

from consumers.offline.audit.index import RunIndex
from consumers.offline.audit.replayable import Stored, stored
from consumers.offline.audit.report import Findings
from infra.checkpoint_files import parse_manifest_uri
from infra.ports import CheckpointStore
from schemas.checkpoint import Manifest
from schemas.errors import CheckpointError
from schemas.policy_events import VersionPublished
from schemas.policy_state import VersionState, VersionStatus


def check_store(index: RunIndex, store: CheckpointStore, findings: Findings) -> tuple[int, dict[int, Stored]]:
    """Verify every version: how many were looked at, and those that are as published."""
    intact: dict[int, Stored] = {}
    named: dict[str, int] = {}
    checked = 0
    for version, state in sorted(index.fold.versions.items()):
        event = state.event
        try:
            attempt = parse_manifest_uri(event.manifest_uri).attempt_id
        except CheckpointError as error:
            findings.error("store.manifest", f"version {version}", str(error), version=version)
            continue
        is_branch_start = _is_branch_start(index.fold.versions, event)
        if attempt in named and not is_branch_start:
            message = f"names the directory of version {named[attempt]}: {event.manifest_uri}"
            findings.error("store.manifest", f"version {version}", message, version=version)
        named[attempt] = version
        if state.status is VersionStatus.RETIRED:
            continue
        checked += 1
        try:
            directory, manifest = store.fetch(event.manifest_uri, event.manifest_sha256)
        except CheckpointError as error:
            findings.error(
                "store.checkpoint", f"version {version}", str(error), version=version, manifest_uri=event.manifest_uri
            )
            continue
        intact[version] = stored(directory, manifest)
        for problem in _disagreements(event, manifest, is_branch_start=is_branch_start):
            findings.error("store.manifest", f"version {version}", problem, version=version)
    unnamed = [attempt for attempt in store.attempts() if attempt not in named]
    if unnamed:
        findings.notice(
            "store.unnamed",
            unnamed[0],
            f"{len(unnamed)} directories that no event names (the first is {unnamed[0]})",
            count=len(unnamed),
        )
    return checked, intact


def _is_branch_start(versions: dict[int, VersionState], event: VersionPublished) -> bool:
    return event.parent is not None and event.parent in versions and versions[event.parent].depth == event.depth


def _disagreements(event: VersionPublished, manifest: Manifest, *, is_branch_start: bool) -> list[str]:
    problems = []
    if manifest.run != event.run:
        problems.append(f"the manifest is of run {manifest.run}")
    if manifest.parent != event.parent and not is_branch_start:
        problems.append(f"the manifest says parent {manifest.parent}, the event {event.parent}")
    if manifest.optimizer_step != event.optimizer_step:
        problems.append(f"the manifest says optimizer step {manifest.optimizer_step}, the event {event.optimizer_step}")
    total = sum(entry.bytes for entry in manifest.files) + len(manifest.encode())
    if total != event.bytes:
        problems.append(f"the event says {event.bytes} bytes, manifest and files have {total}")
    return problems
