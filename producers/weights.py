"""Holds a worker's weights proven: fetch, drain, load, probe, acknowledge (the worker's half of the switch, G4).

A worker whose weights are in doubt serves nothing. Heavy work (fetch and hash, load and score) runs on the
executor, off the thread that polls and sends heartbeats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from infra.logs import event
from infra.ports import CheckpointStore, Clock, Delivery, GenerationEngine
from producers.probing import GeneratedProbe, ProbeResult, run_probe
from producers.switch_target import LoadTarget, load_target
from schemas.checkpoint import Manifest
from schemas.errors import CheckpointError, CheckpointMissing, DriftlogError, LogError
from schemas.policy_events import AnyPolicyEvent, LoadFailed, VersionLoaded
from schemas.policy_fold import PolicyFold
from schemas.policy_state import WorkerKey

log = logging.getLogger(__name__)


_LONGEST_LOOK_S = 5.0
"""between two looks for a checkpoint that is not there yet: every worker of the switch waits for the last one"""


class Stage(StrEnum):
    """Where a load stands."""

    IDLE = "idle"
    FETCHING = "fetching"
    DRAINING = "draining"
    LOADING = "loading"
    PROVING = "proving"
    """the ack is on its way to the log and back through the fold"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSettings:
    """Limits of one worker."""

    run: str
    in_flight: Literal["finish", "keep"] = "finish"
    """finish: running groups end under the old weights before a swap; keep: they go on under the new ones, as a new
    segment"""
    drain_timeout_s: float
    fetch_timeout_s: float
    """network file systems may show a checkpoint late"""
    load_tries: int
    retry_wait_s: float
    probe_tolerance: float
    """max |worker - trainer| log-probability, by served dtype"""
    always_probe_generated: bool = False
    """generate for the second probe also where the engine caches no prefixes"""


@dataclass(slots=True, kw_only=True)
class _Load:
    """One load under way."""

    target: LoadTarget
    manifest_sha256: str
    manifest_uri: str
    started_s: float
    stage_started_s: float
    look_wait_s: float
    """before the next look for a checkpoint that is not there yet"""
    directory: Path | None = None
    result: ProbeResult | None = None
    ack: Delivery | None = None
    ack_offset: int | None = None
    tries: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)


