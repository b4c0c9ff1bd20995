"""The trainer's desk: what is held, what is decided but not yet written, and where reading stands.

Everything here is lost and rebuilt from the last committed Position on any doubt; nothing here is the truth.
Mutable, no I/O. Guarantees that a record's rows are decided in one transaction and each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from consumers.trainer.decisions import (
    drop_group,
    dropped_row,
    group_row,
    losing_rows,
    record_row,
    replayed_row,
    trained_row,
)
from consumers.trainer.grouping import Assembler, GroupBuffer, HeldRow
from consumers.trainer.positions import Progress, RecordKey
from consumers.trainer.replay import ReplayBuffer, ReplayedGroup, ReplayRules
from consumers.trainer.requests import Cursor, Issued, RequestRules, may_try_again
from consumers.trainer.selection import ReadyGroup
from infra.ports import Record
from schemas.errors import InvalidRecord
from schemas.ledger import Decision, DecisionRow, OpenGroup, Position, Reason
from schemas.trajectory import DecodedRow

_TRY_AGAIN = frozenset(
    {
        Reason.STALE,
        Reason.OTHER_BRANCH,
        Reason.INCOMPLETE,
        Reason.LOST,
        Reason.REWARD_FAILED,
        Reason.UNPROVEN,
        Reason.SUPPORT_MISMATCH,
        Reason.ABANDONED,
    }
)


class Desk:
    """State between two transactions of the trainer."""

    def __init__(self, position: Position, rules: RequestRules, replay: ReplayRules) -> None:
        self._rules = rules
        self.replay = ReplayBuffer(replay, position.replay)
        self.progress = Progress(position.partitions)
        self.assembler = Assembler(position.open_groups, rules.group_size)
        self.cursor = Cursor(next_request=position.next_request, prompt_cursor=position.prompt_cursor)
        self.decisions: list[DecisionRow] = []
        """decided, in no transaction yet"""
        self.dead: list[tuple[Record, InvalidRecord]] = []
        self.again: list[OpenGroup] = []
        """dropped groups whose prompt is to be issued again"""
        self.never_trained = 0
        self.gaps: list[str] = []
        """ranges that retention removed before they were decided, in words; the next transaction says so"""

    def position(self) -> Position:
        """The value for the ledger."""
        return Position(
            open_groups=self.assembler.open_groups(),
            next_request=self.cursor.next_request,
            prompt_cursor=self.cursor.prompt_cursor,
            partitions=self.progress.snapshot(),
            replay=self.replay.snapshot(),
        )

    # ------------------------------------------------------------------ arrivals

    def take_rows(self, key: RecordKey, rows: tuple[DecodedRow, ...], now_us: int) -> None:
        """A record that decoded. Its rows join an open group or are decided here."""
        self.progress.receive(key)
        refused = self.assembler.add(key, rows)
        if refused:
            self.decisions.extend(dropped_row(held, Reason.NONE, now_us) for held in refused)
            self.progress.decide(key)

    def take_poison(self, record: Record, error: InvalidRecord, now_us: int) -> None:
        """A record that did not decode: decided by position, bytes to the dead letters."""
        key = (record.partition, record.offset)
        self.progress.receive(key)
        self.decisions.append(record_row(key, error, now_us))
        self.dead.append((record, error))
        self.progress.decide(key)

    def step_over(self, topic: str, partition: int, first: int) -> int:
        """Retention removed what lay below `first` (C64): go on there. A group that misses rows times out."""
        held = {key for buffer in self.assembler.buffers() for key in buffer.records()}
        lost = self.progress.step_over(partition, first, held)
        self.replay.forget_gone(partition, first)
        self.gaps.append(f"{lost} offsets of {topic}[{partition}] below {first} lost to retention")
        return lost

    # ------------------------------------------------------------------ ends of groups

    def drop(self, buffer: GroupBuffer, reason: Reason, now_us: int, detail: str = "") -> None:
        """The group ends untrained; its prompt gets another attempt where the reason allows it."""
        self.assembler.close(buffer.group.group_id)
        self.decisions.extend(drop_group(buffer, reason, now_us, detail))
        self._decide_records(buffer)
        if reason in _TRY_AGAIN and may_try_again(buffer.group, self._rules):
            self.again.append(buffer.group)
        elif reason is not Reason.RUN_ENDED:
            self.never_trained += 1

    def replayed(self, groups: Sequence[ReplayedGroup], weight: Callable[[int], float], now_us: int) -> None:
        """These groups were used once more in the step."""
        self.decisions.extend(
            replayed_row(row, use_count=group.use_count, weight=weight(row.policy_lag), now_us=now_us)
            for group in groups
            for row in group.rows
        )
        self.replay.used(groups)

    def remember(self, group: ReadyGroup, advantages: dict[int, float], depth: int) -> None:
        """The group was trained for the first time and may be replayed."""
        trained = (m.held for m in group.members if m.trained)
        rows = ((held.key, held.row, advantages[held.trajectory.index_in_group]) for held in trained)
        self.replay.add(group.buffer.group.group_id, depth, rows)

    def finish(self, group: ReadyGroup, advantages: dict[int, float], weights: dict[int, float], now_us: int) -> None:
        """The group was trained; members that were withheld get their own reason. Keys: index in group."""
        buffer = group.buffer
        self.assembler.close(buffer.group.group_id)
        self.decisions.append(group_row(buffer.group.group_id, Decision.TRAINED, Reason.NONE, now_us))
        for member in group.members:
            held, verdict = member.held, member.verdict
            if member.trained:
                index = held.trajectory.index_in_group
                assert verdict.policy_lag is not None
                self.decisions.append(
                    trained_row(
                        held,
                        policy_lag=verdict.policy_lag,
                        weight=weights[index],
                        advantage=advantages[index],
                        now_us=now_us,
                    )
                )
            else:
                reason, detail = _withheld(held, verdict.reason, verdict.detail)
                self.decisions.append(dropped_row(held, reason, now_us, policy_lag=verdict.policy_lag, detail=detail))
        self.decisions.extend(losing_rows(buffer, now_us))
        self._decide_records(buffer)

    def abandon_everything(self, now_us: int) -> None:
        """Another branch begins: what is open belongs to the one that is left."""
        for buffer in self.assembler.buffers():
            self.drop(buffer, Reason.ABANDONED, now_us)
        self.replay.clear()

    def end_everything(self, now_us: int) -> None:
        """The closing transaction: whatever is still open ends with the run."""
        for buffer in self.assembler.buffers():
            self.drop(buffer, Reason.RUN_ENDED, now_us)
        self.again.clear()

    def _decide_records(self, buffer: GroupBuffer) -> None:
        for key in sorted(buffer.records()):
            self.progress.decide(key)

    # ------------------------------------------------------------------ transactions

    def adopt(self, issued: Issued) -> None:
        """These requests are in the transaction being built."""
        for group in issued.groups:
            self.assembler.open(group)
        self.cursor = issued.cursor
        self.again.clear()

    def taken(self) -> None:
        """All decisions so far are in a transaction; if that fails, this desk is thrown away."""
        self.decisions = []
        self.dead = []
        self.gaps = []

    def has_decisions(self) -> bool:
        """Something is decided and in no transaction yet."""
        return bool(self.decisions)

    def low_waters(self) -> dict[int, int]:
        """Per partition: everything below is decided."""
        return self.progress.low_waters()

    def read_from(self) -> dict[int, int]:
        """Per partition: where reading begins after a restart; below the low water where replay needs it."""
        starts = self.low_waters()
        for partition, offset in self.replay.missing():
            starts[partition] = min(starts[partition], offset)
        return starts


def _withheld(held: HeldRow, reason: Reason, detail: str) -> tuple[Reason, str]:
    """Why a member of a trained group is not trained itself."""
    if reason is not Reason.NONE:
        return reason, detail
    return Reason.REWARD_FAILED, held.trajectory.reward_error or "no reward"
