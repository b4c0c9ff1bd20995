"""Everything a simulated run left in its topics, decoded once for all checks. What a stranger wrote is left out."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.ports import Record
from schemas.errors import InvalidRecord
from schemas.headers import is_arrow
from schemas.ledger import AnyLedgerControl, DecisionRow, LedgerEnded, StepCompleted, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import AnyPolicyEvent, decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Void
from schemas.prompt_codec import decode_request
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import DecodedRow, PromptRequest
from schemas.trajectory_codec import TrajectoryLimits, decode_group
from tests.fakes.tiny_policy import VOCABULARY
from tests.sim.world import RUN, World

Place = tuple[int | None, int | None, int | None]
"""(partition, offset, row)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One trainer transaction: its decisions, its control record, the broker's time."""

    decisions: list[DecisionRow]
    control: AnyLedgerControl
    at_ms: int


@dataclass(slots=True, kw_only=True)
class Reading:
    """The topics of one run."""

    fold: PolicyFold
    policy: list[tuple[int, AnyPolicyEvent, Void | None]]
    transactions: list[Control]
    requests: list[PromptRequest]
    rows: dict[Place, DecodedRow] = field(default_factory=dict)
    refused: set[tuple[int, int]] = field(default_factory=set)
    """(partition, offset) of trajectory records that cannot be decoded"""

    @property
    def decisions(self) -> list[DecisionRow]:
        """All of them, in order."""
        return [row for transaction in self.transactions for row in transaction.decisions]

    def steps(self) -> list[StepCompleted]:
        """Training steps in order."""
        return [t.control for t in self.transactions if isinstance(t.control, StepCompleted)]

    def end(self) -> Control | None:
        """The closing transaction."""
        return next((t for t in reversed(self.transactions) if isinstance(t.control, LedgerEnded)), None)


def records(world: World, name: TopicName) -> list[Record]:
    """Every committed record of a topic."""
    reader = world.log.client("check").reader({topic(RUN, name): TOPICS[name].partitions}, "beginning")
    found: list[Record] = []
    while batch := reader.poll(1000):
        found.extend(batch)
    return found


def read(world: World) -> Reading:
    """A fresh reading; the last one again when nothing was written since."""
    written = sum(partition.end for partition in world.log.partitions())
    cached: tuple[int, Reading] | None = getattr(world, "last_reading", None)
    if cached is None or cached[0] != written:
        cached = (written, _read(world))
        world.last_reading = cached  # type: ignore[attr-defined]
    return cached[1]


def _read(world: World) -> Reading:
    reading = Reading(fold=PolicyFold(), policy=[], transactions=_ledger(world), requests=_requests(world))
    for record in records(world, TopicName.POLICY):
        try:
            event = decode_policy_event(record.value)
        except InvalidRecord:
            reading.fold.skip_to(record.offset + 1)
            continue
        reading.policy.append((record.offset, event, reading.fold.apply(record.offset, event)))
    limits = TrajectoryLimits(vocabulary_size=VOCABULARY)
    for record in records(world, TopicName.TRAJECTORIES):
        try:
            for row in decode_group(record.value, record.headers, limits):
                reading.rows[record.partition, record.offset, row.row] = row
        except InvalidRecord:
            reading.refused.add((record.partition, record.offset))
    return reading


def _ledger(world: World) -> list[Control]:
    found: list[Control] = []
    waiting: list[DecisionRow] = []
    for record in records(world, TopicName.LEDGER):
        if is_arrow(record.headers):
            waiting += decode_decisions(record.value, record.headers)
            continue
        control = decode_ledger_control(record.value)
        found.append(Control(decisions=waiting, control=control, at_ms=record.timestamp_ms))
        waiting = []
    return found


def _requests(world: World) -> list[PromptRequest]:
    found = []
    for record in records(world, TopicName.PROMPTS):
        try:
            found.append(decode_request(record.value, record.headers))
        except InvalidRecord:
            continue
    return found
