"""The one reading of the `policy` topic: which event is legal at its position, and what follows from it.

Every service folds the same events in log order and so comes to the same state. An event that is illegal
where it stands is void for everybody. This is the place that guarantees "live means proven" (G4); other
checks only save work. No I/O, no time: the fold knows offsets, not clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from schemas import policy_events as ev
from schemas.ledger import Reason
from schemas.policy_state import OpenSwitch, Proof, Standing, VersionState, VersionStatus, Void, WorkerKey, WorkerState

_VOID_MEMORY = 100


class _Illegal(Exception):
    """The event is illegal at its position; the message says why."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _Illegal(reason)


class PolicyFold:
    """State of the policy topic up to `read_up_to`. Feed it every record of the topic in order."""

    def __init__(self) -> None:
        self.read_up_to = 0
        """next offset to fold"""
        self.segment: int | None = None
        """None: no RunStarted yet"""
        self.ended = False
        self.versions: dict[int, VersionState] = {}
        self.newest: int | None = None
        self.live: int | None = None
        self.workers: dict[str, WorkerState] = {}
        self.switch: OpenSwitch | None = None
        self.proofs: dict[int, Proof] = {}
        """policy offset -> legal VersionLoaded"""
        self.failed_switches_in_row = 0
        self.last_failure: str = ""
        self.pinned: set[int] = set()
        """versions whose weights are kept whatever the retention rule says"""
        self.branch_from: int | None = None
        """BranchStarted was read, its VersionPublished not yet"""
        self.void_count = 0
        self.recent_voids: deque[Void] = deque(maxlen=_VOID_MEMORY)

    # ------------------------------------------------------------------ folding

    def apply(self, offset: int, event: ev.AnyPolicyEvent) -> Void | None:
        """Fold one event; None when it is legal, otherwise why it is void. Offsets may have gaps, never go back."""
        if offset < self.read_up_to:
            raise ValueError(f"policy offset {offset} was folded already (next is {self.read_up_to})")
        self.read_up_to = offset + 1
        try:
            _HANDLERS[type(event)](self, offset, event)
        except _Illegal as illegal:
            void = Void(offset=offset, type=event.type, reason=str(illegal))
            self.void_count += 1
            self.recent_voids.append(void)
            return void
        return None

    def skip_to(self, next_offset: int) -> None:
        """Step over transaction markers: everything below is folded."""
        self.read_up_to = max(self.read_up_to, next_offset)

    def forget_proofs_below(self, version: int) -> None:
        """Bound memory (G8): drop proofs of versions below, except the live one's.

        Versions themselves are kept, a few hundred bytes each: which event is legal depends on them, and services
        that remembered different ones would disagree. So memory grows with the number of versions of the run."""
        old = [o for o, proof in self.proofs.items() if proof.version < version and proof.version != self.live]
        for offset in old:
            del self.proofs[offset]

    # ------------------------------------------------------------------ questions

    def version_at_depth(self, base: int, depth: int) -> int:
        """The ancestor of `base` (or base itself) with that depth; the nearest one to `base` where a branch has two."""
        current = self.versions[base]
        while current.depth > depth and current.event.parent is not None:
            current = self.versions[current.event.parent]
        return current.event.version

    def line(self, version: int) -> list[int]:
        """The version and its ancestors, down to 0."""
        line: list[int] = []
        current: int | None = version
        while current is not None:
            line.append(current)
            current = self.versions[current].event.parent
        return line

    def last_with_state(self) -> int | None:
        """The newest version that was saved with optimizer state and is not retired."""
        for number, state in reversed(self.versions.items()):  # numbers only go up
            if state.event.has_state and state.status is not VersionStatus.RETIRED:
                return number
        return None

    def is_current(self, key: WorkerKey) -> bool:
        """This incarnation is the worker's newest and neither left nor expired."""
        state = self.workers.get(key[0])
        return (
            state is not None and state.incarnation == key[1] and state.standing in (Standing.JOINED, Standing.ADMITTED)
        )

    def with_standing(self, standing: Standing) -> frozenset[WorkerKey]:
        """All current incarnations of that standing."""
        return frozenset((name, w.incarnation) for name, w in self.workers.items() if w.standing is standing)

    def was_activated(self, version: int) -> bool:
        """The version is or was live."""
        state = self.versions.get(version)
        return state is not None and state.activated_at_offset is not None

    def lag(self, version: int, base: int) -> int | Reason:
        """Policy lag of `version` against the weights `base`: training steps along the parent chain (G2).

        Reason.OTHER_BRANCH when it is no ancestor of base (another branch, or from the future).
        """
        if base not in self.versions:
            raise ValueError(f"version {base} is not in the fold")
        if version == base:
            return 0
        if version > base:
            return Reason.OTHER_BRANCH
        depth = self.versions[base].depth
        current = self.versions[base]
        while True:
            parent = current.event.parent
            if parent is None:
                return Reason.OTHER_BRANCH
            if parent < version:
                return Reason.OTHER_BRANCH
            if parent == version:
                return depth - self.versions[parent].depth
            current = self.versions[parent]


