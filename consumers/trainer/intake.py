"""What comes to the trainer's desk between two steps: trajectories, dead letters, and the end of a group's time.

Guarantees that every record is read once into the desk, held or decided, and that a group is closed by time only
when everything that lay in the log by then was read. Never waits, never commits.
"""

from __future__ import annotations

import logging

from consumers.trainer.dead_letters import poisoned_group
from consumers.trainer.deadlines import GroupDeadlines
from consumers.trainer.decoding import read_group
from consumers.trainer.desk import Desk
from consumers.trainer.grouping import GroupBuffer
from consumers.trainer.selection import judge_group
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from infra.logs import event
from schemas.errors import RangeMissing
from schemas.headers import DEAD_MESSAGE, header_text
from schemas.ledger import Reason
from schemas.policy_fold import PolicyFold

log = logging.getLogger(__name__)


class Intake:
    """Fills a desk; remembers nothing of its own."""

    def __init__(self, settings: TrainerSettings, ports: TrainerPorts, deadlines: GroupDeadlines) -> None:
        self._s = settings
        self._p = ports
        self._deadlines = deadlines

    def read(self, desk: Desk) -> bool:
        """Read what has arrived. Only groups of the open set are held, so this is bounded by pacing."""
        if len(desk.decisions) >= self._s.max_pending_decisions:
            return False
        try:
            records = self._p.trajectories.poll(self._s.poll_records)
        except RangeMissing as missing:
            self._step_over(desk, missing)
            return True
        for record in records:
            key = (record.partition, record.offset)
            decided = desk.progress.is_decided(key)
            if decided and key not in desk.replay.missing():
                continue
            group = read_group(record, self._s.limits)
            if group.fault is not None:
                event(
                    log, "poison_record", level=logging.WARNING, topic=record.topic, partition=record.partition,
                    offset=record.offset, reason=str(group.fault),
                )  # fmt: skip
                desk.take_poison(record, group.fault, self._p.clock.now_us())
            elif decided:
                desk.replay.restore(key, group.rows)
            else:
                desk.take_rows(key, group.rows, self._p.clock.now_us())
        return bool(records)

    def _step_over(self, desk: Desk, missing: RangeMissing) -> None:
        """Go on at the first record that is still there, never at the end, and say what is gone."""
        for (topic, partition), first in sorted(missing.first.items()):
            lost = desk.step_over(topic, partition, first)
            self._p.trajectories.seek(topic, partition, first)
            # offset: where it goes on.
            event(log, "range_lost", level=logging.WARNING, topic=topic, partition=partition, offset=first, lost=lost)

    def read_dead_letters(self, desk: Desk) -> None:
        """A worker found a request in the last words of dead workers: its group is decided `poison_prompt`."""
        for record in self._p.deadletters.poll(self._s.poll_records):
            group_id = poisoned_group(record, self._s.run)
            for buffer in desk.assembler.buffers():
                if buffer.group.group_id == group_id:
                    detail = (header_text(record.headers, DEAD_MESSAGE) or "")[:500]
                    event(log, "poison_prompt", level=logging.WARNING, group=group_id, detail=detail)
                    desk.drop(buffer, Reason.POISON_PROMPT, self._p.clock.now_us(), detail)

    def expire(self, desk: Desk, fold: PolicyFold, base: int, ahead: int) -> None:
        """Close groups whose time is up, once everything that was in the log by then has been read.

        `base` and `ahead`: as `admission.judge` takes them."""
        now_s = self._p.clock.monotonic_s()
        open_ids = (group.group_id for group in desk.assembler.open_groups())
        expired = self._deadlines.expired(open_ids, now_s, self._p.trajectories)
        for buffer in desk.assembler.buffers():
            group_id = buffer.group.group_id
            if group_id not in expired:
                continue
            size = self._s.requests.group_size
            if buffer.winner is not None and (
                judge_group(buffer, fold, base, self._s.selection, group_size=size, ahead=ahead) is not None
            ):
                # It is in, and waits for others: ask again after another time-out, not at every step.
                self._deadlines.add([group_id], now_s)
                continue
            reason, detail = self._why(buffer)
            event(log, "group_expired", level=logging.WARNING, group=group_id, reason=reason, detail=detail)
            desk.drop(buffer, reason, self._p.clock.now_us(), detail)

    def _why(self, buffer: GroupBuffer) -> tuple[Reason, str]:
        if buffer.winner is not None:
            return Reason.UNPROVEN, "complete, but its proofs never appeared in policy"
        here = sum(1 for held in buffer.rows() if held.row.trajectory is not None)
        if here:
            size = self._s.requests.group_size
            return Reason.INCOMPLETE, f"{here}/{size} members after {self._s.group_timeout_s:g} s"
        return Reason.LOST, f"no row after {self._s.group_timeout_s:g} s"
