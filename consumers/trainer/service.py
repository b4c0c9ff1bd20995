"""The trainer service: consumes trajectories, trains, publishes every version in one transaction (G1, G2, G5).

    poll -> match to the open set -> assemble by claim -> judge -> batch -> train -> checkpoint -> transaction

Training happens outside the transaction. Any doubt about a transaction: rebuild the writer, re-read the
committed state, go on from there. The service never waits for a version to be live.
"""

from __future__ import annotations

import logging
from enum import StrEnum

from consumers.trainer.branching import branch_origin
from consumers.trainer.dead_letters import poisoned_group
from consumers.trainer.deadlines import GroupDeadlines
from consumers.trainer.desk import Desk
from consumers.trainer.pacing import requests_to_issue
from consumers.trainer.recovery import CommittedState
from consumers.trainer.requests import Head, Issued
from consumers.trainer.selection import ReadyGroup, judge_group, select
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.transactor import Transactor, oldest_request
from infra.logs import event
from infra.policy_follower import PolicyFollower
from infra.ports import EventReader
from schemas.errors import IllegalState, InvalidRecord, LogUnavailable, StepFailed, TransactionFailed
from schemas.headers import DEAD_MESSAGE, header_text
from schemas.ledger import AnyLedgerControl, PartitionProgress, Position, Reason
from schemas.policy_fold import PolicyFold
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory_codec import decode_group

log = logging.getLogger(__name__)


class Phase(StrEnum):
    """What the service is doing."""

    RECOVERING = "recovering"
    RUNNING = "running"
    FINISHED = "finished"