# ---------------------------------------------------------------------- legality, one function an event


def _run_started(fold: PolicyFold, offset: int, event: ev.RunStarted) -> None:
    expected = 0 if fold.segment is None else fold.segment + 1
    _require(event.segment == expected, f"segment {event.segment}, expected {expected}")
    _require(fold.segment is None or fold.ended, "the run is under way")
    fold.segment = event.segment
    fold.ended = False


def _worker_joined(fold: PolicyFold, offset: int, event: ev.WorkerJoined) -> None:
    old = fold.workers.get(event.worker)
    _require(old is None or old.incarnation != event.incarnation, "this incarnation joined already")
    if old is not None:
        _take_out(fold, (event.worker, old.incarnation), "replaced by a new incarnation")
    fold.workers[event.worker] = WorkerState(
        incarnation=event.incarnation, standing=Standing.JOINED, joined_offset=offset
    )


def _worker_left(fold: PolicyFold, offset: int, event: ev.WorkerLeft) -> None:
    key = (event.worker, event.incarnation)
    _require(fold.is_current(key), "not a current incarnation")
    _take_out(fold, key, f"left: {event.reason}")
    fold.workers[event.worker].standing = Standing.LEFT


def _worker_expired(fold: PolicyFold, offset: int, event: ev.WorkerExpired) -> None:
    key = (event.worker, event.incarnation)
    _require(fold.is_current(key), "not a current incarnation")
    if event.reason == "switch_deadline":
        _require(fold.switch is not None and key in fold.switch.waiting_for, "no open switch waits for it")
        fold.workers[event.worker].standing = Standing.JOINED
    else:
        fold.workers[event.worker].standing = Standing.EXPIRED
    _take_out(fold, key, f"expired: {event.reason}")


def _take_out(fold: PolicyFold, key: WorkerKey, reason: str) -> None:
    """The worker no longer decides the open switch; an ack it gave no longer counts."""
    if fold.switch is not None and key in fold.switch.remaining:
        fold.switch.out[key] = reason
        fold.switch.acks.pop(key, None)


def _branch_started(fold: PolicyFold, offset: int, event: ev.BranchStarted) -> None:
    _running(fold)
    state = fold.versions.get(event.from_version)
    _require(state is not None and state.status is not VersionStatus.RETIRED, "no such version, or it is retired")
    fold.branch_from = event.from_version


def _running(fold: PolicyFold) -> None:
    _require(fold.segment is not None, "before RunStarted")
    _require(not fold.ended, "after RunEnded")


def _version_published(fold: PolicyFold, offset: int, event: ev.VersionPublished) -> None:
    _running(fold)
    expected = 0 if fold.newest is None else fold.newest + 1
    _require(event.version == expected, f"version {event.version}, expected {expected}")
    if fold.newest is None:
        _require(event.parent is None and event.depth == 0, "version 0 has no parent and depth 0")
    elif fold.branch_from is not None:
        _require(event.parent == fold.branch_from, f"parent {event.parent}, expected {fold.branch_from}")
        # A branch start is the same weights under a new number: no training step, so no depth.
        _require(event.depth == fold.versions[fold.branch_from].depth, "a branch start keeps its parent's depth")
    else:
        _require(event.parent == fold.newest, f"parent {event.parent}, expected {fold.newest}")
        _require(event.depth == fold.versions[fold.newest].depth + 1, f"depth {event.depth} is not parent's + 1")
    fold.versions[event.version] = VersionState(event=event, offset=offset)
    fold.newest = event.version
    fold.branch_from = None


