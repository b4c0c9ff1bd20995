"""The coordinator service: drives version switches and membership, as events, under a fenced identity.

Order: fence, read policy and heartbeats to their ends, then decide; every decision is one short transaction
that is read back before the next. No time-out is judged before reading up to an end offset taken after the
deadline, and none while an open transaction hides the end of the policy topic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from consumers.garbage import GarbageRounds
from consumers.switching import LastSeen, SwitchRules, Timeouts, decide
from infra.logs import event
from infra.policy_follower import PolicyFollower
from infra.ports import CheckpointStore, Clock, EventReader, Message, TransactionalWriter
from schemas.errors import CheckpointError, DriftlogError, InvalidRecord, LogUnavailable, TransactionFailed
from schemas.headers import control_headers
from schemas.heartbeat import decode_heartbeat
from schemas.ids import RunId
from schemas.policy_events import AnyPolicyEvent, VersionRetired, encode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Standing, VersionStatus, WorkerKey
from schemas.topics import TopicName, topic

log = logging.getLogger(__name__)


class SwitchesKeepFailing(DriftlogError):
    """K switches in a row failed: the run stops with the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Everything the service decides by."""

    run: RunId
    rules: SwitchRules
    lease_s: float
    """a worker without a heartbeat for this long is expired"""
    failed_switches_in_row: int = 5
    backoff_s: float = 1.0
    """wait before the first retry of a failed switch; doubles, at most 30 s"""
    first_wait_s: float = 10.0
    """how long the first switch waits for min_workers to join"""
    recoveries_in_row: int = 10
    garbage_grace_s: float = 3600.0
    """directories that no event names are removed this long after they were last written"""


@dataclass(slots=True, kw_only=True)
class CoordinatorPorts:
    """The outside world of the coordinator."""

    writer: TransactionalWriter
    open_policy: Callable[[], PolicyFollower]
    open_workers: Callable[[], EventReader]
    store: CheckpointStore
    clock: Clock
    new_id: Callable[[], str]


@dataclass(slots=True)
class _Lease:
    seen: LastSeen
    due_s: float


class CoordinatorService:
    """Call `step` until `finished`."""

    def __init__(self, settings: CoordinatorSettings, ports: CoordinatorPorts) -> None:
        self._s = settings
        self._p = ports
        self._policy_topic = topic(settings.run, TopicName.POLICY)
        self._workers_topic = topic(settings.run, TopicName.WORKERS)
        self.follower: PolicyFollower | None = None
        self._workers: EventReader | None = None
        self._ends: tuple[int, int] | None = None
        self._ready = False
        self._barrier = 0
        self._leases: dict[WorkerKey, _Lease] = {}
        self._check: tuple[frozenset[object], int, int] | None = None
        """suspects, and the ends of policy and workers taken when they were first suspected"""
        self._switch_due: tuple[str, float] | None = None
        self._may_open_at_s = 0.0
        self._started_s = ports.clock.monotonic_s()
        self._recoveries = 0
        self._failed_seen = 0
        self._saw_it_running = False
        self._garbage = GarbageRounds(ports.store, ports.clock, settings.garbage_grace_s)

    @property
    def finished(self) -> bool:
        """RunEnded was read. One that is older than this process may be about to be extended: wait one lease."""
        if not self._ready or self.follower is None or not self.follower.fold.ended:
            return False
        return self._saw_it_running or self._p.clock.monotonic_s() - self._started_s >= self._s.lease_s

    def step(self) -> bool:
        """Do one bounded piece of work; False when there was nothing to do. Raises Fenced, SwitchesKeepFailing."""
        try:
            return self._step()
        except (TransactionFailed, LogUnavailable) as failure:
            self._recoveries += 1
            event(log, "log_in_doubt", level=logging.WARNING, tries=self._recoveries, reason=str(failure))
            if self._recoveries > self._s.recoveries_in_row:
                raise
            self.follower = None
            self._ready = False
            return True

    def silent_s(self) -> dict[str, float]:
        """Seconds since each worker that takes part was last heard of."""
        if self.follower is None:
            return {}
        now_s, fold = self._p.clock.monotonic_s(), self.follower.fold
        heard_s = {key: lease.due_s - self._s.lease_s for key, lease in self._leases.items() if fold.is_current(key)}
        return {worker: max(0.0, now_s - at_s) for (worker, _), at_s in heard_s.items()}

    def close(self) -> None:
        """Nothing of our own is open: whoever built the ports closes them."""

    def _step(self) -> bool:
        if self.follower is None:
            self._p.writer.init()
            self.follower = self._p.open_policy()
            self._workers = self._p.open_workers()
            # Behind an open transaction of the trainer may lie what we wrote ourselves: it is waited for.
            self._ends = (self.follower.high_watermark(), self._workers_end())
            self._leases = {}
            self._check = None
            self._barrier = 0
            self._garbage.restart()
        worked = bool(self._fold_policy()) | self._read_heartbeats()
        if not self._caught_up():
            return worked
        fold = self.follower.fold
        now_s = self._p.clock.monotonic_s()
        self._saw_it_running |= fold.segment is not None and not fold.ended
        self._keep_leases(fold, now_s)
        if fold.failed_switches_in_row >= self._s.failed_switches_in_row:
            raise SwitchesKeepFailing(f"{fold.failed_switches_in_row} switches failed in a row: {fold.last_failure}")
        timeouts = self._timeouts(fold, now_s)
        events = decide(fold, timeouts, self._s.rules, self._p.new_id(), self._p.clock.now_us())
        if not events:
            return worked | self._garbage.step(self.follower)
        self._commit(events)
        return True

    # ------------------------------------------------------------------ reading

    def _fold_policy(self) -> bool:
        assert self.follower is not None
        folded = self.follower.advance()
        for _, policy_event, void in folded:
            if isinstance(policy_event, VersionRetired) and not void:
                self._delete(policy_event.version)
        return bool(folded)

    def _delete(self, version: int) -> None:
        assert self.follower is not None
        state = self.follower.fold.versions.get(version)
        if state is None or _is_shared(self.follower.fold, version):
            return
        try:
            self._p.store.delete(state.event.manifest_uri)
        except (CheckpointError, OSError) as error:
            event(log, "delete_failed", level=logging.WARNING, policy_version=version, reason=str(error))

    def _workers_end(self) -> int:
        assert self._workers is not None
        return self._workers.end_offsets()[(self._workers_topic, 0)]

    def _read_heartbeats(self) -> bool:
        assert self._workers is not None
        records = self._workers.poll(500)
        now_s = self._p.clock.monotonic_s()
        for record in records:
            try:
                beat = decode_heartbeat(record.value)
            except InvalidRecord as error:
                event(
                    log, "heartbeat_undecodable", level=logging.WARNING, topic=record.topic, partition=record.partition,
                    offset=record.offset, reason=str(error),
                )  # fmt: skip
                continue
            seen = LastSeen(at_us=beat.at_us, offset=record.offset)
            self._leases[(beat.worker, beat.incarnation)] = _Lease(seen, now_s + self._s.lease_s)
        return bool(records)

    def _caught_up(self) -> bool:
        """Both topics are read to the ends taken after fencing, and our own last decision was read back."""
        assert self.follower is not None and self._workers is not None and self._ends is not None
        if not self._ready:
            at_end = self._workers.positions()[(self._workers_topic, 0)] >= self._ends[1]
            if self.follower.read_up_to < self._ends[0] or not at_end:
                return False
            # One lease of grace after a start: every lease begins anew, whatever the old heartbeats say.
            now_s = self._p.clock.monotonic_s()
            for lease in self._leases.values():
                lease.due_s = now_s + self._s.lease_s
            self._ready = True
            self._recoveries = 0
        return self.follower.read_up_to >= self._barrier

    # ------------------------------------------------------------------ time

    def _keep_leases(self, fold: PolicyFold, now_s: float) -> None:
        """A lease for every current incarnation, none for others (bounds memory)."""
        current = fold.with_standing(Standing.JOINED) | fold.with_standing(Standing.ADMITTED)
        for key in current - self._leases.keys():
            self._leases[key] = _Lease(LastSeen(at_us=None, offset=None), now_s + self._s.lease_s)
        for key in [k for k in self._leases if k not in current]:
            if len(self._leases) > 2 * len(current) + 16 or self._leases[key].due_s < now_s:
                del self._leases[key]

    def _timeouts(self, fold: PolicyFold, now_s: float) -> Timeouts:
        current = fold.with_standing(Standing.JOINED) | fold.with_standing(Standing.ADMITTED)
        overdue = {key for key in current if self._leases[key].due_s <= now_s}
        deadline_passed = self._deadline_passed(fold, now_s)
        # Each with its deadline: one who was heard and is overdue again is judged by ends taken after the new deadline.
        suspects: frozenset[object] = frozenset((key, self._leases[key].due_s) for key in overdue)
        suspects |= {self._switch_due} if deadline_passed else frozenset()
        certain = self._is_certain(suspects)
        return Timeouts(
            expired={key: self._leases[key].seen for key in overdue} if certain else {},
            switch_deadline_passed=deadline_passed and certain,
            may_open=self._may_open(fold, now_s),
        )

    def _deadline_passed(self, fold: PolicyFold, now_s: float) -> bool:
        if fold.switch is None:
            self._switch_due = None
            return False
        switch_id = fold.switch.event.switch
        if self._switch_due is None or self._switch_due[0] != switch_id:
            self._switch_due = (switch_id, now_s + fold.switch.event.deadline_s)
        return now_s >= self._switch_due[1]

    def _is_certain(self, suspects: frozenset[object]) -> bool:
        """Everything that was in the log after the deadlines is read, and nothing hides behind an open transaction."""
        assert self.follower is not None and self._workers is not None
        if not suspects:
            self._check = None
            return False
        if self._check is None or not suspects <= self._check[0]:
            if self.follower.is_blocked():
                return False
            self._check = (suspects, self.follower.end_offset(), self._workers_end())
        _, policy_end, workers_end = self._check
        read = self._workers.positions()[(self._workers_topic, 0)] >= workers_end
        return read and self.follower.read_up_to >= policy_end

    def _may_open(self, fold: PolicyFold, now_s: float) -> bool:
        if fold.failed_switches_in_row > self._failed_seen:
            wait_s = min(30.0, self._s.backoff_s * 2.0 ** (fold.failed_switches_in_row - 1))
            self._may_open_at_s = now_s + wait_s
        self._failed_seen = fold.failed_switches_in_row
        if fold.live is None and fold.failed_switches_in_row == 0:
            joined = len(fold.with_standing(Standing.JOINED))
            if joined < self._s.rules.min_workers and now_s - self._started_s < self._s.first_wait_s:
                return False
        return now_s >= self._may_open_at_s

    # ------------------------------------------------------------------ writing

    def _commit(self, events: list[AnyPolicyEvent]) -> None:
        messages = []
        for policy_event in events:
            value = encode_policy_event(policy_event)
            headers = control_headers(policy_event, value, "coordinator")
            key = self._s.run.encode()
            messages.append(Message(topic=self._policy_topic, key=key, value=value, headers=headers))
        placed = self._p.writer.commit(messages)
        self._barrier = placed[-1].offset + 1
        self._check = None
        for policy_event in events:
            event(
                log,
                "decided",
                type=policy_event.type,
                policy_version=getattr(policy_event, "version", None),
                **policy_event.model_dump(include={"worker", "switch"}),
            )


def _is_shared(fold: PolicyFold, version: int) -> bool:
    """Another version that is not retired stands on the same checkpoint (a branch start does)."""
    uri = fold.versions[version].event.manifest_uri
    return any(
        state.event.manifest_uri == uri and state.status is not VersionStatus.RETIRED
        for number, state in fold.versions.items()
        if number != version
    )
