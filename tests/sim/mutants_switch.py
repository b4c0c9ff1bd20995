"""Bugs planted in workers, the coordinator, the policy fold and the store; see mutants_trainer for the rules."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from consumers import coordinator, garbage, switching
from consumers.trainer import publication, transactor
from infra import checkpoint_local
from infra.policy_follower import PolicyFollower
from producers import claim_watch, generator, outbox, probing, pulse, weights
from schemas import policy_events as ev
from schemas import policy_fold
from schemas.policy_fold import PolicyFold
from schemas.policy_state import OpenSwitch, Standing, VersionStatus

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- the switch


def a_version_is_activated_without_acks(patch: Patch) -> None:
    """The coordinator does not wait, and the services' fold does not void it."""
    patch.setattr(OpenSwitch, "waiting_for", property(lambda self: frozenset()))


def the_ack_of_an_old_incarnation_counts(patch: Patch) -> None:
    """A worker that was replaced stays in the switch with the ack of its former life."""
    take_out = policy_fold._take_out

    def keep_the_ack(fold: PolicyFold, key: Any, reason: str) -> None:
        if not (fold.switch is not None and key in fold.switch.acks and reason.startswith("replaced")):
            take_out(fold, key, reason)

    patch.setattr(policy_fold, "_take_out", keep_the_ack)


def a_worker_acks_before_it_loads(patch: Patch) -> None:
    """It takes over the new number and keeps the old weights, as a weight update that answered 200 and did nothing."""

    def pretend(engine: Any, directory: Path, version: int, *others: Any) -> probing.ProbeResult:
        if engine._weights is None:
            engine.load(directory, version)
        engine._version = version
        return probing.ProbeResult(diff_new=0.0, diff_old=None)

    patch.setattr(weights, "run_probe", pretend)


def the_probe_is_not_compared(patch: Patch) -> None:
    """An engine that loaded something else passes."""
    patch.setattr(probing, "_difference", lambda engine, probe: 0.0)


def generated_tokens_are_not_probed(patch: Patch) -> None:
    """Nobody generates behind a cached prefix before the ack: keys and values of the old weights go on answering."""
    patch.setattr(probing.GeneratedProbe, "after_load", lambda self, engine, probe: None)


def the_probe_meets_a_cold_cache(patch: Patch) -> None:
    """The second probe generates behind prefixes that nothing was cached for."""
    patch.setattr(probing.GeneratedProbe, "before_load", lambda self, engine, probe: None)


def the_prefix_cache_is_not_emptied(patch: Patch) -> None:
    """No load ever empties it: the second probe keeps such an engine from serving any second version."""
    from tests.fakes.tiny_policy import TinyEngine

    load = TinyEngine.load

    def keep(self: TinyEngine, directory: Path, version: int) -> None:
        cached = dict(self._cached)
        load(self, directory, version)
        self._cached.update(cached)

    patch.setattr(TinyEngine, "load", keep)


def the_version_before_is_fetched(patch: Patch) -> None:
    """The prefetched directory is that of the previous version; its own probe agrees with it."""
    begin = weights.WeightsKeeper._begin

    def wrong(self: weights.WeightsKeeper, fold: PolicyFold, me: Any, now_s: float) -> bool:
        begun = begin(self, fold, me, now_s)
        if begun and self._load is not None and self._load.target.version > 0:
            before = fold.versions[self._load.target.version - 1]
            if before.status is not VersionStatus.RETIRED:
                fetch = self._store.fetch
                self._fetch = self._executor.submit(fetch, before.event.manifest_uri, before.event.manifest_sha256)
        return begun

    patch.setattr(weights.WeightsKeeper, "_begin", wrong)


def a_worker_serves_with_weights_in_doubt(patch: Patch) -> None:
    """A load that died half way is forgotten, and the worker goes on."""
    fail = weights.WeightsKeeper._fail

    def forget(self: weights.WeightsKeeper, *args: Any) -> None:
        held = self.held
        fail(self, *args)
        self.held = held
        self._engine.resume()

    patch.setattr(weights.WeightsKeeper, "_fail", forget)


def tokens_are_sampled_while_weights_are_loaded(patch: Patch) -> None:
    """Draining and loading on another thread do not stop the decode loop."""
    from tests.fakes.tiny_policy import TinyEngine

    patch.setattr(weights.WeightsKeeper, "working_in_background", property(lambda self: False))
    patch.setattr(TinyEngine, "pause", lambda self, mode: None)


def a_lease_runs_out_unread(patch: Patch) -> None:
    """Time-outs are judged at once: not after reading to the end, and also while the policy topic is blocked."""
    patch.setattr(coordinator.CoordinatorService, "_is_certain", lambda self, suspects: bool(suspects))
    patch.setattr(PolicyFollower, "is_blocked", lambda self: False)


def the_coordinator_decides_before_it_has_read_the_log(patch: Patch) -> None:
    def at_once(self: coordinator.CoordinatorService) -> bool:
        self._ready = True
        return True

    patch.setattr(coordinator.CoordinatorService, "_caught_up", at_once)


def a_late_joiner_is_never_admitted(patch: Patch) -> None:
    patch.setattr(switching, "_admissions", lambda fold, rules, now_us: [])


def a_failed_switch_is_not_tried_again(patch: Patch) -> None:
    open_switch = switching._open_switch

    def once(fold: PolicyFold, *args: Any) -> Any:
        failed = fold.newest is not None and fold.versions[fold.newest].status is VersionStatus.FAILED
        return None if failed else open_switch(fold, *args)

    patch.setattr(switching, "_open_switch", once)