class WeightsKeeper:
    """State machine; `step` never waits."""

    def __init__(
        self,
        settings: WeightsSettings,
        *,
        engine: GenerationEngine,
        store: CheckpointStore,
        executor: Executor,
        clock: Clock,
        send: Callable[[AnyPolicyEvent], Delivery],
    ) -> None:
        self._s = settings
        self._engine = engine
        self._store = store
        self._executor = executor
        self._clock = clock
        self._send = send
        self.stage = Stage.IDLE
        self.held: int | None = None
        """version proven by the current incarnation; None: serve nothing"""
        self._load: _Load | None = None
        self._fetch: Future[tuple[Path, Manifest]] | None = None
        self._probe: Future[ProbeResult] | None = None
        self._generated = GeneratedProbe(always=settings.always_probe_generated)
        self._retry_at_s = 0.0
        self._failures = 0

    @property
    def holds_back(self) -> bool:
        """No request may be admitted now: draining, loading or proving."""
        return self.stage in (Stage.DRAINING, Stage.LOADING, Stage.PROVING)

    @property
    def working_in_background(self) -> bool:
        """The engine is in use by the executor, or its proof is on the way to the log: do not sample."""
        return self._probe is not None or self.stage is Stage.PROVING

    def new_incarnation(self) -> None:
        """The worker joined again: proofs of the old incarnation count for nothing."""
        self.held = None
        if self.stage is Stage.PROVING:
            self._finish()

    def step(self, fold: PolicyFold, me: WorkerKey) -> bool:
        """Go one stage further where possible; True when something changed."""
        now_s = self._clock.monotonic_s()
        if self.stage is Stage.IDLE:
            return self._begin(fold, me, now_s)
        assert self._load is not None
        if self.stage is Stage.FETCHING:
            return self._fetching(fold, me, self._load, now_s)
        if self.stage is Stage.DRAINING:
            return self._draining(fold, me, self._load, now_s)
        if self.stage is Stage.LOADING:
            return self._loading(me, self._load, now_s)
        return self._proving(fold, self._load)

    # ------------------------------------------------------------------ stages

    def _begin(self, fold: PolicyFold, me: WorkerKey, now_s: float) -> bool:
        target = load_target(fold, me, self.held)
        if target is None or (target.switch is None and now_s < self._retry_at_s):
            return False
        published = fold.versions[target.version].event
        self._load = _Load(
            target=target,
            manifest_sha256=published.manifest_sha256,
            manifest_uri=published.manifest_uri,
            started_s=now_s,
            stage_started_s=now_s,
            look_wait_s=self._s.retry_wait_s,
        )
        self._enter(Stage.FETCHING, now_s)
        self._fetch = self._executor.submit(self._store.fetch, published.manifest_uri, published.manifest_sha256)
        return True

    def _fetching(self, fold: PolicyFold, me: WorkerKey, load: _Load, now_s: float) -> bool:
        if self._fetch is None:  # waiting to look again
            if now_s < self._retry_at_s:
                return False
            self._fetch = self._executor.submit(self._store.fetch, load.manifest_uri, load.manifest_sha256)
            return True
        if not self._fetch.done():
            return False
        future, self._fetch = self._fetch, None
        if load_target(fold, me, self.held) != load.target:
            self._finish()  # the switch ended, or a newer one began: nothing was touched
            return True
        try:
            directory, _ = future.result()
        except CheckpointMissing as error:
            left_s = load.started_s + self._s.fetch_timeout_s - now_s
            if left_s > 0:
                # The last look is at the limit and never after it: the switch deadline counts on that.
                self._retry_at_s = now_s + min(load.look_wait_s, left_s)
                load.look_wait_s = min(2 * load.look_wait_s, _LONGEST_LOOK_S)
                return True
            self._fail(me, load, str(error), now_s)
            return True
        except (CheckpointError, OSError) as error:
            self._fail(me, load, str(error), now_s)
            return True
        load.directory = directory
        self._enter(Stage.DRAINING, now_s)
        self._engine.pause(self._s.in_flight)
        return True

    def _draining(self, fold: PolicyFold, me: WorkerKey, load: _Load, now_s: float) -> bool:
        if load_target(fold, me, self.held) != load.target:
            self._finish()  # nothing was touched
            return True
        if self._engine.running_groups() and self._s.in_flight == "finish":
            if now_s - load.stage_started_s < self._s.drain_timeout_s:
                return False
            event(log, "drain_timeout", policy_version=load.target.version)
            self._engine.pause("keep")
        self._enter(Stage.LOADING, now_s)
        self._probe = self._start_probe(load, self.held)
        return True

    def _loading(self, me: WorkerKey, load: _Load, now_s: float) -> bool:
        assert self._probe is not None
        if not self._probe.done():
            return False
        future, self._probe = self._probe, None
        try:
            result = future.result()
        except (DriftlogError, OSError) as error:
            self._load_failed(me, load, str(error), now_s)
            return True
        self.held = None  # the new weights are in the engine; they count once the proof is read back
        problem = result.problem(self._s.probe_tolerance)
        if problem is not None:
            self._load_failed(me, load, problem, now_s)
            return True
        load.result = result
        load.phase_s |= result.phase_s
        self._enter(Stage.PROVING, now_s)
        load.ack = self._send(self._loaded(me, load, result))
        return True

    def _proving(self, fold: PolicyFold, load: _Load) -> bool:
        assert load.ack is not None
        if load.ack_offset is None:
            if not load.ack.done():
                return False
            try:
                load.ack_offset = load.ack.result(0.0).offset
            except LogError as error:
                event(log, "ack_not_delivered", level=logging.WARNING, reason=str(error))
                self._finish()
                return True
        if fold.read_up_to <= load.ack_offset:
            return False
        proof = fold.proofs.get(load.ack_offset)
        if proof is not None:
            self._engine.set_proof(load.ack_offset)
            self.held = load.target.version
            self._failures = 0
        self._finish()
        return True

    def _start_probe(self, load: _Load, held: int | None) -> Future[ProbeResult]:
        assert load.directory is not None
        version = load.target.version
        return self._executor.submit(
            run_probe, self._engine, load.directory, version, held, self._generated, self._clock.monotonic_s
        )

    # ------------------------------------------------------------------ ends

    def _load_failed(self, me: WorkerKey, load: _Load, reason: str, now_s: float) -> None:
        """Try again from the same files a few times, then tell everybody."""
        load.tries += 1
        event(log, "load_failed", level=logging.WARNING, policy_version=load.target.version, reason=reason)
        if load.tries < self._s.load_tries:
            self._probe = self._start_probe(load, None)
            return
        self._fail(me, load, reason, now_s)

    def _fail(self, me: WorkerKey, load: _Load, reason: str, now_s: float) -> None:
        touched = self._engine.weights_touched() or (self.stage is Stage.LOADING and self.held is None)
        if touched:
            self.held = None
        self._failures += 1
        self._retry_at_s = now_s + min(30.0, self._s.retry_wait_s * 2.0**self._failures)
        self._send(
            LoadFailed(
                run=self._s.run,
                at_us=self._clock.now_us(),
                switch=load.target.switch,
                worker=me[0],
                incarnation=me[1],
                version=load.target.version,
                reason=reason[:1000],
                weights_touched=touched,
            )
        )
        self._finish()

    def _finish(self) -> None:
        self.stage = Stage.IDLE
        self._load = None
        if self.held is not None:
            self._engine.resume()

    def _enter(self, stage: Stage, now_s: float) -> None:
        assert self._load is not None
        if self.stage is not Stage.IDLE:
            self._load.phase_s[self.stage.value] = now_s - self._load.stage_started_s
        self._load.stage_started_s = now_s
        self.stage = stage

    def _loaded(self, me: WorkerKey, load: _Load, result: ProbeResult) -> VersionLoaded:
        return VersionLoaded(
            run=self._s.run,
            at_us=self._clock.now_us(),
            switch=load.target.switch,
            worker=me[0],
            incarnation=me[1],
            version=load.target.version,
            manifest_sha256=load.manifest_sha256,
            probe_diff_new=result.diff_new,
            probe_diff_old=result.diff_old,
            probe_diff_generated=result.diff_generated,
            probe_tolerance=self._s.probe_tolerance,
            phase_s=dict(load.phase_s),
        )