def _switch_started(fold: PolicyFold, offset: int, event: ev.SwitchStarted) -> None:
    _running(fold)
    _require(fold.switch is None, "another switch is open")
    state = fold.versions.get(event.version)
    _require(state is not None and state.status is not VersionStatus.RETIRED, "no such version, or it is retired")
    assert state is not None
    _require(fold.live is None or event.version > fold.live, "not newer than the live version")
    required = {(ref.worker, ref.incarnation) for ref in event.required}
    _require(bool(required), "a switch needs at least one worker")
    admitted = fold.with_standing(Standing.ADMITTED)
    _require(admitted <= required, "an admitted worker is missing from `required`")
    if fold.live is not None:
        known = {key for key in required if fold.is_current(key)}
        _require(known <= admitted, "a worker that is not admitted is required")
    switch = OpenSwitch(event=event, offset=offset)
    for key in required:
        if not fold.is_current(key):
            switch.out[key] = "gone before the switch started"
    state.status = VersionStatus.PUBLISHED
    fold.switch = switch


def _version_loaded(fold: PolicyFold, offset: int, event: ev.VersionLoaded) -> None:
    key = (event.worker, event.incarnation)
    _require(fold.is_current(key), "ack of an incarnation that is not current")
    state = fold.versions.get(event.version)
    _require(state is not None and state.status is not VersionStatus.RETIRED, "no such version, or it is retired")
    assert state is not None
    _require(event.manifest_sha256 == state.event.manifest_sha256, "other bytes than the published ones")
    _require(0.0 <= event.probe_diff_new <= event.probe_tolerance, "the probe does not match the new weights")
    generated = event.probe_diff_generated
    _require(
        generated is None or 0.0 <= generated <= event.probe_tolerance, "generated tokens come from old cached keys"
    )
    if event.switch is None:
        _require(event.version == fold.live, "a proof outside a switch must be of the live version")
        fold.workers[event.worker].late_ack = (event.version, offset)
    else:
        switch = fold.switch
        _require(switch is not None and switch.event.switch == event.switch, "that switch is not open")
        assert switch is not None
        _require(event.version == switch.event.version, "not the version of the switch")
        _require(key in switch.remaining, "this worker does not decide the switch")
        _require(key not in switch.acks, "acked already")
        switch.acks[key] = offset
    fold.proofs[offset] = Proof(
        worker=event.worker, incarnation=event.incarnation, version=event.version, weak=event.weak
    )


def _load_failed(fold: PolicyFold, offset: int, event: ev.LoadFailed) -> None:
    key = (event.worker, event.incarnation)
    _require(fold.is_current(key), "not a current incarnation")
    if event.switch is None:
        if event.weights_touched:
            fold.workers[event.worker].standing = Standing.JOINED
        return
    switch = fold.switch
    _require(switch is not None and switch.event.switch == event.switch, "that switch is not open")
    assert switch is not None
    _require(key in switch.waiting_for, "this worker does not decide the switch, or acked already")
    _take_out(fold, key, f"load failed: {event.reason}")
    fold.workers[event.worker].standing = Standing.JOINED


