"""What each training step was trained on: its ledger transaction beside the rows that lie in the log.

Streams the ledger and each partition of `trajectories` side by side. Held in memory: rows that are read and not decided
yet, and those a replay may use again. Judges nothing but whether a row is the one the ledger names.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

from consumers.offline.run_log import LedgerTransaction, RecordKey, RunLog, TrajectoryEntry
from schemas.errors import IllegalState, RangeMissing
from schemas.ledger import Decision, DecisionRow, Position, Reason, StepCompleted, Subject
from schemas.topics import TopicName, topic
from schemas.trajectory import DecodedRow, Trajectory

ProblemKind = Literal["missing", "unreadable", "altered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """A row that is not in the log as the ledger has it."""

    kind: ProblemKind
    trajectory_id: str
    partition: int
    offset: int
    row: int
    detail: str

    @property
    def place(self) -> str:
        """Where it lies, or should."""
        return f"trajectories[{self.partition}]@{self.offset} row {self.row}"

    def __str__(self) -> str:
        return f"{self.trajectory_id} at {self.place}: {self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A decision and the row it is about."""

    decision: DecisionRow
    row: DecodedRow | None
    """None: it is not in the log, or its record cannot be decoded"""

    @property
    def trajectory(self) -> Trajectory | None:
        """The row's values; None where there are none to be trusted."""
        return None if self.row is None else self.row.trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """A group that was trained for the first time in this step."""

    group_id: str
    rows: tuple[StepRow, ...]
    """everything decided with it, in the order of the ledger: members of losing claims too"""

    @property
    def members(self) -> tuple[StepRow, ...]:
        """The winning claim's rows by index in group; withheld ones too, since their rewards are in the baseline."""
        trained = [r for r in self.rows if r.decision.decision is Decision.TRAINED and r.trajectory is not None]
        claims = {r.trajectory.claim_id for r in trained if r.trajectory is not None}
        found: dict[int, StepRow] = {}
        for row in self.rows:
            t = row.trajectory
            repeated = row.decision.reason in (Reason.DUPLICATE, Reason.CONFLICT)
            if t is not None and t.claim_id in claims and not repeated:
                found.setdefault(t.index_in_group, row)
        return tuple(found[index] for index in sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One training step as log and ledger tell it."""

    transaction: LedgerTransaction
    control: StepCompleted
    before: Position | None
    """where the trainer stood before this transaction: its open groups, what might be replayed"""
    decisions: tuple[DecisionRow, ...]
    """of the trained and replayed rows, in the order of the batch"""
    rows: tuple[Trajectory | None, ...]
    """parallel to `decisions`; None where there is none in the log"""
    row_sha256: tuple[str, ...]
    """parallel to `decisions`, computed from the row in the log; "" where there is none"""
    decoded: tuple[DecodedRow | None, ...]
    """parallel to `decisions`: the rows as a reader gets them"""
    groups: tuple[StepGroup, ...]
    """those used for the first time, in the order of the batch"""
    problems: tuple[RowProblem, ...]
    """rows of the batch and of its groups that are not what the ledger says"""

    @property
    def whole_rows(self) -> tuple[Trajectory, ...]:
        """The batch; IllegalState names the first row that is not there."""
        found = tuple(row for row in self.rows if row is not None)
        if len(found) != len(self.rows):
            raise IllegalState(f"version {self.control.version_out} cannot be put together: {self.problems[0]}")
        return found


def trained_steps(
    run_log: RunLog, *, first: int | None = None, last: int | None = None
) -> Generator[TrainedStep, None, None]:
    """Every training step that made a version from `first` to `last`, in the order of the ledger.

    With `first` reading begins where the trainer stood before that step. RangeMissing names the records that retention
    has removed and the first version all of whose rows are there."""
    with ExitStack() as stack:
        transactions = stack.enter_context(closing(run_log.transactions()))
        before: Position | None = None
        shelf: Shelf | None = None
        for transaction in transactions:
            control = transaction.control
            step = control if isinstance(control, StepCompleted) else None
            if step is not None and last is not None and step.version_out > last:
                return
            begins = first is None or (step is not None and step.version_out >= first)
            if shelf is None and begins:
                shelf = Shelf(run_log, before)
                stack.callback(shelf.close)
            if shelf is not None:
                if step is not None:
                    lost = _lost(transaction, shelf.beginnings)
                    if lost:
                        raise _range_missing(run_log, step, lost, shelf.beginnings, transactions)
                    yield _trained_step(transaction, step, before, shelf)
                shelf.forget(transaction)
            before = before if control is None else control.position


class Shelf:
    """Records that were read and may still be needed. Each partition is read only as far as somebody asked."""

    def __init__(self, run_log: RunLog, before: Position | None) -> None:
        self._run_log = run_log
        self.beginnings = run_log.beginnings(TopicName.TRAJECTORIES)
        """partition -> first offset in the log"""
        self._starts = {p: max(start, _needed_from(before, p)) for p, start in self.beginnings.items()}
        self._readers: dict[int, Generator[TrajectoryEntry, None, None]] = {}
        self._next = dict(self._starts)
        """partition -> offsets below were read"""
        self._held: dict[RecordKey, TrajectoryEntry] = {}
        self._replayable = frozenset() if before is None else _replayable(before)

    def get(self, key: RecordKey) -> TrajectoryEntry | None:
        """The record there; None when there is none."""
        partition, offset = key
        while self._next.get(partition, offset + 1) <= offset:
            entry = next(self._reader(partition), None)
            if entry is None:
                self._next[partition] = self._end(partition)
                break
            self._held[entry.key] = entry
            self._next[partition] = entry.offset + 1
        return self._held.get(key)

    def forget(self, transaction: LedgerTransaction) -> None:
        """What this transaction decided is needed no longer, unless a replay may use it."""
        decided = {
            (row.partition, row.offset)
            for row in transaction.decisions
            if row.partition is not None and row.offset is not None
        }
        if transaction.control is not None:
            kept = _replayable(transaction.control.position)
            decided |= self._replayable
            self._replayable = kept
        for key in decided - self._replayable:
            self._held.pop(key, None)

    def held(self) -> int:
        """Records in memory."""
        return len(self._held)

    def close(self) -> None:
        """Leave the log."""
        for reader in self._readers.values():
            reader.close()

    def _reader(self, partition: int) -> Generator[TrajectoryEntry, None, None]:
        """Of this partition alone: the others would run ahead of the ledger without a bound."""
        if partition not in self._readers:
            start = {p: self._end(p) for p in self.beginnings if p != partition}
            start[partition] = self._starts[partition]
            self._readers[partition] = self._run_log.trajectories(start=start)
        return self._readers[partition]

    def _end(self, partition: int) -> int:
        return self._run_log.ends[topic(self._run_log.run, TopicName.TRAJECTORIES), partition]


def _trained_step(
    transaction: LedgerTransaction, step: StepCompleted, before: Position | None, shelf: Shelf
) -> TrainedStep:
    used: list[StepRow] = []
    by_group: dict[str, list[StepRow]] = {
        row.group_id: []
        for row in transaction.decisions
        if row.subject is Subject.GROUP and row.decision is Decision.TRAINED and row.group_id is not None
    }
    problems: list[RowProblem] = []
    for decision in transaction.decisions:
        if decision.subject is not Subject.TRAJECTORY:
            continue
        in_group = decision.decision is not Decision.REPLAYED and decision.group_id in by_group
        if decision.decision is Decision.DROPPED and not in_group:
            continue
        found, problem = found_row(decision, shelf)
        if problem is not None:
            problems.append(problem)
        if decision.decision is not Decision.DROPPED:
            used.append(found)
        if in_group:
            by_group[decision.group_id or ""].append(found)
    return TrainedStep(
        transaction=transaction,
        control=step,
        before=before,
        decisions=tuple(row.decision for row in used),
        rows=tuple(row.trajectory for row in used),
        row_sha256=tuple("" if row.row is None else row.row.row_sha256 for row in used),
        decoded=tuple(row.row for row in used),
        groups=tuple(StepGroup(group_id=group_id, rows=tuple(rows)) for group_id, rows in by_group.items()),
        problems=tuple(problems),
    )


def found_row(decision: DecisionRow, shelf: Shelf) -> tuple[StepRow, RowProblem | None]:
    """The row a decision names, and what is wrong with it."""
    partition, offset, number = decision.partition, decision.offset, decision.row
    kind: ProblemKind = "missing"
    row: DecodedRow | None = None
    if partition is None or offset is None or number is None:
        detail = "the decision names no place in the log"
    elif (entry := shelf.get((partition, offset))) is None:
        detail = "there is no such record in the log"
    elif entry.error is not None:
        kind, detail = "unreadable", f"the record was decoded when it was decided, and now is not: {entry.error}"
    elif (row := next((r for r in entry.rows if r.row == number), None)) is None:
        detail = f"the record has {len(entry.rows)} rows"
    else:
        kind, detail = _judged(decision, row)
    found = StepRow(decision=decision, row=row)
    if not detail:
        return found, None
    return found, RowProblem(
        kind=kind,
        trajectory_id=decision.trajectory_id or "?",
        partition=-1 if partition is None else partition,
        offset=-1 if offset is None else offset,
        row=-1 if number is None else number,
        detail=detail,
    )


def _judged(decision: DecisionRow, row: DecodedRow) -> tuple[ProblemKind, str]:
    """ "" when the row is the one the decision is about; otherwise how it differs, as far as that can be told."""
    differences = [
        f"{name} was {said!r} when it was decided, in the log it is {found!r}"
        for name, said, found in told_of(decision, row)
        if said != found
    ]
    if decision.row_sha256 != row.row_sha256:
        words = f"its row_sha256 is {row.row_sha256[:12]}..., the ledger says {(decision.row_sha256 or '')[:12]}..."
        fields = "; ".join(differences) or "in a field the ledger does not repeat (tokens, log-probabilities, ...)"
        return "altered", f"{words}; {fields}"
    if row.trajectory is None:
        return "unreadable", f"the row is refused as {row.code}: {row.detail}"
    return "altered", "; ".join(differences)


def told_of(decision: DecisionRow, row: DecodedRow) -> list[tuple[str, object, object]]:
    """(field, as the ledger says it, as the row in the log has it) of all that both tell."""
    told: list[tuple[str, object, object]] = [
        ("trajectory_id", decision.trajectory_id or "", row.trajectory_id),
        ("group_id", decision.group_id or "", row.group_id),
    ]
    if row.trajectory is not None:
        told.append(("reward", decision.reward, row.trajectory.reward))
        told.append(("completion_tokens", decision.completion_tokens, len(row.trajectory.token_ids)))
    return told


# ---------------------------------------------------------------------- retention


def _needed_from(before: Position | None, partition: int) -> int:
    """The lowest offset that a step after this position may use: where a trainer would read on."""
    if before is None or partition not in before.partitions:
        return 0
    progress = before.partitions[partition]
    replayed = [offset for p, offset in _replayable(before) if p == partition]
    return min([progress.next_offset, *progress.undecided, *replayed])


def _replayable(position: Position) -> frozenset[RecordKey]:
    return frozenset((row.partition, row.offset) for group in position.replay for row in group.rows)


def _lost(transaction: LedgerTransaction, beginnings: dict[int, int]) -> set[RecordKey]:
    """Records of the batch and its groups that lie before the beginning of the log."""
    trained = {row.group_id for row in transaction.decisions if row.decision is not Decision.DROPPED}
    return {
        (row.partition, row.offset)
        for row in transaction.decisions
        if row.subject is Subject.TRAJECTORY and row.group_id in trained
        if row.partition is not None and row.offset is not None
        if row.offset < beginnings.get(row.partition, 0)
    }


def _range_missing(
    run_log: RunLog,
    step: StepCompleted,
    lost: Collection[RecordKey],
    beginnings: dict[int, int],
    later: Iterable[LedgerTransaction],
) -> RangeMissing:
    """The records that are gone, and the first version from which on none is."""
    whole_from: int | None = None
    for transaction in later:
        if not isinstance(transaction.control, StepCompleted):
            continue
        if _lost(transaction, beginnings):
            whole_from = None
        elif whole_from is None:
            whole_from = transaction.control.version_out
    places = {p: [offset for q, offset in lost if q == p] for p in sorted({p for p, _ in lost})}
    ranges = ", ".join(f"trajectories[{p}] records {min(o)}-{beginnings[p] - 1}" for p, o in places.items())
    way_out = "no later version is whole" if whole_from is None else f"ask for versions from {whole_from} on"
    full = topic(run_log.run, TopicName.TRAJECTORIES)
    return RangeMissing(
        f"what version {step.version_out} was trained on is no longer whole: retention removed {ranges}; {way_out}",
        {(full, p): beginnings[p] for p in places},
    )
