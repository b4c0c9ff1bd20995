"""Publishes trained steps: checkpoint, then transaction; at once, or behind the compute on a thread of its own.

Guarantees: never more than one step is under way; all that is written was frozen when the step was handed over (a copy
of the learner, the decisions, the Position); its outcome is taken once. Knows nothing of what is computed meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from consumers.trainer.batch import StepOutcome
from consumers.trainer.desk import Desk
from consumers.trainer.publication import Draft
from consumers.trainer.replay import ReplayedGroup
from consumers.trainer.requests import Head, Issued
from consumers.trainer.selection import ReadyGroup
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.step import PreparedStep
from consumers.trainer.transactor import HandedOver, Transactor, oldest_request
from infra.logs import event
from schemas.errors import LogUnavailable, StoreStuck, TransactionFailed
from schemas.ledger import StepCompleted
from schemas.policy_fold import PolicyFold
from schemas.trace_context import request_context

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """A step that was trained: the learner holds its weights, and the desk does not know of it yet."""

    groups: Sequence[ReadyGroup]
    replayed: Sequence[ReplayedGroup]
    prepared: PreparedStep
    outcome: StepOutcome

    @property
    def head(self) -> Head:
        """The version it is to be."""
        batch = self.prepared.batch
        return Head(version=batch.version_in + 1, depth=batch.depth_in + 1, parent=batch.version_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A step is committed."""

    head: Head
    issued: Issued
    trajectories: int
    policy_barrier: int
    """policy must be folded up to here before anything is decided on the version"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    policy_barrier: int
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    head: Head
    issued: Issued
    trajectories: int
    begun_s: float
    future: Future[_Written]


class Publisher:
    """One step at a time: `publish`, then `take` until it is there."""

    def __init__(self, settings: TrainerSettings, ports: TrainerPorts, transactor: Transactor) -> None:
        self._s = settings
        self._p = ports
        self._transactor = transactor
        self._under_way: _UnderWay | None = None
        self._behind_s: float | None = None
        """seconds the publication before ran behind the compute; None: it did not"""

    @property
    def head(self) -> Head | None:
        """The version under way: trained, perhaps committed, not taken yet."""
        return None if self._under_way is None else self._under_way.head

    def publish(self, desk: Desk, fold: PolicyFold, computed: ComputedStep) -> None:
        """Take the step off the desk and publish it, or begin to. `fold` knows the version it was trained on.

        What is written here and now raises here and now; what is written behind the compute raises in `take`."""
        assert self._under_way is None, "a publication is under way already"
        self._finish_groups(desk, computed)
        head, publication, executor = computed.head, self._p.publication, self._p.executor
        issued = self._transactor.issue(desk, fold, head)
        oldest = oldest_request(desk, issued)
        with_state = head.depth % self._s.state_every == 0 or head.depth >= self._s.requests.pacing.last_step
        future: Future[_Written] = Future()
        if executor is None:
            published = publication.publish(
                version=head.version, parent=head.parent, depth=head.depth,
                oldest_open_request=oldest, with_state=with_state,
            )  # fmt: skip
            desk.adopt(issued)
            handed_over = self._hand_over(desk, fold, computed, issued, publication.last_publish_s)
            barrier = self._transactor.publish(handed_over, published)
            future.set_result(_Written(policy_barrier=barrier, ended_s=self._p.clock.monotonic_s()))
        else:
            draft = publication.draft(
                version=head.version, parent=head.parent, depth=head.depth,
                oldest_open_request=oldest, with_state=with_state, copied=True,
            )  # fmt: skip
            desk.adopt(issued)
            handed_over = self._hand_over(desk, fold, computed, issued, draft.seconds)
            future = executor.submit(self._write, draft, handed_over)
        self._under_way = _UnderWay(
            head=head,
            issued=issued,
            trajectories=len(computed.prepared.batch.rows),
            begun_s=self._p.clock.monotonic_s(),
            future=future,
        )

    def take(self) -> Published | None:
        """The step that is committed now; None: nothing is under way, or it still is. Raises what stopped it."""
        found = self._under_way
        if found is None or not self._is_over(found):
            return None
        self._under_way = None
        written = found.future.result(0)
        if self._p.executor is not None:
            self._behind_s = written.ended_s - found.begun_s
        return Published(
            head=found.head,
            issued=found.issued,
            trajectories=found.trajectories,
            policy_barrier=written.policy_barrier,
        )

    def discard(self) -> bool:
        """True once nothing is under way: only then may the writer be built anew. What became of it stands in the log.

        Raises what a new writer would not cure (Fenced: it would take the identity from our successor)."""
        try:
            self.take()
        except (TransactionFailed, LogUnavailable) as failure:
            event(log, "publication_in_doubt", level=logging.WARNING, reason=str(failure))
        return self._under_way is None

    def close(self, limit_s: float) -> None:
        """Let what is under way come to its end, within the limit: it is trained, and nothing else is needed for it."""
        found, self._under_way = self._under_way, None
        if found is not None:
            wait([found.future], timeout=limit_s)
            whole = found.future.done() and found.future.exception() is None
            event(log, "publication_ended", policy_version=found.head.version, committed=whole)

    # ------------------------------------------------------------------ parts of it

    def _finish_groups(self, desk: Desk, computed: ComputedStep) -> None:
        prepared, now_us = computed.prepared, self._p.clock.now_us()
        depth_in, version = prepared.batch.depth_in, computed.head.version
        for group in computed.groups:
            group_id = group.buffer.group.group_id
            desk.finish(group, prepared.advantages[group_id], prepared.weights[group_id], now_us)
            desk.remember(group, prepared.advantages[group_id], depth_in)
            if log.isEnabledFor(logging.DEBUG):  # a line a group: the step it went into, and the trace of its request
                trace = request_context(group_id, group.buffer.group.issued_at_us).trace_id
                event(log, "group_trained", level=logging.DEBUG, group=group_id, policy_version=version, trace=trace)
        desk.replayed(computed.replayed, self._p.step_maker.age_weights.weight, now_us)
        desk.replay.expire(depth_in)

    def _hand_over(
        self, desk: Desk, fold: PolicyFold, computed: ComputedStep, issued: Issued, publish_s: float
    ) -> HandedOver:
        control: StepCompleted = self._p.step_maker.completed(
            computed.prepared,
            computed.outcome,
            desk.decisions,
            run=self._s.run,
            position=desk.position(),
            policy_read_up_to=fold.read_up_to,
            config_digest=self._s.config_digest,
            code_revision=self._s.code_revision,
            publish_s=publish_s,
            checkpoint_phase_s=self._p.publication.last_phase_s,
            behind_s=self._behind_s,
        )
        return self._transactor.hand_over(desk, control, issued, computed.prepared.scores_by_group(computed.outcome))

    def _write(self, draft: Draft, handed_over: HandedOver) -> _Written:
        """On the executor's thread: no desk, no fold, no learner."""
        barrier = self._transactor.publish(handed_over, self._p.publication.save(draft))
        return _Written(policy_barrier=barrier, ended_s=self._p.clock.monotonic_s())

    def _is_over(self, found: _UnderWay) -> bool:
        if found.future.done():
            return True
        seconds = self._p.clock.monotonic_s() - found.begun_s
        if seconds > self._s.publication_limit_s:
            raise StoreStuck(
                f"version {found.head.version} has been under way for {seconds:.0f} s, at most "
                f"{self._s.publication_limit_s:.0f} are allowed: look at the disk or the network under checkpoints.root"
            )
        return False
