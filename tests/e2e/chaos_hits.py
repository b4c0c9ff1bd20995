"""What a fault did, as it was found; when it is over; what of it shows in the services' logs. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from schemas.policy_events import (
    AnyPolicyEvent,
    VersionActivated,
    VersionLoaded,
    VersionPublished,
    WorkerAdmitted,
    WorkerJoined,
)
from tests.e2e.chaos_plan import COORDINATOR, GENERATORS, PROJECTOR, Fault, Phase, What
from tests.e2e.chaos_watch import LogView, Place

_ENDED = re.compile(r"service_ended service=(\S+) .*code=(-?\d+)")
_LATE_S = 5.0
"""an event may be seen a little before we noted the hit"""
_RESTART = re.compile(r" restart service=(\S+)")


@dataclass(slots=True, kw_only=True)
class Hit:
    """A fault that was injected."""

    fault: Fault
    at_s: float
    """monotonic: when it hit; of a fault that lasts, when it was taken back"""
    at_us: int
    """wall clock"""
    phase: Phase
    """of the trainer, found from log and store"""
    version: int
    """newest committed version"""
    evidence: str
    """what proves that it fired"""
    log_mark: int = 0
    """length of the service's log when it hit"""
    open_transaction: bool = False
    attempts: frozenset[str] = frozenset()
    """complete checkpoints without a version at that instant: none may ever get one"""
    groups_in_log: frozenset[str] = frozenset()
    records_in_log: int = 0
    incarnations: frozenset[str] = frozenset()
    """of the worker, up to then"""
    in_flight_since_us: Mapping[str, int] = field(default_factory=dict)
    """groups that a killed worker had begun and not finished, as far as its last heartbeat says"""
    acknowledged: Mapping[Place, int] = field(default_factory=dict)
    """ends of the partitions when the broker died"""
    fsynced: Mapping[Place, int] = field(default_factory=dict)
    """its own recovery points: below them it had forced everything to the disk"""
    recovered_s: float | None = None
    """monotonic: first proof of normal work"""

    @property
    def recovery_s(self) -> float | None:
        """From the hit to the first proof of normal work."""
        return None if self.recovered_s is None else self.recovered_s - self.at_s


def worker_of(service: str) -> str:
    """`generator-0` calls itself g0 in the log."""
    return service.replace("generator-", "g")


def incarnations(view: LogView, worker: str) -> frozenset[str]:
    """All that ever spoke in `policy`."""
    return frozenset(
        seen.event.incarnation
        for seen in view.policy
        if isinstance(seen.event, WorkerJoined) and seen.event.worker == worker
    )


def recovered_at_s(hit: Hit, view: LogView, new_words: Callable[[], str], now_s: float) -> float | None:
    """When the service that was hit was first seen at its normal work again; None: not yet.

    Trainer and broker: the next committed version. Coordinator: the next version that goes live. Generator: its new
    incarnation has proven the weights. Projector: it reads the log again, or says that the tracker is back.
    Args: new_words: the service's log since the hit.
    """
    service = hit.fault.service
    if service == PROJECTOR:
        word = "tracker_is_back" if hit.fault.what is What.LOCK_TRACKER else "projection_starts"
        return now_s if word in new_words() else None
    recent = takewhile(lambda seen: seen.seen_s >= hit.at_s - _LATE_S, reversed(view.policy))
    proofs = [seen.seen_s for seen in recent if seen.event.at_us > hit.at_us and _is_proof(seen.event, hit)]
    return min(proofs, default=None)


def _is_proof(event: AnyPolicyEvent, hit: Hit) -> bool:
    service = hit.fault.service
    if service in GENERATORS:
        if not isinstance(event, VersionLoaded | WorkerAdmitted) or event.worker != worker_of(service):
            return False
        return event.incarnation not in hit.incarnations
    return isinstance(event, VersionActivated if service == COORDINATOR else VersionPublished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Deaths and recoveries that the logs of a run tell of."""

    deaths: Counter[tuple[str, int]]
    """(service, exit code; negative: killed by that signal)"""
    restarts: Counter[str]
    broker_starts: int
    resumed: int
    """times a trainer went on from the committed state"""
    in_doubt: int
    """times a living trainer threw away what it held and read the committed state again"""
    store_full: int
    """trainers that ended because the store was full"""


def traces(up_log: str, trainer_log: str) -> Traces:
    """Count them."""
    in_doubt, doubting = 0, False
    for line in trainer_log.splitlines():
        if " log_in_doubt " in line:
            in_doubt += not doubting
            doubting = True
        elif " resumed " in line or " run_started " in line:
            doubting = False
    deaths = [(name, int(code)) for name, code in _ENDED.findall(up_log) if code != "0"]
    return Traces(
        deaths=Counter(deaths),
        restarts=Counter(_RESTART.findall(up_log)),
        broker_starts=up_log.count(" broker_started "),
        resumed=trainer_log.count(" resumed "),
        in_doubt=in_doubt,
        store_full=sum(1 for line in trainer_log.splitlines() if " service_failed " in line and "StoreFull" in line),
    )


def recovery_points(text: str) -> dict[Place, int]:
    """Kafka's `recovery-point-offset-checkpoint`: two lines of header, then `topic partition offset`."""
    points = {}
    for line in text.splitlines()[2:]:
        name, partition, offset = line.split()
        points[name, int(partition)] = int(offset)
    return points