def leases_of_the_dead_are_kept(patch: Patch) -> None:
    """The coordinator's table grows with every incarnation there ever was."""

    def keep(self: coordinator.CoordinatorService, fold: PolicyFold, now_s: float) -> None:
        current = fold.with_standing(Standing.JOINED) | fold.with_standing(Standing.ADMITTED)
        for key in current - self._leases.keys():
            seen = switching.LastSeen(at_us=None, offset=None)
            self._leases[key] = coordinator._Lease(seen, now_s + self._s.lease_s)

    patch.setattr(coordinator.CoordinatorService, "_keep_leases", keep)


# ---------------------------------------------------------------------- the worker's side of the log


def prompts_are_committed_before_the_trajectories_are_acknowledged(patch: Patch) -> None:
    put = outbox.Outbox.put

    def early(self: outbox.Outbox, claim: Any, rows: Any, traceparent: Any = None) -> None:
        put(self, claim, rows, traceparent)
        self.__dict__.setdefault("early", []).append(claim)

    def publish(self: generator.GeneratorService) -> bool:
        for partition, offset in self._outbox.__dict__.pop("early", []):
            self._intake.finish(partition, offset)
        self._intake.commit()
        return bool(self._outbox.step())

    patch.setattr(outbox.Outbox, "put", early)
    patch.setattr(generator.GeneratorService, "_publish", publish)


def a_failed_send_is_forgotten(patch: Patch) -> None:
    """A record that was not acknowledged is not sent again."""
    patch.setattr(outbox, "_SEND_TRIES", 1)


def heartbeats_name_no_claims(patch: Patch) -> None:
    """Nobody learns over which prompt a worker died."""
    message = pulse.Pulse.message
    patch.setattr(pulse.Pulse, "message", lambda self, name, state, held, claims: message(self, name, state, held, ()))


def deaths_are_counted_before_the_heartbeats_are_read(patch: Patch) -> None:
    """A worker claims prompts although it has not read the last words of everybody yet."""
    advance = claim_watch.ClaimWatch.advance

    def whatever_came(self: claim_watch.ClaimWatch) -> bool:
        advance(self)
        return True

    patch.setattr(claim_watch.ClaimWatch, "advance", whatever_came)


# ---------------------------------------------------------------------- checkpoints


def checkpoints_are_named_by_version(patch: Patch) -> None:
    """A zombie, or a step that failed after its save, puts other bytes behind a number."""
    publish, exists = publication.Publication.publish, checkpoint_local.LocalTree.publish

    def numbered(self: Any, *, version: int, **rest: Any) -> Any:
        self._new_attempt_id = lambda: f"v{version}"
        return publish(self, version=version, **rest)

    def replacing(self: Any, staging: Path, address: Any) -> None:
        shutil.rmtree(self._directory(address), ignore_errors=True)
        exists(self, staging, address)

    patch.setattr(publication.Publication, "publish", numbered)
    patch.setattr(checkpoint_local.LocalTree, "exists", lambda self, address: False)
    patch.setattr(checkpoint_local.LocalTree, "publish", replacing)


def a_version_is_published_before_its_checkpoint_is_renamed(patch: Patch) -> None:
    waiting: list[tuple[Path, Path]] = []
    commit = transactor.Transactor._commit

    def later(self: Any, staging: Path, address: Any) -> None:
        waiting[:] = [(staging, self._directory(address))]

    def then_rename(self: Any, handed_over: Any) -> int:
        try:
            end = commit(self, handed_over)
        except BaseException:
            waiting.clear()  # the process is gone, or begins anew: nobody renames it any more
            raise
        for staging, target in waiting:
            os.rename(staging, target)
        waiting.clear()
        return end

    patch.setattr(checkpoint_local.LocalTree, "publish", later)
    patch.setattr(transactor.Transactor, "_commit", then_rename)


def files_are_not_verified(patch: Patch) -> None:
    """Neither hashes nor the probe stand between a torn file and the engine."""
    from schemas.checkpoint import MANIFEST_NAME, decode_manifest

    def trusting(directory: Path, address: Any, manifest_sha256: str, limits: Any) -> Any:
        return decode_manifest((directory / MANIFEST_NAME).read_bytes(), manifest_sha256)

    patch.setattr(checkpoint_local, "verify", trusting)
    patch.setattr(probing, "_difference", lambda engine, probe: 0.0)


def a_version_that_is_still_needed_is_retired(patch: Patch) -> None:
    """Retention keeps one version less than the lag allows, the live one included."""

    def eager(fold: PolicyFold, rules: Any, now_us: int) -> list[ev.AnyPolicyEvent]:
        alive = sorted(n for n, state in fold.versions.items() if state.status is not VersionStatus.RETIRED)
        return [
            ev.VersionRetired(run=rules.run, at_us=now_us, version=number, rule="eager")
            for number in alive[:-1]
            if number != fold.last_with_state()
        ]

    def lax(fold: PolicyFold, offset: int, event: ev.VersionRetired) -> None:
        fold.versions[event.version].status = VersionStatus.RETIRED

    patch.setattr(switching, "_retirements", eager)
    patch.setitem(policy_fold._HANDLERS, ev.VersionRetired, lax)


def a_shared_checkpoint_is_deleted(patch: Patch) -> None:
    """A branch start stands on its parent's directory; retiring the parent removes it."""
    patch.setattr(coordinator, "_is_shared", lambda fold, version: False)


def garbage_is_whatever_is_not_live(patch: Patch) -> None:
    """A directory that an event names is collected: a version between publication and switch, or a kept one."""
    live = [VersionStatus.LIVE]
    patch.setattr(
        garbage, "kept_uris", lambda fold: {s.event.manifest_uri for s in fold.versions.values() if s.status in live}
    )
