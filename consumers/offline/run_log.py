"""Reads the topics of one run as they stood when the reader was made: typed entries, one record in memory at a time.

Ends are taken once. The ledger counts up to its committed end; every other topic up to its high watermark taken
AFTER that, because the records of a committed transaction lie in all its topics before it commits. So whatever the
ledger says has its counterpart in what is read here; the other topics may be one transaction ahead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infra.ports import Clock, EventReader, Record
from schemas import headers as record_headers
from schemas.errors import InvalidRecord, LogUnavailable
from schemas.evaluation_codec import EvaluationRow, decode_evaluation
from schemas.headers import header, header_text, is_arrow
from schemas.heartbeat import Heartbeat, decode_heartbeat
from schemas.ids import RunId
from schemas.ledger import AnyLedgerControl, DecisionRow, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import AnyPolicyEvent, decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Void
from schemas.prompt_codec import decode_request
from schemas.scores_codec import ScoreRow, decode_scores
from schemas.topics import TopicName, topic
from schemas.trajectory import DecodedRow, PromptRequest
from schemas.trajectory_codec import TrajectoryLimits, decode_group
from schemas.trajectory_validate import WRITER_LIMITS

OpenReader = Callable[[Sequence[str]], EventReader]
"""full topic names -> a reader at their beginning, committed records only"""
RecordKey = tuple[int, int]
"""(partition, offset) of a trajectories record"""

_READ = (
    TopicName.LEDGER,
    TopicName.POLICY,
    TopicName.PROMPTS,
    TopicName.TRAJECTORIES,
    TopicName.WORKERS,
    TopicName.DEADLETTERS,
    TopicName.SCORES,
)
_POLL_RECORDS = 200
# A reader's thread fills its queue meanwhile; long enough not to spin, short beside a broker's answer.
_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """One record of `policy` and what the fold says of it."""

    offset: int
    event: AnyPolicyEvent | None
    """None: not decodable, void for everybody"""
    void: Void | None
    problem: str = ""
    """why it cannot be decoded"""
    is_damaged: bool = False
    """its bytes are not those its ce_id was made from"""

    @property
    def is_legal(self) -> bool:
        """It counts."""
        return self.event is not None and self.void is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerProblem:
    """A ledger record that is not what the trainer wrote."""

    offset: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTransaction:
    """One trainer transaction as the ledger holds it."""

    number: int
    """0, 1, 2, ... over the run"""
    offset: int
    """of the control record, or of the last record when there is none"""
    decisions: tuple[DecisionRow, ...]
    control: AnyLedgerControl | None
    """None: the ledger ends, or breaks, before it"""
    problems: tuple[LedgerProblem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEntry:
    """One record of `prompts`."""

    partition: int
    offset: int
    request: PromptRequest | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEntry:
    """One record of `trajectories`: its rows, or why it has none."""

    partition: int
    offset: int
    rows: tuple[DecodedRow, ...]
    error: InvalidRecord | None
    value_sha256: str
    value_bytes: int = 0
    appended_at_ms: int
    """broker's clock"""

    @property
    def key(self) -> RecordKey:
        """Where it lies."""
        return self.partition, self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One record of `deadletters`."""

    offset: int
    topic: str
    """where the record was read from; "" when its headers do not say"""
    partition: int
    source_offset: int
    code: str
    value_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresEntry:
    """One record of `scores`: the trainer's log-probabilities of one group's trained rows in one step."""

    partition: int
    offset: int
    rows: tuple[ScoreRow, ...]
    problem: str = ""
    """why it cannot be read"""
    is_damaged: bool = False
    """its bytes are not those its ce_id was made from"""


class RunLog:
    """The topics of one run. `pause` waits that many seconds; `stall_limit_s` bounds waiting without progress."""

    def __init__(
        self,
        run: RunId,
        open_reader: OpenReader,
        *,
        clock: Clock,
        pause: Callable[[float], None] = time.sleep,
        stall_limit_s: float = 60.0,
        limits: TrajectoryLimits = WRITER_LIMITS,
    ) -> None:
        self.run = run
        self.limits = limits
        self._open_reader = open_reader
        self._clock = clock
        self._pause = pause
        self._stall_limit_s = stall_limit_s
        self.ends: Mapping[tuple[str, int], int] = self._take_ends()
        """(full topic name, partition) -> where this log ends"""

    def _take_ends(self) -> dict[tuple[str, int], int]:
        ledger = topic(self.run, TopicName.LEDGER)
        reader = self._open_reader([topic(self.run, name) for name in _READ])
        try:
            committed = {place: end for place, end in reader.end_offsets().items() if place[0] == ledger}
            return {**reader.high_watermarks(), **committed}
        finally:
            reader.close()

    def beginnings(self, name: TopicName) -> dict[int, int]:
        """Partition -> the first offset that is still in the log; above 0 where retention has removed records."""
        full = topic(self.run, name)
        reader = self._open_reader([full])
        try:
            return {partition: offset for (_, partition), offset in reader.positions().items()}
        finally:
            reader.close()

    # ------------------------------------------------------------------ records

    def records(self, name: TopicName, start: Mapping[int, int] | None = None) -> Generator[Record, None, None]:
        """Every committed record of one topic below its end, in offset order per partition.

        `start`: partition -> offset to begin at. LogUnavailable when nothing comes for `stall_limit_s` seconds."""
        full = topic(self.run, name)
        ends = {place: end for place, end in self.ends.items() if place[0] == full}
        reader = self._open_reader([full])
        try:
            # Evaluations are beside the training path and nothing refers to them: their end is taken now.
            ends = ends or dict(reader.high_watermarks())
            for partition, offset in (start or {}).items():
                reader.seek(full, partition, offset)
            deadline_s = self._clock.monotonic_s() + self._stall_limit_s
            while True:
                polled = reader.poll(_POLL_RECORDS)
                for record in polled:
                    if record.offset < ends[full, record.partition]:
                        yield record
                positions = reader.positions()
                if all(positions[place] >= end for place, end in ends.items()):
                    return
                if polled:
                    deadline_s = self._clock.monotonic_s() + self._stall_limit_s
                elif self._clock.monotonic_s() > deadline_s:
                    behind = {f"{t}[{p}]": f"{positions[t, p]} of {end}" for (t, p), end in ends.items()}
                    raise LogUnavailable(f"nothing was read for {self._stall_limit_s:g} s: {behind}; is the broker up?")
                else:
                    self._pause(_PAUSE_S)
        finally:
            reader.close()

    # ------------------------------------------------------------------ typed entries

    def policy(self, fold: PolicyFold | None = None) -> Iterator[PolicyEntry]:
        """Events with the fold's verdict at their position. A fold that is given ends up at the end of the topic."""
        fold = PolicyFold() if fold is None else fold
        for record in self.records(TopicName.POLICY):
            damaged = _is_damaged(record, required=False)
            try:
                event = decode_policy_event(record.value)
            except InvalidRecord as error:
                fold.skip_to(record.offset + 1)
                yield PolicyEntry(
                    offset=record.offset, event=None, void=None, problem=error.message[:200], is_damaged=damaged
                )
                continue
            void = fold.apply(record.offset, event)
            yield PolicyEntry(offset=record.offset, event=event, void=void, is_damaged=damaged)
        fold.skip_to(self.ends[topic(self.run, TopicName.POLICY), 0])

    def transactions(self) -> Generator[LedgerTransaction, None, None]:
        """The ledger, one trainer transaction at a time: decisions up to and with their control record."""
        number, last = 0, -1
        decisions: list[DecisionRow] = []
        problems: list[LedgerProblem] = []
        for record in self.records(TopicName.LEDGER):
            last = record.offset
            if _is_damaged(record, required=True):
                message = "the bytes are not those its ce_id was made from: the record was altered"
                problems.append(LedgerProblem(offset=record.offset, message=message))
            control: AnyLedgerControl | None = None
            try:
                if is_arrow(record.headers):
                    decisions += decode_decisions(record.value, record.headers)
                    continue
                control = decode_ledger_control(record.value)
            except InvalidRecord as error:
                problems.append(LedgerProblem(offset=record.offset, message=f"cannot be read: {str(error)[:300]}"))
                if is_arrow(record.headers):
                    continue
            yield LedgerTransaction(
                number=number,
                offset=record.offset,
                decisions=tuple(decisions),
                control=control,
                problems=tuple(problems),
            )
            number, decisions, problems = number + 1, [], []
        if decisions or problems:
            yield LedgerTransaction(
                number=number, offset=last, decisions=tuple(decisions), control=None, problems=tuple(problems)
            )

    def requests(self) -> Iterator[RequestEntry]:
        """Every prompt request, in offset order per partition."""
        for record in self.records(TopicName.PROMPTS):
            try:
                request, problem = decode_request(record.value, record.headers), ""
            except InvalidRecord as error:
                request, problem = None, str(error)[:300]
            yield RequestEntry(partition=record.partition, offset=record.offset, request=request, problem=problem)

    def trajectories(
        self, *, start: Mapping[int, int] | None = None, group_ids: Collection[str] | None = None
    ) -> Generator[TrajectoryEntry, None, None]:
        """Every trajectories record, decoded; with `group_ids` only those of these keys."""
        keys = None if group_ids is None else {group_id.encode() for group_id in group_ids}
        for record in self.records(TopicName.TRAJECTORIES, start):
            if keys is not None and record.key not in keys:
                continue
            rows: tuple[DecodedRow, ...] = ()
            error = None
            try:
                rows = decode_group(record.value, record.headers, self.limits)
            except InvalidRecord as refused:
                error = refused
            yield TrajectoryEntry(
                partition=record.partition,
                offset=record.offset,
                rows=rows,
                error=error,
                value_sha256=_sha256(record.value),
                value_bytes=len(record.value or b""),
                appended_at_ms=record.timestamp_ms,
            )

    def scores(self, *, start: Mapping[int, int] | None = None) -> Generator[ScoresEntry, None, None]:
        """Every scores record, in offset order per partition: that is the order of the steps."""
        for record in self.records(TopicName.SCORES, start):
            rows: tuple[ScoreRow, ...] = ()
            problem = ""
            try:
                rows = decode_scores(record.value, record.headers)
            except InvalidRecord as error:
                problem = str(error)[:300]
            yield ScoresEntry(
                partition=record.partition,
                offset=record.offset,
                rows=rows,
                problem=problem,
                is_damaged=_is_damaged(record, required=True),
            )

    def heartbeats(self) -> Iterator[Heartbeat]:
        """Readable heartbeats that compaction has left, in the order of the log."""
        for record in self.records(TopicName.WORKERS):
            try:
                yield decode_heartbeat(record.value)
            except InvalidRecord:
                continue  # a heartbeat is no evidence of anything: a broken one says nothing

    def evaluations(self) -> Iterator[EvaluationRow]:
        """Readable rows of the evaluator, up to now."""
        for record in self.records(TopicName.EVALUATIONS):
            try:
                yield from decode_evaluation(record.value, record.headers)
            except InvalidRecord:
                continue  # no decision stands on it: a broken one is a gap in a curve

    def dead_letters(self) -> Iterator[DeadLetter]:
        """What consumers could not use, with the address it came from."""
        for record in self.records(TopicName.DEADLETTERS):
            yield DeadLetter(
                offset=record.offset,
                topic=_text(record, record_headers.DEAD_TOPIC),
                partition=_number(record, record_headers.DEAD_PARTITION),
                source_offset=_number(record, record_headers.DEAD_OFFSET),
                code=_text(record, record_headers.DEAD_CODE),
                value_sha256=_sha256(record.value),
            )


def _sha256(value: bytes | None) -> str:
    return "none" if value is None else hashlib.sha256(value).hexdigest()


def _is_damaged(record: Record, *, required: bool) -> bool:
    """Writers of these topics take the ce_id from the bytes, so it tells when a byte was changed afterwards."""
    event_id = header(record.headers, record_headers.CE_ID)
    if event_id is None:
        return required
    return event_id != _sha256(record.value)[:32].encode()


def _text(record: Record, name: str) -> str:
    try:
        return header_text(record.headers, name) or ""
    except InvalidRecord:
        return ""


def _number(record: Record, name: str) -> int:
    text = _text(record, name)
    return int(text) if text.isdecimal() and len(text) < 20 else -1