def _version_activated(fold: PolicyFold, offset: int, event: ev.VersionActivated) -> None:
    _running(fold)
    switch = fold.switch
    _require(switch is not None and switch.event.switch == event.switch, "that switch is not open")
    assert switch is not None
    _require(event.version == switch.event.version, "not the version of the switch")
    _require(bool(switch.remaining), "nobody is left to carry it")
    _require(not switch.waiting_for, "a required worker has not acked")
    _require(event.acks == tuple(sorted(switch.acks.values())), "the acks named are not the acks of the switch")
    if fold.live is not None:
        fold.versions[fold.live].status = VersionStatus.WAS_LIVE
    # Below the version that was live nothing is left to supersede: a run of any length costs the same here.
    for number in range(0 if fold.live is None else fold.live + 1, event.version):
        state = fold.versions.get(number)
        if state is not None and state.status in (VersionStatus.PUBLISHED, VersionStatus.FAILED):
            state.status = VersionStatus.SUPERSEDED
    fold.versions[event.version].status = VersionStatus.LIVE
    fold.versions[event.version].activated_at_offset = offset
    fold.live = event.version
    for worker, _ in switch.remaining:
        fold.workers[worker].standing = Standing.ADMITTED
        fold.workers[worker].late_ack = None
    fold.switch = None
    fold.failed_switches_in_row = 0


def _version_failed(fold: PolicyFold, offset: int, event: ev.VersionFailed) -> None:
    _running(fold)
    switch = fold.switch
    _require(switch is not None and switch.event.switch == event.switch, "that switch is not open")
    assert switch is not None
    _require(event.version == switch.event.version, "not the version of the switch")
    _require(not switch.remaining, "workers are left to carry it")
    fold.versions[event.version].status = VersionStatus.FAILED
    fold.switch = None
    fold.failed_switches_in_row += 1
    fold.last_failure = event.reason


def _worker_admitted(fold: PolicyFold, offset: int, event: ev.WorkerAdmitted) -> None:
    _running(fold)
    key = (event.worker, event.incarnation)
    _require(fold.is_current(key), "not a current incarnation")
    state = fold.workers[event.worker]
    _require(state.standing is Standing.JOINED, "admitted already")
    _require(state.late_ack == (event.version, event.ack), "no such proof")
    state.standing = Standing.ADMITTED
    state.late_ack = None


def _version_retired(fold: PolicyFold, offset: int, event: ev.VersionRetired) -> None:
    state = fold.versions.get(event.version)
    _require(state is not None and state.status is not VersionStatus.RETIRED, "no such version, or it is retired")
    assert state is not None
    _require(event.version not in (fold.live, fold.newest, fold.branch_from), "live, newest, or being branched from")
    _require(event.version not in fold.pinned, "pinned")
    _require(event.version != fold.last_with_state(), "the last version that training can go on from")
    _require(fold.switch is None or fold.switch.event.version != event.version, "in an open switch")
    state.status = VersionStatus.RETIRED


def _version_pinned(fold: PolicyFold, offset: int, event: ev.VersionPinned) -> None:
    state = fold.versions.get(event.version)
    _require(state is not None and state.status is not VersionStatus.RETIRED, "no such version, or it is retired")
    _require(event.version not in fold.pinned, "pinned already")
    fold.pinned.add(event.version)


def _version_unpinned(fold: PolicyFold, offset: int, event: ev.VersionUnpinned) -> None:
    _require(event.version in fold.pinned, "not pinned")
    fold.pinned.remove(event.version)


def _run_ended(fold: PolicyFold, offset: int, event: ev.RunEnded) -> None:
    _running(fold)
    _require(event.last_version == fold.newest, f"last_version {event.last_version}, newest is {fold.newest}")
    fold.ended = True
    fold.switch = None
    for state in fold.workers.values():
        if state.standing in (Standing.JOINED, Standing.ADMITTED):
            state.standing = Standing.LEFT


_HANDLERS: dict[type[ev.PolicyEvent], Callable[[PolicyFold, int, Any], None]] = {
    ev.RunStarted: _run_started,
    ev.WorkerJoined: _worker_joined,
    ev.WorkerLeft: _worker_left,
    ev.WorkerExpired: _worker_expired,
    ev.BranchStarted: _branch_started,
    ev.VersionPublished: _version_published,
    ev.SwitchStarted: _switch_started,
    ev.VersionLoaded: _version_loaded,
    ev.LoadFailed: _load_failed,
    ev.VersionActivated: _version_activated,
    ev.VersionFailed: _version_failed,
    ev.WorkerAdmitted: _worker_admitted,
    ev.VersionRetired: _version_retired,
    ev.VersionPinned: _version_pinned,
    ev.VersionUnpinned: _version_unpinned,
    ev.RunEnded: _run_ended,
}
