"""The trainer service: consumes trajectories, trains, publishes every version in one transaction (G1, G2, G5).

    poll -> match to the open set -> assemble by claim -> judge -> batch -> train -> checkpoint -> transaction

Training happens outside the transaction; with an executor one step may be trained while the one before is published.
Any doubt about a transaction: rebuild the writer, re-read the committed state, go on from there. The service never
waits for a version to be live.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import StrEnum

from consumers.trainer.branching import branch_origin
from consumers.trainer.deadlines import GroupDeadlines
from consumers.trainer.desk import Desk
from consumers.trainer.intake import Intake
from consumers.trainer.pacing import requests_to_issue
from consumers.trainer.publisher import ComputedStep, Publisher
from consumers.trainer.recovery import CommittedState
from consumers.trainer.requests import Head, Issued
from consumers.trainer.selection import ReadyGroup, select
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.transactor import Transactor
from infra.logs import event
from infra.policy_follower import PolicyFollower
from infra.ports import EventReader
from schemas.errors import IllegalState, LogUnavailable, StepFailed, TransactionFailed
from schemas.ledger import AnyLedgerControl, PartitionProgress, Position, Reason
from schemas.policy_fold import PolicyFold
from schemas.topics import TOPICS, TopicName, topic

log = logging.getLogger(__name__)

# A transaction and the writing of a usual checkpoint; whoever stops us waits a little longer before it kills.
_CLOSE_LIMIT_S = 15.0


class Phase(StrEnum):
    """What the service is doing."""

    RECOVERING = "recovering"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The weights in the learner, which the next step updates."""

    head: Head
    committed: int
    """the newest version of the fold"""
    ahead: int
    """training steps from there to `head`: 0, or 1 while a publication is under way"""


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
        self._intake = Intake(settings, ports, self._deadlines)
        self._publisher = Publisher(settings, ports, self._transactor)
        self._computed: ComputedStep | None = None
        """trained on a version whose publication is under way; goes when that one is committed"""
        self._learner_in_doubt = False
        """a step failed, and what it was computed on is not committed yet"""
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

        Raises Fenced (a newer trainer runs: exit 3), IllegalState (log and store disagree: stop).
        EnvironmentMissing (the broker lost a run whose checkpoints are there: stop)."""
        self._p.step_maker.resume()
        worked = self._work()
        if not worked:
            self._p.step_maker.rest()
        return worked

    def _work(self) -> bool:
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
        """Let a publication that is under way come to its end; release what the service opened itself."""
        self._publisher.close(_CLOSE_LIMIT_S)
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    # ------------------------------------------------------------------ recovery

    def _forget(self) -> None:
        self.phase = Phase.RECOVERING
        self._reading = None
        self._desk = None
        self._computed = None
        self._learner_in_doubt = False

    def _recover(self) -> bool:
        if self._reading is None:
            if not self._publisher.discard():
                return False
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
        self._p.publication.require_untrained()
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
        worked = self._take_published()
        worked |= bool(self.follower.advance())
        if self._computed is not None:
            # A step ahead already: nothing else happens to the desk until the one before is committed and folded.
            if self._publisher.head is not None or fold.read_up_to < self._transactor.policy_barrier:
                return worked
            self._publish(desk)
            return True
        worked |= self._intake.read(desk)
        self._intake.read_dead_letters(desk)
        if fold.read_up_to < self._transactor.policy_barrier:
            return worked
        if self._learner_in_doubt and not self._restore_learner():
            return worked
        return self._decide(desk, self._base()) or worked

    def _decide(self, desk: Desk, base: Base) -> bool:
        """Drop, ask, train, settle or end: whatever is due first. False when nothing is.

        While a publication is under way nothing is committed; and nothing is trained before what would be asked for
        first, so that batches are those of a run without overlap."""
        fold, head, under_way = self._fold(), base.head, self._publisher.head is not None
        self._intake.expire(desk, fold, base.committed, base.ahead)
        head = replace(head, step_is_full=self._step_is_full(desk, head.depth))
        if head.depth >= self._s.requests.pacing.last_step:
            return not under_way and self._end_run(head)
        if requests_to_issue(len(desk.assembler), head.depth, self._s.requests.pacing):
            if under_way:
                return False
            self._settle(desk, head, "requests")
            return True
        if desk.gaps and not under_way:
            self._settle(desk, head, "; ".join(desk.gaps))
            return True
        selection = select(
            desk.assembler.buffers(),
            fold,
            base.committed,
            self._s.selection,
            group_size=self._s.requests.group_size,
            step_is_full=head.step_is_full,
            ahead=base.ahead,
        )
        self.waiting_for = selection.waiting_for
        for doomed in selection.doomed:
            event(log, "group_dropped", group=doomed.buffer.group.group_id, reason=doomed.reason, detail=doomed.detail)
            desk.drop(doomed.buffer, doomed.reason, self._p.clock.now_us(), doomed.detail)
        self._refills += any(doomed.reason is Reason.ZERO_VARIANCE for doomed in selection.doomed)
        if selection.batch and not desk.replay.missing():
            self._train(desk, selection.batch, base)
            return True
        if not under_way and self._settle_is_due(desk):
            self._settle(desk, head, "decisions")
            return True
        return bool(selection.doomed)

    def _base(self) -> Base:
        """The weights in the learner: those under way, or the newest committed ones."""
        fold, newest = self._fold(), self._newest()
        committed = Head(version=newest, depth=fold.versions[newest].depth)
        head = self._publisher.head or committed
        # The fold may be quicker than the publication's own thread and know the version already.
        return Base(head=head, committed=newest, ahead=head.depth - committed.depth)

    def _step_is_full(self, desk: Desk, depth: int) -> bool:
        """Its zero-variance groups were replaced often enough: it takes what is left, if anything is."""
        left = any(group.intended_step <= depth for group in desk.assembler.open_groups())
        return self._refills > self._s.refill_rounds and left

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

    def _train(self, desk: Desk, groups: list[ReadyGroup], base: Base) -> None:
        """Compute a step. It is published at once, or when the publication before it is over."""
        fold, head = self._fold(), base.head
        replayed = desk.replay.choose(fold, base.committed, self._s.selection.admission, ahead=base.ahead)
        try:
            prepared = self._p.step_maker.prepare(groups, replayed, version_in=head.version, depth_in=head.depth)
            outcome = self._p.step_maker.train(self._p.learner, prepared)
        except StepFailed as failure:
            self._step_failed(desk, groups, failure)
            return
        self._step_tries = 0
        self._computed = ComputedStep(groups=groups, replayed=replayed, prepared=prepared, outcome=outcome)
        if self._publisher.head is None:
            self._publish(desk)

    def _publish(self, desk: Desk) -> None:
        """The computed step leaves the desk; its parent is committed and folded."""
        computed, self._computed = self._computed, None
        assert computed is not None
        self._refills = 0
        self._publisher.publish(desk, self._fold(), computed)
        self._take_published()

    def _take_published(self) -> bool:
        """A step that is committed by now: what it asked for is open, what it said must be folded."""
        published = self._publisher.take()
        if published is None:
            return False
        self._transactor.policy_barrier = published.policy_barrier
        self._wrote(published.issued)
        event(log, "version_published", policy_version=published.head.version, trajectories=published.trajectories)
        return True

    def _step_failed(self, desk: Desk, groups: list[ReadyGroup], failure: StepFailed) -> None:
        """Try again with the same input a few times; then the groups are decided `step_failed`."""
        self._step_tries += 1
        event(log, "step_failed", level=logging.WARNING, tries=self._step_tries, reason=str(failure))
        self._learner_in_doubt = True
        self._restore_learner()
        if self._step_tries < self._s.step_tries:
            return
        self._step_tries = 0
        for group in groups:
            desk.drop(group.buffer, Reason.STEP_FAILED, self._p.clock.now_us(), str(failure)[:200])

    def _restore_learner(self) -> bool:
        """After a failed step; a version that is still under way can be fetched only when it is committed."""
        if self._publisher.head is not None or self._fold().read_up_to < self._transactor.policy_barrier:
            return False
        self._p.publication.restore(self._p.learner, self._fold().versions[self._newest()].event)
        self._learner_in_doubt = False
        return True

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
