"""Events of the `policy` topic: JSON, one total order, kept for ever.

Each class docstring holds one complete example; a doctest decodes it. What is legal at which position
is decided in `policy_fold`, nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from schemas.errors import InvalidRecord

SwitchMode = Literal["barrier", "rolling"]
ExpiryReason = Literal["lease", "switch_deadline"]


class PolicyEvent(BaseModel):
    """Common to all: the run it belongs to and the producer's clock."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    at_us: int
    """producer clock, microseconds since 1970 UTC"""


class WorkerRef(BaseModel):
    """One incarnation of a worker: a restart is another incarnation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: str
    incarnation: str


class RunStarted(PolicyEvent):
    """A run begins, or is extended after its end (segment > 0).

    >>> decode_policy_event(b'{"type": "RunStarted", "run": "demo", "at_us": 1, "segment": 0,'
    ... b' "config_digest": "ab", "code_revision": "c0ffee"}').segment
    0
    """

    type: Literal["RunStarted"] = "RunStarted"
    segment: int
    config_digest: str
    code_revision: str


class WorkerJoined(PolicyEvent):
    """A worker incarnation is there; it ends every earlier incarnation of that worker at once.

    >>> decode_policy_event(b'{"type": "WorkerJoined", "run": "demo", "at_us": 1, "worker": "g0",'
    ... b' "incarnation": "i1", "engine": "hf", "dtype": "float32"}').worker
    'g0'
    """

    type: Literal["WorkerJoined"] = "WorkerJoined"
    worker: str
    incarnation: str
    engine: str
    dtype: str


class WorkerLeft(PolicyEvent):
    """A worker goes in good order.

    >>> decode_policy_event(b'{"type": "WorkerLeft", "run": "demo", "at_us": 1, "worker": "g0",'
    ... b' "incarnation": "i1", "reason": "signal"}').reason
    'signal'
    """

    type: Literal["WorkerLeft"] = "WorkerLeft"
    worker: str
    incarnation: str
    reason: str


class WorkerExpired(PolicyEvent):
    """The coordinator takes a worker's standing away: its lease ran out, or it missed a switch deadline.

    After `lease` the incarnation is gone; after `switch_deadline` it may prove the live version again.

    >>> decode_policy_event(b'{"type": "WorkerExpired", "run": "demo", "at_us": 1, "worker": "g0",'
    ... b' "incarnation": "i1", "reason": "lease", "last_heartbeat_at_us": 0, "last_heartbeat_offset": 7}').reason
    'lease'
    """

    type: Literal["WorkerExpired"] = "WorkerExpired"
    worker: str
    incarnation: str
    reason: ExpiryReason
    last_heartbeat_at_us: int | None
    last_heartbeat_offset: int | None
    """offset in `workers`"""


class VersionPublished(PolicyEvent):
    """The trainer committed a new version. Only this gives a version its number and names its directory.

    >>> decode_policy_event(b'{"type": "VersionPublished", "run": "demo", "at_us": 1, "version": 1, "parent": 0,'
    ... b' "depth": 1, "manifest_uri": "demo/a1/manifest.json", "manifest_sha256": "ab", "bytes": 10,'
    ... b' "optimizer_step": 1, "oldest_open_request": 0}').parent
    0
    """

    type: Literal["VersionPublished"] = "VersionPublished"
    version: int
    parent: int | None
    """None only for version 0"""
    depth: int
    """training steps along the parent chain; version 0 has depth 0"""
    manifest_uri: str
    """relative to the store root"""
    manifest_sha256: str
    bytes: int
    optimizer_step: int
    oldest_open_request: int
    """workers skip requests below this position"""
    has_state: bool = True
    """optimizer and RNG state were saved: training can go on from this version"""


class SwitchStarted(PolicyEvent):
    """The coordinator asks all required workers to prove a version.

    >>> decode_policy_event(b'{"type": "SwitchStarted", "run": "demo", "at_us": 1, "switch": "s1", "version": 1,'
    ... b' "mode": "barrier", "read_up_to": 9, "required": [{"worker": "g0", "incarnation": "i1"}],'
    ... b' "deadline_s": 30.0}').required[0].worker
    'g0'
    """

    type: Literal["SwitchStarted"] = "SwitchStarted"
    switch: str
    version: int
    mode: SwitchMode
    read_up_to: int
    """next policy offset the coordinator had read when it decided"""
    required: tuple[WorkerRef, ...]
    deadline_s: float
    """seconds from the coordinator's reading of this event; it, not the workers, judges it"""


class VersionLoaded(PolicyEvent):
    """A worker's proof: it holds these bytes and reproduces the trainer's log-probabilities on the probe.

    `switch` is None when a late joiner proves the live version outside a switch.

    >>> decode_policy_event(b'{"type": "VersionLoaded", "run": "demo", "at_us": 1, "switch": "s1", "worker": "g0",'
    ... b' "incarnation": "i1", "version": 1, "manifest_sha256": "ab", "probe_diff_new": 1e-6,'
    ... b' "probe_diff_old": 0.3, "probe_tolerance": 1e-4, "phase_s": {"fetch": 0.1}}').weak
    False
    """

    type: Literal["VersionLoaded"] = "VersionLoaded"
    switch: str | None
    worker: str
    incarnation: str
    version: int
    manifest_sha256: str
    probe_diff_new: float
    """max |worker - trainer| over the probe's tokens under the new weights"""
    probe_diff_old: float | None
    """the same against the weights held before; None when there were none"""
    probe_diff_generated: float | None = None
    """max |generated - scored| log-probability of tokens generated behind prefixes that were cached under the old
    weights; None where no key or value outlives its request"""
    probe_tolerance: float
    phase_s: dict[str, float]

    @property
    def weak(self) -> bool:
        """The probe could not tell new from old weights: the sha256 alone carries the proof."""
        return self.probe_diff_old is None or self.probe_diff_old <= self.probe_tolerance


