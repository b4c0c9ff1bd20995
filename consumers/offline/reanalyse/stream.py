"""Every trainer transaction beside the rows it decided, the trainer's scores of them, and policy as it was read then.

Streams ledger, policy, `scores` and each partition of `trajectories` side by side. Held in memory: rows that are read
and not decided yet, those a replay may use again, the scores of one step, and the versions of the run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

from consumers.offline.run_log import LedgerTransaction, RunLog, ScoresEntry
from consumers.offline.trained_steps import RowProblem, Shelf, StepGroup, StepRow, found_row
from consumers.offline.wholeness import refuse_newer
from infra.ports import Record
from schemas.errors import IllegalState, InvalidRecord
from schemas.ledger import (
    INVALID_PREFIX,
    AnyLedgerControl,
    Decision,
    DecisionRow,
    OpenGroup,
    Position,
    StepCompleted,
    Subject,
)
from schemas.policy_events import decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.scores_codec import ScoreRow
from schemas.topics import TopicName, topic


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group and what was decided about it and its rows in one transaction."""

    decision: DecisionRow
    opened: OpenGroup
    rows: tuple[StepRow, ...]
    """in the order of the ledger, losing claims too"""

    @property
    def group_id(self) -> str:
        """The group."""
        return self.opened.group_id

    @property
    def was_trained(self) -> bool:
        """It was in the step."""
        return self.decision.decision is Decision.TRAINED

    def members(self) -> tuple[StepRow, ...]:
        """The winning claim's rows by index in group; of a dropped group those that share its reason."""
        if self.was_trained:
            return StepGroup(group_id=self.group_id, rows=self.rows).members
        found: dict[int, StepRow] = {}
        for row in self.rows:
            if row.trajectory is not None and row.decision.reason == self.decision.reason:
                found.setdefault(row.trajectory.index_in_group, row)
        return tuple(found[index] for index in sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTransaction:
    """What the trainer decided at one go, and all it could know then."""

    transaction: LedgerTransaction
    control: AnyLedgerControl
    base: int
    """version whose weights were about to be updated: lag is judged against it"""
    fold: PolicyFold
    """as the trainer had read it; goes on with the next transaction"""
    groups: tuple[RecordedGroup, ...]
    """trained ones in the order of the batch"""
    replayed: tuple[StepRow, ...]
    """rows used once more, in the order of the batch"""
    loose: tuple[DecisionRow, ...]
    """rows and records whose group is not decided here: late duplicates, closed groups, poison"""
    scores: Mapping[str, ScoreRow]
    """trajectory id -> the trainer's log-probabilities in this step"""
    expired: int
    """rows that retention has removed"""
    row_problems: tuple[RowProblem, ...]
    """rows that are not what the ledger says"""
    unread: tuple[str, ...]
    """records of ledger and scores that cannot be read, or were altered"""

    @property
    def problems(self) -> tuple[str, ...]:
        """In words."""
        return (*self.unread, *(str(problem) for problem in self.row_problems))

    @property
    def step(self) -> StepCompleted | None:
        """Where it made a version."""
        return self.control if isinstance(self.control, StepCompleted) else None


def recorded_transactions(run_log: RunLog, *, keep_proofs_of_last: int) -> Generator[RecordedTransaction, None, None]:
    """Every whole transaction of the ledger, in order.

    `keep_proofs_of_last`: training steps back to which proofs are remembered; the largest lag that is asked about.
    IllegalState at a row, or a score, that a newer build wrote."""
    with ExitStack() as stack:
        policy = _PolicyAt(run_log)
        scores = _Scores(run_log)
        shelf = Shelf(run_log, None)
        for part in (policy, scores, shelf):
            stack.callback(part.close)
        before: Position | None = None
        for transaction in stack.enter_context(closing(run_log.transactions())):
            control = transaction.control
            if control is None:
                continue
            policy.advance(control.policy_read_up_to)
            base = _base(control, policy.fold)
            at = _recorded(transaction, control, base, before, policy.fold, shelf, scores)
            for problem in at.row_problems:
                refuse_newer(problem.detail, f"{run_log.run}.trajectories[{problem.partition}]@{problem.offset}")
            yield at
            shelf.forget(transaction)
            policy.forget(base, keep_proofs_of_last)
            before = control.position


def _recorded(
    transaction: LedgerTransaction,
    control: AnyLedgerControl,
    base: int,
    before: Position | None,
    fold: PolicyFold,
    shelf: Shelf,
    scores: _Scores,
) -> RecordedTransaction:
    opened = {} if before is None else {group.group_id: group for group in before.open_groups}
    decided = [row for row in transaction.decisions if row.subject is Subject.GROUP and row.group_id is not None]
    rows: dict[str, list[StepRow]] = {str(row.group_id): [] for row in decided}
    replayed: list[StepRow] = []
    loose: list[DecisionRow] = []
    problems: list[RowProblem] = []
    expired = 0
    for decision in transaction.decisions:
        if decision.subject is Subject.GROUP:
            continue
        is_replay = decision.decision is Decision.REPLAYED
        if decision.subject is Subject.RECORD or (not is_replay and decision.group_id not in rows):
            loose.append(decision)
            continue
        found, problem = found_row(decision, shelf)
        if problem is not None and problem.offset < shelf.beginnings.get(problem.partition, 0):
            expired += 1
        elif problem is not None and not decision.reason.startswith(INVALID_PREFIX):
            problems.append(problem)
        (replayed if is_replay else rows[str(decision.group_id)]).append(found)
    version_in = control.version_in if isinstance(control, StepCompleted) else None
    step_scores, unread = scores.of(version_in) if version_in is not None else ({}, [])
    return RecordedTransaction(
        transaction=transaction,
        control=control,
        base=base,
        fold=fold,
        groups=tuple(
            RecordedGroup(decision=row, opened=_opened(opened, row), rows=tuple(rows[str(row.group_id)]))
            for row in decided
        ),
        replayed=tuple(replayed),
        loose=tuple(loose),
        scores=step_scores,
        expired=expired,
        row_problems=tuple(problems),
        unread=(*(f"ledger[0]@{problem.offset}: {problem.message}" for problem in transaction.problems), *unread),
    )


def _opened(opened: Mapping[str, OpenGroup], row: DecisionRow) -> OpenGroup:
    """The request as it stood in the open set; a group nobody asked for is the audit's to report."""
    group_id = str(row.group_id)
    unknown = OpenGroup(group_id=group_id, request_position=-1, issued_at_us=0, attempt=0, intended_step=0)
    return opened.get(group_id, unknown)


def _base(control: AnyLedgerControl, fold: PolicyFold) -> int:
    base = control.version_in if isinstance(control, StepCompleted) else fold.newest
    if base is None and not fold.versions:
        return 0  # the first transaction: nothing is decided in it
    if base not in fold.versions:
        raise IllegalState(
            f"the ledger was written on version {base}, which policy does not hold below "
            f"{control.policy_read_up_to}: run `driftlog audit`"
        )
    return base


class _PolicyAt:
    """The fold, as far as somebody has read."""

    def __init__(self, run_log: RunLog) -> None:
        self.fold = PolicyFold()
        self._records = run_log.records(TopicName.POLICY)
        self._ahead: Record | None = None

    def advance(self, read_up_to: int) -> None:
        """Fold every event below."""
        while True:
            record = self._ahead if self._ahead is not None else next(self._records, None)
            self._ahead = record
            if record is None or record.offset >= read_up_to:
                break
            self._ahead = None
            try:
                self.fold.apply(record.offset, decode_policy_event(record.value))
            except InvalidRecord:
                self.fold.skip_to(record.offset + 1)
        self.fold.skip_to(read_up_to)

    def forget(self, base: int, keep_proofs_of_last: int) -> None:
        """Proofs too old to be asked about."""
        if base in self.fold.versions:
            oldest = self.fold.versions[base].depth - keep_proofs_of_last
            self.fold.forget_proofs_below(self.fold.version_at_depth(base, oldest))

    def close(self) -> None:
        """Leave the log."""
        self._records.close()


class _Scores:
    """The topic `scores`, one step at a time: each partition holds the steps in their order."""

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log
        full = topic(run_log.run, TopicName.SCORES)
        self._ends = {p: end for (name, p), end in run_log.ends.items() if name == full}
        self._readers: dict[int, Generator[ScoresEntry, None, None]] = {}
        self._ahead: dict[int, ScoresEntry] = {}

    def of(self, version_in: int) -> tuple[dict[str, ScoreRow], list[str]]:
        """Scores of the step that updated this version, by trajectory id; and records that cannot be read."""
        found: dict[str, ScoreRow] = {}
        problems: list[str] = []
        for partition in self._ends:
            for entry in self._up_to(partition, version_in):
                if entry.problem:
                    refuse_newer(entry.problem, f"{self._run_log.run}.scores[{partition}]@{entry.offset}")
                    problems.append(f"scores[{partition}]@{entry.offset} cannot be read: {entry.problem}")
                found |= {row.trajectory_id: row for row in entry.rows if row.version_in == version_in}
        return found, problems

    def _up_to(self, partition: int, version_in: int) -> Iterator[ScoresEntry]:
        reader = self._reader(partition)
        while True:
            entry = self._ahead.pop(partition, None) or next(reader, None)
            if entry is None:
                return
            if entry.rows and entry.rows[0].version_in > version_in:
                self._ahead[partition] = entry
                return
            yield entry

    def _reader(self, partition: int) -> Generator[ScoresEntry, None, None]:
        """Of this partition alone: the others would run ahead of the ledger without a bound."""
        if partition not in self._readers:
            start = {p: end for p, end in self._ends.items() if p != partition}
            self._readers[partition] = self._run_log.scores(start=start)
        return self._readers[partition]

    def close(self) -> None:
        """Leave the log."""
        for reader in self._readers.values():
            reader.close()
