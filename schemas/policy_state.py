"""Values of the policy fold: versions, worker standings, the open switch, proofs, void events."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from schemas import policy_events as ev

WorkerKey = tuple[str, str]
"""(worker, incarnation)"""


class VersionStatus(StrEnum):
    """Life of a version. `superseded`: jumped over by a switch to a newer one."""

    PUBLISHED = "published"
    LIVE = "live"
    WAS_LIVE = "was_live"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    RETIRED = "retired"


class Standing(StrEnum):
    """What a worker incarnation may do. Only `admitted` ones take prompts."""

    JOINED = "joined"
    ADMITTED = "admitted"
    EXPIRED = "expired"
    LEFT = "left"


@dataclass(slots=True, kw_only=True)
class VersionState:
    """One published version."""

    event: ev.VersionPublished
    offset: int
    status: VersionStatus = VersionStatus.PUBLISHED
    activated_at_offset: int | None = None

    @property
    def depth(self) -> int:
        """Training steps from version 0 along the parents."""
        return self.event.depth


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """The current incarnation of one worker."""

    incarnation: str
    standing: Standing
    joined_offset: int
    late_ack: tuple[int, int] | None = None
    """(version, policy offset) of a proof outside a switch that waits for WorkerAdmitted"""


@dataclass(slots=True, kw_only=True)
class OpenSwitch:
    """A switch that is neither activated nor failed."""

    event: ev.SwitchStarted
    offset: int
    acks: dict[WorkerKey, int] = field(default_factory=dict)
    """worker -> policy offset of its VersionLoaded"""
    out: dict[WorkerKey, str] = field(default_factory=dict)
    """worker -> why it no longer counts"""

    @property
    def required(self) -> frozenset[WorkerKey]:
        """Workers the switch began with."""
        return frozenset((ref.worker, ref.incarnation) for ref in self.event.required)

    @property
    def remaining(self) -> frozenset[WorkerKey]:
        """Workers that still decide."""
        return self.required - self.out.keys()

    @property
    def waiting_for(self) -> frozenset[WorkerKey]:
        """Workers that still decide and have not proven the version."""
        return self.remaining - self.acks.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A legal VersionLoaded."""

    worker: str
    incarnation: str
    version: int
    weak: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Void:
    """An event that counts for nobody."""

    offset: int
    type: str
    reason: str
