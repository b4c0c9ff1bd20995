"""`lineage`: where a version comes from and what came of it. The tree of a whole run, from policy and ledger alone.

    version <- step <- groups <- worker proofs <- parent

The life of a version, its step, and its place in the tree are here; what its samples were is in lineage_version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from consumers.offline.branches import is_start
from consumers.offline.run_log import LedgerTransaction, PolicyEntry, RunLog
from consumers.offline.wholeness import readable_transactions, require_policy_and_ledger
from schemas import policy_events as ev
from schemas.ledger import Decision, StepCompleted, Subject
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionState

HEADLINE = (
    "critic/rewards/mean", "policy_lag/mean", "policy_lag/max", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy",
    "response_length/mean",
)  # fmt: skip
"""metrics of a step that are shown with its version"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The training step that made a version."""

    version_in: int
    transaction: int
    ledger_offset: int
    at_us: int
    config_digest: str
    code_revision: str
    batch_digest: str
    policy_read_up_to: int
    groups: tuple[str, ...]
    """trained for the first time, in the order of the ledger"""
    trajectories: int
    replayed: int
    metrics: Mapping[str, float]
    """the headline"""


@dataclass(slots=True, kw_only=True)
class Life:
    """What became of a version, in the producers' times."""

    live_at_us: int | None = None
    live_until_us: int | None = None
    followed_by: int | None = None
    retired_at_us: int | None = None
    retired_by: str = ""
    failed: list[str] = field(default_factory=list)
    """reasons of switches that failed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One version."""

    version: int
    parent: int | None
    depth: int
    is_branch_start: bool
    """the same weights as its parent under a new number: no step made it"""
    status: str
    is_pinned: bool
    published_at_us: int
    policy_offset: int
    optimizer_step: int
    manifest_uri: str
    manifest_sha256: str
    bytes: int
    has_state: bool
    life: Life
    step: StepFacts | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """All versions of a run."""

    run: str
    nodes: Mapping[int, Node]
    newest: int | None
    live: int | None
    fold: PolicyFold
    entries: Sequence[PolicyEntry]

    def line(self, version: int) -> list[int]:
        """The version and its ancestors, down to 0."""
        line: list[int] = []
        current: int | None = version
        while current is not None:
            line.append(current)
            current = self.nodes[current].parent
        return line

    def children(self) -> dict[int, list[int]]:
        """Version -> versions made from it, ascending."""
        found: dict[int, list[int]] = {version: [] for version in self.nodes}
        for version, node in sorted(self.nodes.items()):
            if node.parent is not None:
                found[node.parent].append(version)
        return found


def read_lineage(run_log: RunLog) -> Lineage:
    """From policy and ledger; bounded by the number of versions and trained groups."""
    require_policy_and_ledger(run_log)
    fold = PolicyFold()
    entries = list(run_log.policy(fold))
    steps = {
        transaction.control.version_out: step_facts(transaction, transaction.control)
        for transaction in readable_transactions(run_log)
        if isinstance(transaction.control, StepCompleted)
    }
    lives = _lives(entries)
    nodes = {
        version: _node(version, state, fold, lives.get(version, Life()), steps.get(version))
        for version, state in sorted(fold.versions.items())
    }
    return Lineage(run=run_log.run, nodes=nodes, newest=fold.newest, live=fold.live, fold=fold, entries=entries)


def step_facts(transaction: LedgerTransaction, step: StepCompleted) -> StepFacts:
    """What the ledger says of it."""
    groups = [
        row.group_id
        for row in transaction.decisions
        if row.subject is Subject.GROUP and row.decision is Decision.TRAINED and row.group_id is not None
    ]
    return StepFacts(
        version_in=step.version_in,
        transaction=transaction.number,
        ledger_offset=transaction.offset,
        at_us=step.at_us,
        config_digest=step.config_digest,
        code_revision=step.code_revision,
        batch_digest=step.batch_digest,
        policy_read_up_to=step.policy_read_up_to,
        groups=tuple(groups),
        trajectories=step.trajectories,
        replayed=sum(1 for row in transaction.decisions if row.decision is Decision.REPLAYED),
        metrics={name: step.metrics[name] for name in HEADLINE if name in step.metrics},
    )


def _node(version: int, state: VersionState, fold: PolicyFold, life: Life, step: StepFacts | None) -> Node:
    event = state.event
    return Node(
        version=version,
        parent=event.parent,
        depth=event.depth,
        is_branch_start=is_start(fold, version),
        status=state.status.value,
        is_pinned=version in fold.pinned,
        published_at_us=event.at_us,
        policy_offset=state.offset,
        optimizer_step=event.optimizer_step,
        manifest_uri=event.manifest_uri,
        manifest_sha256=event.manifest_sha256,
        bytes=event.bytes,
        has_state=event.has_state,
        life=life,
        step=step,
    )


def _lives(entries: Sequence[PolicyEntry]) -> dict[int, Life]:
    lives: dict[int, Life] = {}
    live: int | None = None
    for entry in entries:
        event = entry.event
        if not entry.is_legal or event is None:
            continue
        if isinstance(event, ev.VersionActivated):
            if live is not None:
                lives[live].live_until_us, lives[live].followed_by = event.at_us, event.version
            live = event.version
            lives.setdefault(live, Life()).live_at_us = event.at_us
        elif isinstance(event, ev.VersionRetired):
            life = lives.setdefault(event.version, Life())
            life.retired_at_us, life.retired_by = event.at_us, event.rule
        elif isinstance(event, ev.VersionFailed):
            lives.setdefault(event.version, Life()).failed.append(event.reason)
    return lives
