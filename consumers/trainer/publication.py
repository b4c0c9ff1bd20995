"""Checkpoints of the trainer: written before the transaction that gives them a version number.

`draft` looks at the learner, `save` only writes: a draft of a copy may be saved while training goes on.
Directories carry an attempt id, so a zombie or a failed attempt never puts other bytes behind a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from consumers.trainer.batch import Learner
from infra.ports import CheckpointStore, Clock, Write
from schemas.checkpoint import Manifest
from schemas.errors import CheckpointMissing, EnvironmentMissing, IllegalState
from schemas.ids import RunId
from schemas.policy_events import VersionPublished


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint that is not written yet, and the version it is to be."""

    manifest: Manifest
    write: Write
    version: int
    parent: int | None
    depth: int
    oldest_open_request: int
    seconds: float
    """to make the draft: the copy where it is one, and the probe where that is not computed from the copy"""


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
        self.last_phase_s: Mapping[str, float] = {}
        """and where the last one that came to its end spent them"""

    def require_untrained(self) -> None:
        """This is the rule that keeps an empty log (a broker that was lost and made anew) from beginning a run over the
        checkpoints of one: garbage rounds would take them for leftovers. EnvironmentMissing says what is there.

        A first attempt that died before its commit leaves version 0 only, and that was trained from nothing."""
        looks = [self._store.look_at(attempt_id) for attempt_id in self._store.attempts()]
        trained = [(manifest.optimizer_step, place) for place, manifest in looks if manifest.parent is not None]
        if not trained:
            return
        optimizer_step, place = max(trained)
        raise EnvironmentMissing(
            f"the log has no record of run {self._run!r}, but the checkpoint store has trained versions of it: "
            f"{len(trained)}, the furthest (optimizer step {optimizer_step}) in {place}. The broker has lost the run, "
            "and one begun anew would remove them as garbage. Bring the broker's data back; or go on from one of them "
            f"under another name: --run NAME --set model.init={place}; or move this run's directory out of the store"
        )

    def publish(
        self, *, version: int, parent: int | None, depth: int, oldest_open_request: int, with_state: bool = True
    ) -> VersionPublished:
        """Save the learner's weights and state; the event that will make them this version."""
        started_s = self._clock.monotonic_s()
        published = self.save(
            self.draft(
                version=version,
                parent=parent,
                depth=depth,
                oldest_open_request=oldest_open_request,
                with_state=with_state,
                copied=False,
            )
        )
        self.last_publish_s = self._clock.monotonic_s() - started_s
        return published

    def draft(
        self, *, version: int, parent: int | None, depth: int, oldest_open_request: int, with_state: bool, copied: bool
    ) -> Draft:
        """What the learner holds now, as this version; `copied`: to be saved while it trains on."""
        started_s = self._clock.monotonic_s()
        manifest = Manifest(
            run=self._run,
            attempt_id=self._new_attempt_id(),
            parent=parent,
            has_state=with_state,
            code_revision=self._code_revision,
            config_digest=self._config_digest,
            **dict(self._learner.manifest_fields()),
        )
        if copied:
            write = self._learner.copy(with_state=with_state).begin_save
        else:
            write = partial(self._learner.begin_save, with_state=with_state)
        return Draft(
            manifest=manifest,
            write=write,
            version=version,
            parent=parent,
            depth=depth,
            oldest_open_request=oldest_open_request,
            seconds=self._clock.monotonic_s() - started_s,
        )

    def save(self, draft: Draft) -> VersionPublished:
        """Write a draft; the event that will make it a version. A copied one on any thread."""
        manifest = draft.manifest
        saved = self._store.save(manifest.attempt_id, draft.write, manifest)
        self.last_phase_s = {"draft": draft.seconds, **saved.phase_s}
        return VersionPublished(
            run=self._run,
            at_us=self._clock.now_us(),
            version=draft.version,
            parent=draft.parent,
            depth=draft.depth,
            manifest_uri=saved.manifest_uri,
            manifest_sha256=saved.manifest_sha256,
            bytes=saved.bytes,
            optimizer_step=manifest.optimizer_step,
            oldest_open_request=draft.oldest_open_request,
            has_state=manifest.has_state,
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