class LoadFailed(PolicyEvent):
    """A worker could not prove a version after its own retries.

    >>> decode_policy_event(b'{"type": "LoadFailed", "run": "demo", "at_us": 1, "switch": "s1", "worker": "g0",'
    ... b' "incarnation": "i1", "version": 1, "reason": "sha256 mismatch", "weights_touched": false}').reason
    'sha256 mismatch'
    """

    type: Literal["LoadFailed"] = "LoadFailed"
    switch: str | None
    worker: str
    incarnation: str
    version: int
    reason: str
    weights_touched: bool


class VersionActivated(PolicyEvent):
    """The version is live: every required worker that is still there has proven it.

    >>> decode_policy_event(b'{"type": "VersionActivated", "run": "demo", "at_us": 1, "switch": "s1", "version": 1,'
    ... b' "acks": [12, 13]}').acks
    (12, 13)
    """

    type: Literal["VersionActivated"] = "VersionActivated"
    switch: str
    version: int
    acks: tuple[int, ...]
    """policy offsets of the VersionLoaded events it stands on, ascending"""


class VersionFailed(PolicyEvent):
    """A switch ended with nobody left; the previous version stays live.

    >>> decode_policy_event(b'{"type": "VersionFailed", "run": "demo", "at_us": 1, "switch": "s1", "version": 1,'
    ... b' "reason": "no worker left"}').version
    1
    """

    type: Literal["VersionFailed"] = "VersionFailed"
    switch: str
    version: int
    reason: str


class WorkerAdmitted(PolicyEvent):
    """A late joiner has proven the live version and may serve.

    >>> decode_policy_event(b'{"type": "WorkerAdmitted", "run": "demo", "at_us": 1, "worker": "g2",'
    ... b' "incarnation": "i1", "version": 1, "ack": 20}').ack
    20
    """

    type: Literal["WorkerAdmitted"] = "WorkerAdmitted"
    worker: str
    incarnation: str
    version: int
    ack: int
    """policy offset of its VersionLoaded"""


class VersionRetired(PolicyEvent):
    """The coordinator will delete this version's weights; the event comes before the deletion.

    >>> decode_policy_event(b'{"type": "VersionRetired", "run": "demo", "at_us": 1, "version": 1,'
    ... b' "rule": "keep=8"}').rule
    'keep=8'
    """

    type: Literal["VersionRetired"] = "VersionRetired"
    version: int
    rule: str


class VersionPinned(PolicyEvent):
    """Somebody wants this version's weights kept, whatever the retention rule says.

    >>> decode_policy_event(b'{"type": "VersionPinned", "run": "demo", "at_us": 1, "version": 3,'
    ... b' "reason": "best so far"}').version
    3
    """

    type: Literal["VersionPinned"] = "VersionPinned"
    version: int
    reason: str


class VersionUnpinned(PolicyEvent):
    """The retention rule applies to this version again.

    >>> decode_policy_event(b'{"type": "VersionUnpinned", "run": "demo", "at_us": 1, "version": 3}').version
    3
    """

    type: Literal["VersionUnpinned"] = "VersionUnpinned"
    version: int


class BranchStarted(PolicyEvent):
    """Training goes on from an older version: same weights under a new number, parent given.

    >>> decode_policy_event(b'{"type": "BranchStarted", "run": "demo", "at_us": 1, "from_version": 3}').from_version
    3
    """

    type: Literal["BranchStarted"] = "BranchStarted"
    from_version: int


class RunEnded(PolicyEvent):
    """The run is complete; services stop on it.

    >>> decode_policy_event(b'{"type": "RunEnded", "run": "demo", "at_us": 1, "last_version": 4,'
    ... b' "reason": "completed"}').last_version
    4
    """

    type: Literal["RunEnded"] = "RunEnded"
    last_version: int
    reason: str


AnyPolicyEvent = Annotated[
    RunStarted
    | WorkerJoined
    | WorkerLeft
    | WorkerExpired
    | VersionPublished
    | SwitchStarted
    | VersionLoaded
    | LoadFailed
    | VersionActivated
    | VersionFailed
    | WorkerAdmitted
    | VersionRetired
    | VersionPinned
    | VersionUnpinned
    | BranchStarted
    | RunEnded,
    Field(discriminator="type"),
]
_ADAPTER: TypeAdapter[AnyPolicyEvent] = TypeAdapter(AnyPolicyEvent)


def decode_policy_event(value: bytes | None) -> AnyPolicyEvent:
    """Read one event; InvalidRecord("policy_event", ...) names the field that is wrong."""
    if value is None:
        raise InvalidRecord("empty_value", "a policy record has no value")
    try:
        return _ADAPTER.validate_json(value)
    except ValidationError as error:
        raise InvalidRecord("policy_event", str(error)) from error


def encode_policy_event(event: PolicyEvent) -> bytes:
    """Write one event as JSON bytes."""
    return event.model_dump_json().encode()
