"""Writes the trainer's five transactions: first, step, settle, extension, closing. All of them carry the Position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from consumers.trainer.desk import Desk
from consumers.trainer.requests import Head, Issued, issue
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.transactions import GroupScores, Transaction
from schemas.ledger import AnyLedgerControl, LedgerEnded, Settled, StepCompleted
from schemas.policy_events import AnyPolicyEvent, BranchStarted, RunEnded, RunStarted, VersionPublished
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName, topic


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """A transaction, complete or but for its version, and the offsets that go with it. Nobody changes it any more."""

    transaction: Transaction
    offsets: Mapping[tuple[str, int], int]


class Transactor:
    """Each method takes one transaction off the desk and commits it; `hand_over` and `publish` are the two halves.

    Raises what TransactionalWriter.commit raises; the desk is then to be thrown away."""

    def __init__(self, settings: TrainerSettings, ports: TrainerPorts) -> None:
        self._s = settings
        self._p = ports
        self._trajectories = topic(settings.run, TopicName.TRAJECTORIES)
        self.policy_barrier = 0
        """our own policy records lie below: they must be folded before anything is decided again"""

    def issue(self, desk: Desk, fold: PolicyFold, head: Head) -> Issued:
        """The requests that keep the pacing invariant in a transaction whose newest version is `head`."""
        return issue(
            desk.assembler.open_groups(),
            tuple(desk.again),
            desk.cursor,
            head,
            self._p.prompts,
            fold,
            self._s.requests,
            self._p.clock.now_us(),
        )

    def begin(self, desk: Desk, fold: PolicyFold, published: VersionPublished) -> Issued:
        """The first transaction of a run: RunStarted, version 0, Settled, the first requests."""
        issued = self.issue(desk, fold, Head(version=0, depth=0))
        desk.adopt(issued)
        self._write(desk, self._settled(desk, fold, "first"), 0, issued, (self._run_started(0), published))
        return issued

    def extend(self, desk: Desk, fold: PolicyFold) -> Issued:
        """A run that ended goes on: RunStarted with the next segment, Settled, requests."""
        assert fold.segment is not None and fold.newest is not None
        head = Head(version=fold.newest, depth=fold.versions[fold.newest].depth)
        issued = self.issue(desk, fold, head)
        desk.adopt(issued)
        started = self._run_started(fold.segment + 1)
        self._write(desk, self._settled(desk, fold, "extended"), fold.newest, issued, (started,))
        return issued

    def branch(self, desk: Desk, fold: PolicyFold, from_version: int) -> Issued:
        """Go on from an older version: the same weights under a new number, all open groups abandoned and reissued."""
        assert fold.newest is not None
        origin = fold.versions[from_version].event
        version, now_us = fold.newest + 1, self._p.clock.now_us()
        desk.abandon_everything(now_us)
        issued = self.issue(desk, fold, Head(version=version, depth=origin.depth, parent=from_version))
        published = origin.model_copy(
            update={
                "at_us": now_us,
                "version": version,
                "parent": from_version,
                "oldest_open_request": oldest_request(desk, issued),
            }
        )
        desk.adopt(issued)
        policy: tuple[AnyPolicyEvent, ...] = (
            BranchStarted(run=self._s.run, at_us=now_us, from_version=from_version),
            published,
        )
        if fold.ended:
            assert fold.segment is not None
            policy = (self._run_started(fold.segment + 1), *policy)
        self._write(desk, self._settled(desk, fold, f"branch from version {from_version}"), version, issued, policy)
        return issued

    def settle(self, desk: Desk, fold: PolicyFold, head: Head, why: str) -> Issued:
        """Decisions and requests without a version."""
        issued = self.issue(desk, fold, head)
        desk.adopt(issued)
        self._write(desk, self._settled(desk, fold, why), head.version, issued, ())
        return issued

    def hand_over(
        self, desk: Desk, control: StepCompleted, issued: Issued, scores: Sequence[GroupScores]
    ) -> HandedOver:
        """The decisions a version stands on and the next requests, off the desk: all of its transaction but the version
        itself. What the desk decides from now on belongs to the next one. `issued` is adopted already."""
        return self._take(desk, control, control.version_out, issued, (), scores=scores, version_in=control.version_in)

    def publish(self, handed_over: HandedOver, published: VersionPublished) -> int:
        """Commit it with its version; where policy must be folded up to before anything is decided that needs it.

        Touches neither the desk nor this object, so it may run on another thread while no other commit does."""
        transaction = replace(handed_over.transaction, policy=(published,))
        return self._commit(HandedOver(transaction=transaction, offsets=handed_over.offsets))

    def end(self, desk: Desk, fold: PolicyFold, newest: int) -> None:
        """The closing transaction."""
        now_us = self._p.clock.now_us()
        control = LedgerEnded(
            run=self._s.run,
            at_us=now_us,
            position=desk.position(),
            policy_read_up_to=fold.read_up_to,
            last_version=newest,
            reason="completed",
        )
        ended = RunEnded(run=self._s.run, at_us=now_us, last_version=newest, reason="completed")
        self._write(desk, control, newest, None, (ended,))

    def _settled(self, desk: Desk, fold: PolicyFold, why: str) -> Settled:
        return Settled(
            run=self._s.run,
            at_us=self._p.clock.now_us(),
            position=desk.position(),
            policy_read_up_to=fold.read_up_to,
            reason=why,
        )

    def _run_started(self, segment: int) -> RunStarted:
        return RunStarted(
            run=self._s.run,
            at_us=self._p.clock.now_us(),
            segment=segment,
            config_digest=self._s.config_digest,
            code_revision=self._s.code_revision,
        )

    def _write(
        self,
        desk: Desk,
        control: AnyLedgerControl,
        version_key: int,
        issued: Issued | None,
        policy: tuple[AnyPolicyEvent, ...],
    ) -> None:
        end = self._commit(self._take(desk, control, version_key, issued, policy))
        if policy:  # written last
            self.policy_barrier = end

    def _take(
        self,
        desk: Desk,
        control: AnyLedgerControl,
        version_key: int,
        issued: Issued | None,
        policy: tuple[AnyPolicyEvent, ...],
        *,
        scores: Sequence[GroupScores] = (),
        version_in: int = 0,
    ) -> HandedOver:
        transaction = Transaction(
            run=self._s.run,
            control=control,
            version_key=version_key,
            decisions=tuple(desk.decisions),
            dead=tuple(desk.dead),
            scores=scores,
            version_in=version_in,
            requests=() if issued is None else issued.requests,
            policy=policy,
        )
        offsets = {(self._trajectories, partition): offset for partition, offset in desk.low_waters().items()}
        desk.taken()
        return HandedOver(transaction=transaction, offsets=offsets)

    def _commit(self, handed_over: HandedOver) -> int:
        messages = handed_over.transaction.messages()
        placed = self._p.writer.commit(messages, group=f"{self._s.run}-trainer", offsets=handed_over.offsets)
        return placed[-1].offset + 1


def oldest_request(desk: Desk, issued: Issued) -> int:
    """The lowest request position that is open after the transaction; workers skip everything below."""
    positions = [group.request_position for group in (*desk.assembler.open_groups(), *issued.groups)]
    return min(positions, default=issued.cursor.next_request)
