"""The ledger: what became of every trajectory, group and record, and where the trainer stands.

Decisions travel as Arrow (`ledger_codec`), control records (StepCompleted, Settled, LedgerEnded) as JSON.
Every trainer transaction ends with exactly one control record; the last one in the topic is the truth
on restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from schemas.errors import InvalidRecord


class Subject(StrEnum):
    """What a decision is about."""

    TRAJECTORY = "trajectory"
    GROUP = "group"
    """exactly one per issued group, also when no row of it ever came"""
    RECORD = "record"
    """a record that could not be decoded, known by its position only"""


class Decision(StrEnum):
    """What became of it."""

    TRAINED = "trained"
    REPLAYED = "replayed"
    DROPPED = "dropped"


class Reason(StrEnum):
    """Why something was dropped; `invalid:<code>` comes on top for rows and records that fail validation."""

    NONE = ""
    STALE = "stale"
    OTHER_BRANCH = "other_branch"
    INCOMPLETE = "incomplete"
    LOST = "lost"
    ZERO_VARIANCE = "zero_variance"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    REWARD_FAILED = "reward_failed"
    SUPPORT_MISMATCH = "support_mismatch"
    UNPROVEN = "unproven"
    GROUP_CLOSED = "group_closed"
    POISON_PROMPT = "poison_prompt"
    STEP_FAILED = "step_failed"
    ABANDONED = "abandoned"
    RUN_ENDED = "run_ended"


INVALID_PREFIX = "invalid:"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One decision. Trajectory rows carry their log position; group rows only ids; record rows only the position."""

    subject: Subject
    group_id: str | None
    trajectory_id: str | None
    partition: int | None
    offset: int | None
    row: int | None
    """row inside the record's batch"""
    row_sha256: str | None
    """of the row's canonical bytes; the batch digest is sha256 over these in order"""
    decision: Decision
    reason: str
    """"" when trained or replayed; otherwise a Reason or invalid:<code>"""
    policy_lag: int | None
    """training steps, of the oldest trained token; None when it was never judged"""
    weight: float
    """row weight from age; 0 when dropped"""
    use_count: int
    """1 for the first use, +1 for each replay; 0 when dropped"""
    reward: float | None
    advantage: float | None
    completion_tokens: int | None
    consumed_at_us: int
    detail: str = ""
    """words for a person: `lag 3 > 2`, `3/4 members`"""


class OpenGroup(BaseModel):
    """A request that was issued and whose group is not decided yet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_id: str
    request_position: int
    issued_at_us: int
    attempt: int
    intended_step: int
    issued_depth: int | None = Field(default=None, exclude_if=lambda depth: depth is None)
    """depth of the newest version when it was issued; None: written before this was recorded"""


class PartitionProgress(BaseModel):
    """How far one trajectories partition is decided."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    next_offset: int
    """every record below is decided, except those listed"""
    undecided: tuple[int, ...] = ()
    """offsets below next_offset whose rows are not decided yet, ascending"""


class ReplayRow(BaseModel):
    """A trained row that may be used again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: int
    offset: int
    row: int
    advantage: float
    """of its first use"""


class ReplayGroup(BaseModel):
    """A trained group that may be used again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_id: str
    first_depth: int
    """depth of the weights its first use updated"""
    uses: int
    rows: tuple[ReplayRow, ...]


class Position(BaseModel):
    """Where the trainer stands: carried by every transaction, read back on restart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    open_groups: tuple[OpenGroup, ...]
    """ascending request_position"""
    next_request: int
    prompt_cursor: int
    """how many fresh prompts were taken from the source (re-issued ones do not count)"""
    partitions: dict[int, PartitionProgress]
    replay: tuple[ReplayGroup, ...] = ()
    """empty unless replay is on"""


class LedgerControl(BaseModel):
    """Common to control records."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    at_us: int
    position: Position
    policy_read_up_to: int
    """next policy offset the trainer had folded when it decided"""


class StepCompleted(LedgerControl):
    """One training step: committed together with its VersionPublished."""

    type: Literal["StepCompleted"] = "StepCompleted"
    version_in: int
    version_out: int
    groups: int
    trajectories: int
    batch_digest: str
    """sha256 hex over the row_sha256 values of the batch in order"""
    metrics: dict[str, float]
    """finite values only; a non-finite one is counted in metrics_nonfinite"""
    metrics_nonfinite: tuple[str, ...] = ()
    phase_s: dict[str, float]
    rng_digest: str
    config_digest: str
    code_revision: str


class Settled(LedgerControl):
    """Decisions and new requests without a version."""

    type: Literal["Settled"] = "Settled"
    reason: str


class LedgerEnded(LedgerControl):
    """The closing transaction of a run: everything is decided, nothing is open."""

    type: Literal["RunEnded"] = "RunEnded"
    last_version: int
    reason: str


AnyLedgerControl = Annotated[StepCompleted | Settled | LedgerEnded, Field(discriminator="type")]
_ADAPTER: TypeAdapter[AnyLedgerControl] = TypeAdapter(AnyLedgerControl)


def decode_ledger_control(value: bytes | None) -> AnyLedgerControl:
    """Read one control record; InvalidRecord("ledger_control", ...) names the field that is wrong."""
    if value is None:
        raise InvalidRecord("empty_value", "a ledger control record has no value")
    try:
        return _ADAPTER.validate_json(value)
    except ValidationError as error:
        raise InvalidRecord("ledger_control", str(error)) from error


def encode_ledger_control(control: LedgerControl) -> bytes:
    """Write one control record as JSON bytes."""
    return control.model_dump_json().encode()
