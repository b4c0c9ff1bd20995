"""What a run's checkpoint store still says of its trainer: fingerprint, ranks, tokenizer; and where versions lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlog.policies import base_directory
from driftlog.run_reading import OpenedRun
from schemas.errors import CheckpointError, UsageError
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus

if TYPE_CHECKING:
    from infra.model import Policy


@dataclass(slots=True, kw_only=True)
class Retained:
    """Mutable only in that the model is loaded when somebody asks for its tokenizer."""

    fingerprint: Mapping[str, str]
    """of the trainer"""
    ranks: int
    directory: Path | None
    """of the checkpoint it was read from"""
    base: Path | None = None
    """of a checkpoint that is an adapter"""
    notes: tuple[str, ...] = ()
    _policy: Policy | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion by the run's tokenizer. UsageError when no checkpoint is left to take it from."""
        if self._policy is None:
            if self.directory is None:
                raise UsageError("text was not kept, and no checkpoint is left whose tokenizer could decode the tokens")
            from infra.model_adapter import load_served

            self._policy = load_served(self.directory, self.base)
        return self._policy.decode_all([list(tokens)])[0]


def retained(at: OpenedRun) -> Retained:
    """From the newest checkpoint that is there; from the rows that were trained where none is."""
    fold = _fold(at)
    store = at.store()
    kept = [n for n in sorted(fold.versions, reverse=True) if fold.versions[n].status is not VersionStatus.RETIRED]
    for number in kept[:3]:
        event = fold.versions[number].event
        try:
            directory, manifest = store.fetch(event.manifest_uri, event.manifest_sha256)
        except CheckpointError:
            continue
        return Retained(
            fingerprint=dict(manifest.fingerprint),
            ranks=_ranks(manifest),
            directory=directory,
            base=base_directory(at.config, at.run),
        )
    words = "no checkpoint is left: the trainer's tokenizer and precision are taken from the rows it trained"
    return Retained(fingerprint=_trained_fingerprint(at), ranks=1, directory=None, notes=(words,))


def version_directory(at: OpenedRun, version: int) -> Path:
    """The verified checkpoint of a version. UsageError for one that was never published."""
    fold = _fold(at)
    if version not in fold.versions:
        raise UsageError(f"--model {version}: the run has versions 0 to {fold.newest}")
    event = fold.versions[version].event
    return at.store().fetch(event.manifest_uri, event.manifest_sha256)[0]


def _fold(at: OpenedRun) -> PolicyFold:
    fold = PolicyFold()
    for _ in at.log().policy(fold):
        pass
    return fold


def _ranks(manifest: Any) -> int:
    return int(getattr(manifest, "ranks", 1) or 1)


def _trained_fingerprint(at: OpenedRun) -> dict[str, str]:
    """Trained rows have the trainer's tokenizer, or they would have been refused."""
    from consumers.offline.trained_steps import trained_steps

    for step in trained_steps(at.log()):
        for row in step.rows:
            if row is not None:
                return {"tokenizer_digest": row.fingerprint.tokenizer_digest}
    return {"tokenizer_digest": ""}