class TrainerService:
    """Call `step` until `finished`; it never waits, but a training step is computed inside one call."""

    def __init__(self, settings: TrainerSettings, ports: TrainerPorts) -> None:
        self._s = settings
        self._p = ports
        self._ledger_topic = topic(settings.run, TopicName.LEDGER)
        self._trajectories_topic = topic(settings.run, TopicName.TRAJECTORIES)
        self._transactor = Transactor(settings, ports)
        self.phase = Phase.RECOVERING
        self.follower: PolicyFollower | None = None
        self._reading: CommittedState | None = None
        self._ledger: EventReader | None = None
        self._desk: Desk | None = None
        self._deadlines = GroupDeadlines(settings.group_timeout_s)
        self._recoveries = 0
        self._step_tries = 0
        self._last_published_s: float | None = None
        """when training was found to be complete"""
        self._undecided_since_s: float | None = None
        self._refills = 0
        """rounds in which zero-variance groups of the step at hand were replaced"""
        self.waiting_for: list[str] = []

    @property
    def finished(self) -> bool:
        """The run has ended; nothing is left to do."""
        return self.phase is Phase.FINISHED

    def step(self) -> bool:
        """Do one bounded piece of work; False when there was nothing to do.

        Raises Fenced (a newer trainer runs: exit 3), IllegalState (log and store disagree: stop)."""
        try:
            if self.phase is Phase.RECOVERING:
                return self._recover()
            if self.phase is Phase.RUNNING:
                return self._run()
            return False
        except (TransactionFailed, LogUnavailable) as failure:
            self._recoveries += 1
            event(log, "log_in_doubt", level=logging.WARNING, tries=self._recoveries, reason=str(failure))
            if self._recoveries > self._s.recoveries_in_row:
                raise
            self._forget()
            return True

    def close(self) -> None:
        """Release what the service opened itself."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    # ------------------------------------------------------------------ recovery

    def _forget(self) -> None:
        self.phase = Phase.RECOVERING
        self._reading = None
        self._desk = None

    def _recover(self) -> bool:
        if self._reading is None:
            self._p.writer.init()  # fences a predecessor and ends its transaction before anything is read
            if self._ledger is not None:
                self._ledger.close()
            self._ledger = self._p.open_ledger()
            self.follower = self._p.open_policy()
            self._reading = CommittedState(self.follower, self._ledger, self._ledger_topic, self._p.clock)
        if not self._reading.advance():
            return False
        control, self._reading = self._reading.control, None
        assert self._ledger is not None
        self._ledger.close()
        self._ledger = None
        if control is None:
            self._begin_run()
        else:
            self._resume(control)
        self._recoveries = 0
        return True

    def _begin_run(self) -> None:
        """The first transaction of a run: RunStarted, version 0, the first requests."""
        partitions = range(TOPICS[TopicName.TRAJECTORIES].partitions)
        empty = {partition: PartitionProgress(next_offset=0) for partition in partitions}
        desk = self._start_desk(Position(open_groups=(), next_request=0, prompt_cursor=0, partitions=empty))
        published = self._p.publication.publish(version=0, parent=None, depth=0, oldest_open_request=0)
        self._wrote(self._transactor.begin(desk, self._fold(), published))
        event(log, "run_started", run=self._s.run)
        self.phase = Phase.RUNNING

    def _resume(self, control: AnyLedgerControl) -> None:
        """Go on from the committed state, or extend a run that ended."""
        fold = self._fold()
        newest = self._newest()
        wish = self._s.branch
        wants_branch = wish is not None and wish.when_newest == newest
        if not wants_branch and fold.ended and self._s.requests.pacing.last_step <= fold.versions[newest].depth:
            self.phase = Phase.FINISHED
            return
        origin = branch_origin(fold, newest, self._s.branch)
        self._p.publication.restore(self._p.learner, fold.versions[newest if origin is None else origin].event)
        desk = self._start_desk(control.position)
        event(log, "resumed", policy_version=newest, open_groups=len(control.position.open_groups))
        if origin is not None:
            event(log, "branched", level=logging.WARNING, from_version=origin, steps_given_up=fold.lag(origin, newest))
            self._wrote(self._transactor.branch(desk, fold, origin))
        elif fold.ended:
            self._wrote(self._transactor.extend(desk, fold))
        self.phase = Phase.RUNNING

    def _start_desk(self, position: Position) -> Desk:
        desk = self._desk = Desk(position, self._s.requests, self._s.replay)
        self._deadlines.restart((g.group_id for g in position.open_groups), self._p.clock.monotonic_s())
        for partition, offset in desk.read_from().items():
            self._p.trajectories.seek(self._trajectories_topic, partition, offset)
        self._p.deadletters.seek(topic(self._s.run, TopicName.DEADLETTERS), 0, 0)
        self._undecided_since_s = None
        self._step_tries = 0
        self._refills = 0
        return desk

    # ------------------------------------------------------------------ running

    def _run(self) -> bool:
        desk, fold = self._require_desk(), self._fold()
        assert self.follower is not None
        worked = bool(self.follower.advance())
        worked |= self._ingest(desk)
        self._read_dead_letters(desk)
        if fold.read_up_to < self._transactor.policy_barrier:
            return worked
        self._expire(desk)
        newest = self._newest()
        full = self._step_is_full(desk, fold.versions[newest].depth)
        head = Head(version=newest, depth=fold.versions[newest].depth, step_is_full=full)
        if head.depth >= self._s.requests.pacing.last_step:
            return self._end_run(head)
        if requests_to_issue(len(desk.assembler), head.depth, self._s.requests.pacing):
            self._settle(desk, head, "requests")
            return True
        size = self._s.requests.group_size
        buffers = desk.assembler.buffers()
        selection = select(buffers, fold, newest, self._s.selection, group_size=size, step_is_full=full)
        self.waiting_for = selection.waiting_for
        for doomed in selection.doomed:
            event(log, "group_dropped", group=doomed.buffer.group.group_id, reason=doomed.reason, detail=doomed.detail)
            desk.drop(doomed.buffer, doomed.reason, self._p.clock.now_us(), doomed.detail)
        self._refills += any(doomed.reason is Reason.ZERO_VARIANCE for doomed in selection.doomed)
        if selection.batch and not desk.replay.missing():
            self._train(desk, selection.batch, newest)
            return True
        if self._settle_is_due(desk):
            self._settle(desk, head, "decisions")
            return True
        return worked or bool(selection.doomed)

    def _step_is_full(self, desk: Desk, depth: int) -> bool:
        """Its zero-variance groups were replaced often enough: it takes what is left, if anything is."""
        left = any(group.intended_step <= depth for group in desk.assembler.open_groups())
        return self._refills > self._s.refill_rounds and left

    def _ingest(self, desk: Desk) -> bool:
        """Read what has arrived. Only groups of the open set are held, so this is bounded by pacing."""
        if len(desk.decisions) >= self._s.max_pending_decisions:
            return False
        records = self._p.trajectories.poll(self._s.poll_records)
        for record in records:
            key = (record.partition, record.offset)
            decided = desk.progress.is_decided(key)
            if decided and key not in desk.replay.missing():
                continue
            try:
                rows = decode_group(record.value, record.headers, self._s.limits)
            except InvalidRecord as error:
                event(
                    log,
                    "poison_record",
                    level=logging.WARNING,
                    partition=record.partition,
                    offset=record.offset,
                    reason=str(error),
                )
                desk.take_poison(record, error, self._p.clock.now_us())
            else:
                if decided:
                    desk.replay.restore(key, rows)
                else:
                    desk.take_rows(key, rows, self._p.clock.now_us())
        return bool(records)

    def _read_dead_letters(self, desk: Desk) -> None:
        """A worker found a request in the last words of dead workers: its group is decided `poison_prompt`."""
        for record in self._p.deadletters.poll(self._s.poll_records):
            group_id = poisoned_group(record, self._s.run)
            for buffer in desk.assembler.buffers():
                if buffer.group.group_id == group_id:
                    detail = (header_text(record.headers, DEAD_MESSAGE) or "")[:500]
                    event(log, "poison_prompt", level=logging.WARNING, group=group_id, detail=detail)
                    desk.drop(buffer, Reason.POISON_PROMPT, self._p.clock.now_us(), detail)

    def _expire(self, desk: Desk) -> None:
        """Close groups whose time is up, once everything that was in the log by then has been read."""
        expired = self._deadlines.expired(
            (group.group_id for group in desk.assembler.open_groups()),
            self._p.clock.monotonic_s(),
            self._p.trajectories,
        )
        for buffer in desk.assembler.buffers():
            if buffer.group.group_id in expired:
                here = sum(1 for held in buffer.rows() if held.row.trajectory is not None)
                size = self._s.requests.group_size
                if buffer.winner is not None:
                    if (
                        judge_group(buffer, self._fold(), self._newest(), self._s.selection, group_size=size)
                        is not None
                    ):
                        # It is in, and waits for others: ask again after another time-out, not at every step.
                        self._deadlines.add([buffer.group.group_id], self._p.clock.monotonic_s())
                        continue
                    reason, detail = Reason.UNPROVEN, "complete, but its proofs never appeared in policy"
                elif here:
                    reason, detail = Reason.INCOMPLETE, f"{here}/{size} members after {self._s.group_timeout_s:g} s"
                else:
                    reason, detail = Reason.LOST, f"no row after {self._s.group_timeout_s:g} s"
                event(
                    log,
                    "group_expired",
                    level=logging.WARNING,
                    group=buffer.group.group_id,
                    reason=reason,
                    detail=detail,
                )
                desk.drop(buffer, reason, self._p.clock.now_us(), detail)

    def _settle_is_due(self, desk: Desk) -> bool:
        now_s = self._p.clock.monotonic_s()
        if not desk.has_decisions():
            self._undecided_since_s = None
            return False
        if self._undecided_since_s is None:
            self._undecided_since_s = now_s
        late = now_s - self._undecided_since_s >= self._s.settle_after_s
        return late or len(desk.decisions) >= self._s.max_pending_decisions

    # ------------------------------------------------------------------ transactions

    def _train(self, desk: Desk, groups: list[ReadyGroup], version_in: int) -> None:
        fold, clock = self._fold(), self._p.clock
        depth = fold.versions[version_in].depth
        replayed = desk.replay.choose(fold, version_in, self._s.selection.admission)
        try:
            prepared = self._p.step_maker.prepare(groups, replayed, version_in=version_in, depth_in=depth)
            outcome = self._p.step_maker.train(self._p.learner, prepared)
        except StepFailed as failure:
            self._step_failed(desk, groups, version_in, failure)
            return
        self._step_tries = 0
        now_us = clock.now_us()
        for group in groups:
            group_id = group.buffer.group.group_id
            desk.finish(group, prepared.advantages[group_id], prepared.weights[group_id], now_us)
            desk.remember(group, prepared.advantages[group_id], depth)
        desk.replayed(replayed, self._p.step_maker.age_weights.weight, now_us)
        desk.replay.expire(depth)
        self._refills = 0
        issued = self._transactor.issue(desk, fold, Head(version=version_in + 1, depth=depth + 1, parent=version_in))
        published = self._p.publication.publish(
            version=version_in + 1,
            parent=version_in,
            depth=depth + 1,
            oldest_open_request=oldest_request(desk, issued),
            with_state=(depth + 1) % self._s.state_every == 0 or depth + 1 >= self._s.requests.pacing.last_step,
        )
        desk.adopt(issued)
        control = self._p.step_maker.completed(
            prepared,
            outcome,
            desk.decisions,
            run=self._s.run,
            position=desk.position(),
            policy_read_up_to=fold.read_up_to,
            config_digest=self._s.config_digest,
            code_revision=self._s.code_revision,
            publish_s=self._p.publication.last_publish_s,
        )
        scores = prepared.scores_by_group(outcome)
        self._transactor.step(desk, fold, control, issued, published, scores)
        self._wrote(issued)
        event(log, "version_published", policy_version=version_in + 1, trajectories=len(prepared.batch.rows))

    def _step_failed(self, desk: Desk, groups: list[ReadyGroup], version: int, failure: StepFailed) -> None:
        """Try again with the same input a few times; then the groups are decided `step_failed`."""
        self._step_tries += 1
        event(log, "step_failed", level=logging.WARNING, tries=self._step_tries, reason=str(failure))
        self._p.publication.restore(self._p.learner, self._fold().versions[version].event)
        if self._step_tries < self._s.step_tries:
            return
        self._step_tries = 0
        for group in groups:
            desk.drop(group.buffer, Reason.STEP_FAILED, self._p.clock.now_us(), str(failure)[:200])

    def _settle(self, desk: Desk, head: Head, why: str) -> None:
        self._wrote(self._transactor.settle(desk, self._fold(), head, why))

    def _wrote(self, issued: Issued) -> None:
        """A transaction is committed: the clock of the groups it asked for begins."""
        self._undecided_since_s = None
        self._deadlines.add((g.group_id for g in issued.groups), self._p.clock.monotonic_s())

    def _end_run(self, head: Head) -> bool:
        """The closing transaction, after everything that lies in the log by now was read."""
        desk, now_s, newest = self._require_desk(), self._p.clock.monotonic_s(), head.version
        if self._last_published_s is None:
            self._last_published_s = now_s
        if self._fold().live != newest and now_s - self._last_published_s < self._s.last_switch_wait_s:
            return False  # nothing is held up: the training is done, its last version is being proven
        if not self._deadlines.caught_up(self._p.trajectories):
            if not self._settle_is_due(desk):
                return False
            self._settle(desk, head, "decisions")  # above the bound nothing more would be read
            return True
        desk.end_everything(self._p.clock.now_us())
        self._transactor.end(desk, self._fold(), newest)
        event(log, "run_ended", policy_version=newest)
        self.phase = Phase.FINISHED
        return True

    # ------------------------------------------------------------------ shorthand

    def _require_desk(self) -> Desk:
        assert self._desk is not None, "no committed state was read"
        return self._desk

    def _fold(self) -> PolicyFold:
        assert self.follower is not None
        return self.follower.fold

    def _newest(self) -> int:
        newest = self._fold().newest
        if newest is None:
            raise IllegalState("policy names no version although the run has begun")
        return newest
