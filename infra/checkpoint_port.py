"""The CheckpointStore port: immutable checkpoints that only an event gives a number (adapter: checkpoint_store)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from schemas.checkpoint import Manifest

Write = Callable[[Path], Callable[[], None] | None]
"""Writes the files of a checkpoint into a directory. What takes computing rather than the disk may be left to what it
returns, which runs while the files that are there are on their way to the disk, and writes new ones only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What VersionPublished says of a checkpoint."""

    manifest_uri: str
    manifest_sha256: str
    bytes: int
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """where the seconds went: write, hash, publish, and fsync beside those; empty: not measured"""


class CheckpointStore(Protocol):
    """Immutable checkpoints under `<root>/<run>/<attempt id>/`; see design: only the event gives a number."""

    def save(self, attempt_id: str, write: Write, manifest: Manifest) -> SavedCheckpoint:
        """Call `write` with a fresh temporary directory, hash and fsync what it wrote, write manifest.json last
        (the given manifest with `files` filled in), rename once. StoreFull leaves nothing behind."""
        ...

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Manifest]:
        """A local directory whose every file was verified against the manifest, and the manifest against the
        hash. CheckpointMissing, CheckpointInvalid, CheckpointRefused."""
        ...

    def delete(self, manifest_uri: str) -> None:
        """Remove a retired version's directory. Idempotent."""
        ...

    def collect_garbage(
        self, keep_uris: Collection[str], *, grace_s: float, now_us: int, at_most: int
    ) -> Sequence[str]:
        """Remove up to `at_most` directories that no event names and that were last written more than `grace_s` ago:
        leftovers of crashed saves, and complete ones not in `keep_uris`. `grace_s` must exceed the longest save plus
        its transaction, and how far this clock and the store's differ. With an empty `keep_uris` complete directories
        stay: more likely nothing was read yet than a run without versions. Returns the names removed."""
        ...

    def attempts(self) -> Sequence[str]:
        """Attempt ids of complete directories of this run."""
        ...

    def look_at(self, attempt_id: str) -> tuple[str, Manifest]:
        """Where a complete directory of this run lies (a path or a url), and its manifest as it lies there: it is
        read, nothing is verified. CheckpointMissing, CheckpointInvalid."""
        ...
