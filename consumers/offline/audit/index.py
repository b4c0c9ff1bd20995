"""What an audit holds in memory: policy, ledger, requests and dead letters. Bounded by the ids of the run.

Trajectory rows are not in here: they are streamed past it, one record at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from consumers.offline.run_log import (
    DeadLetter,
    LedgerTransaction,
    PolicyEntry,
    RecordKey,
    RequestEntry,
    RunLog,
)
from consumers.trainer.step import AgeWeights
from infra.config import Config
from schemas.ledger import Decision, DecisionRow, LedgerEnded, Position, StepCompleted, Subject
from schemas.policy_events import VersionActivated
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName, topic

Advantages = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]
"""rewards of each group's usable members -> advantages in the same shape; the trainer's own function"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules:
    """The limits a run, or a segment of it, was trained under."""

    max_lag: int
    """training steps; with down-weighting hard_max_lag"""
    max_use: int = 1
    """uses of one trajectory, replays included"""
    barrier: bool = True
    """workers sample under a version only after its activation"""
    weight: Callable[[int], float] = lambda policy_lag: 1.0
    """row weight from policy lag"""
    advantages: Advantages | None = None
    """None: advantages are checked for being finite, not recomputed"""


Rules = AuditRules | Mapping[str, AuditRules]
"""one set for the whole run, or one a config digest"""


def rules_from_configs(configs: Iterable[Config], advantages: Advantages | None = None) -> dict[str, AuditRules]:
    """Limits by config digest, from the resolved configurations stored with the run."""
    return {config.digest(): _rules(config, advantages) for config in configs}


def _rules(config: Config, advantages: Advantages | None) -> AuditRules:
    trainer = config.trainer
    return AuditRules(
        max_lag=trainer.largest_lag,
        max_use=config.replay.max_use if config.replay.steps else 1,
        barrier=config.coordinator.mode == "barrier",
        weight=AgeWeights(max_lag=trainer.max_lag, decay=trainer.decay).weight,
        # With the divergence in the reward they follow from penalised rewards, which are not stored.
        advantages=None if config.objective.kl_in_reward else advantages,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A request that was committed."""

    group_id: str
    position: int
    attempt: int
    group_size: int
    partition: int
    offset: int
    issued_at_us: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A decision and the transaction it stands in."""

    transaction: int
    decision: DecisionRow


@dataclass(slots=True)
class RecordDecisions:
    """Everything decided about one trajectories record."""

    rows: dict[int, list[Ref]] = field(default_factory=dict)
    """row inside the record -> decisions about it"""
    record: list[Ref] = field(default_factory=list)

    def transactions(self) -> set[int]:
        """Where its first decisions stand."""
        refs = [ref for refs in self.rows.values() for ref in refs if ref.decision.decision is not Decision.REPLAYED]
        return {ref.transaction for ref in (*refs, *self.record)}

    def trajectory_ids(self) -> list[str]:
        """Trajectories it is said to hold."""
        return [refs[0].decision.trajectory_id or "?" for _, refs in sorted(self.rows.items())]


@dataclass(slots=True, kw_only=True)
class RunIndex:
    """One run, but for its trajectory rows."""

    run: str
    policy: list[PolicyEntry]
    fold: PolicyFold
    """at the end of the topic, nothing forgotten"""
    transactions: list[LedgerTransaction]
    requests: list[RequestEntry]
    issued: dict[str, Issued]
    dead_letters: dict[tuple[str, int, int], DeadLetter]
    """(topic, partition, offset) of the source -> the letter"""
    records: dict[RecordKey, RecordDecisions]
    trajectories_topic: str

    @property
    def position(self) -> Position | None:
        """Where the trainer stood last; None before its first transaction."""
        controls = [t.control for t in self.transactions if t.control is not None]
        return controls[-1].position if controls else None

    @property
    def ended(self) -> LedgerEnded | None:
        """The closing record, when nothing follows it."""
        controls = [t.control for t in self.transactions if t.control is not None]
        return controls[-1] if controls and isinstance(controls[-1], LedgerEnded) else None

    def steps(self) -> list[tuple[LedgerTransaction, StepCompleted]]:
        """Transactions that made a version, in order."""
        return [(t, t.control) for t in self.transactions if isinstance(t.control, StepCompleted)]


def read_index(run_log: RunLog) -> RunIndex:
    """Read everything but the trajectories."""
    fold = PolicyFold()
    policy = list(run_log.policy(fold))
    transactions = list(run_log.transactions())
    requests: list[RequestEntry] = []
    issued: dict[str, Issued] = {}
    for entry in run_log.requests():
        requests.append(_without_payload(entry))
        if entry.request is not None:
            issued.setdefault(entry.request.group_id, _issued(entry))
    letters = {(letter.topic, letter.partition, letter.source_offset): letter for letter in run_log.dead_letters()}
    return RunIndex(
        run=run_log.run,
        policy=policy,
        fold=fold,
        transactions=transactions,
        requests=requests,
        issued=issued,
        dead_letters=letters,
        records=_by_record(transactions),
        trajectories_topic=topic(run_log.run, TopicName.TRAJECTORIES),
    )


def index_counts(index: RunIndex) -> dict[str, int]:
    """How much there is of everything but rows."""
    decisions = [row for transaction in index.transactions for row in transaction.decisions]
    return {
        "versions": len(index.fold.versions),
        "steps": len(index.steps()),
        "requests": len(index.requests),
        "groups_issued": len(index.issued),
        "group_decisions": sum(1 for row in decisions if row.subject is Subject.GROUP),
        "row_decisions": sum(1 for row in decisions if row.subject is Subject.TRAJECTORY),
        "ledger_transactions": len(index.transactions),
        "policy_events": len(index.policy),
        "activations": sum(1 for e in index.policy if e.is_legal and isinstance(e.event, VersionActivated)),
        "proofs": len(index.fold.proofs),
    }


def _without_payload(entry: RequestEntry) -> RequestEntry:
    """Requests are checked from `issued`; only unreadable ones and their places are kept whole."""
    return RequestEntry(partition=entry.partition, offset=entry.offset, request=None, problem=entry.problem)


def _issued(entry: RequestEntry) -> Issued:
    request = entry.request
    assert request is not None
    return Issued(
        group_id=request.group_id,
        position=request.request_position,
        attempt=request.attempt,
        group_size=request.group_size,
        partition=entry.partition,
        offset=entry.offset,
        issued_at_us=request.issued_at_us,
    )


def _by_record(transactions: Iterable[LedgerTransaction]) -> dict[RecordKey, RecordDecisions]:
    found: dict[RecordKey, RecordDecisions] = {}
    for transaction in transactions:
        for decision in transaction.decisions:
            if decision.subject is Subject.GROUP or decision.partition is None or decision.offset is None:
                continue
            at = found.setdefault((decision.partition, decision.offset), RecordDecisions())
            ref = Ref(transaction.number, decision)
            if decision.subject is Subject.RECORD or decision.row is None:
                at.record.append(ref)
            else:
                at.rows.setdefault(decision.row, []).append(ref)
    return found
