"""Checkpoints of the trainer: written before the transaction that gives them a version number.

Directories carry an attempt id, so a zombie or a failed attempt never puts other bytes behind a number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from consumers.trainer.batch import Learner
from infra.ports import CheckpointStore, Clock
from schemas.checkpoint import Manifest
from schemas.errors import CheckpointMissing, IllegalState
from schemas.ids import RunId
from schemas.policy_events import VersionPublished


class Publication:
    """Saves what the learner holds, restores what an event names."""

    def __init__(
        self,
        *,
        run: RunId,
        store: CheckpointStore,
        learner: Learner,
        clock: Clock,
        new_attempt_id: Callable[[], str],
        config_digest: str,
        code_revision: str,
    ) -> None:
        self._run = run
        self._store = store
        self._learner = learner
        self._clock = clock
        self._new_attempt_id = new_attempt_id
        self._config_digest = config_digest
        self._code_revision = code_revision
        self.last_publish_s = 0.0
        """seconds the last save took"""

    def publish(
        self, *, version: int, parent: int | None, depth: int, oldest_open_request: int, with_state: bool = True
    ) -> VersionPublished:
        """Save the learner's weights and state; the event that will make them this version."""
        started_s = self._clock.monotonic_s()
        attempt_id = self._new_attempt_id()
        fields = dict(self._learner.manifest_fields())
        manifest = Manifest(
            run=self._run,
            attempt_id=attempt_id,
            parent=parent,
            has_state=with_state,
            code_revision=self._code_revision,
            config_digest=self._config_digest,
            **fields,
        )
        saved = self._store.save(attempt_id, partial(self._learner.save, with_state=with_state), manifest)
        self.last_publish_s = self._clock.monotonic_s() - started_s
        return VersionPublished(
            run=self._run,
            at_us=self._clock.now_us(),
            version=version,
            parent=parent,
            depth=depth,
            manifest_uri=saved.manifest_uri,
            manifest_sha256=saved.manifest_sha256,
            bytes=saved.bytes,
            optimizer_step=manifest.optimizer_step,
            oldest_open_request=oldest_open_request,
            has_state=with_state,
        )

    def restore(self, learner: Learner, published: VersionPublished) -> None:
        """Put the learner where this version was made. A committed version that is not there is a loud stop."""
        try:
            directory, manifest = self._store.fetch(published.manifest_uri, published.manifest_sha256)
        except CheckpointMissing as error:
            raise IllegalState(
                f"version {published.version} is committed but its checkpoint {published.manifest_uri} is missing "
                f"({error}); restore the store from a backup, or branch from an older version"
            ) from error
        if not manifest.has_state:
            raise IllegalState(
                f"version {published.version} was saved without optimizer state; branch from one that has it"
            )
        learner.restore(directory, with_state=True)
