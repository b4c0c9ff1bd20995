"""Bugs planted in the trainer: each changes one production function the way a careless edit could.

A function here takes a MonkeyPatch; it is called anew for every seed, and undone before the log is judged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from consumers.trainer import (
    admission,
    deadlines,
    desk,
    grouping,
    intake,
    pacing,
    positions,
    publication,
    replay,
    requests,
    selection,
    service,
    step,
    transactions,
    transactor,
)  # fmt: skip
from consumers.trainer.admission import Admission, AdmissionRules, Verdict
from schemas.ledger import OpenGroup, Reason
from schemas.policy_fold import PolicyFold

Patch = pytest.MonkeyPatch


def the_version_is_committed_before_it_is_trained(patch: Patch) -> None:
    """The checkpoint is saved from the weights before the step; the step is applied after the commit."""
    train, write = step.StepMaker.train, transactor.Transactor.publish

    def too_late(self: Any, learner: Any, prepared: Any) -> Any:
        before = learner.weights
        outcome = train(self, learner, prepared)
        learner.trained, learner.weights = learner.weights, before
        return outcome

    def then_train(self: Any, *args: Any) -> int:
        barrier = write(self, *args)
        self._p.learner.weights = self._p.learner.trained
        return barrier

    patch.setattr(step.StepMaker, "train", too_late)
    patch.setattr(transactor.Transactor, "publish", then_train)


def lag_is_judged_on_arrival(patch: Patch) -> None:
    """The verdict of the moment a group came stands until it is trained."""
    arrived: dict[str, Verdict] = {}
    judge, decide = selection.judge, service.TrainerService._decide

    def remember(self: Any, at: Any, base: Any) -> bool:
        for buffer in at.assembler.buffers():
            for held in buffer.rows():
                if held.row.trajectory is not None:
                    rules = self._s.selection.admission
                    verdict = judge(held.row.trajectory, self._fold(), base.committed, rules, ahead=base.ahead)
                    if verdict.admission is Admission.ADMIT:
                        arrived.setdefault(f"{held.row.claim_id}/{held.row.trajectory_id}", verdict)
        return decide(self, at, base)

    def recall(trajectory: Any, *args: Any, ahead: int) -> Verdict:
        found = arrived.get(f"{trajectory.claim_id}/{trajectory.trajectory_id}")
        return found or judge(trajectory, *args, ahead=ahead)

    patch.setattr(service.TrainerService, "_decide", remember)
    patch.setattr(selection, "judge", recall)


def the_lag_limit_is_ignored(patch: Patch) -> None:
    judge = selection.judge

    def lax(trajectory: Any, fold: Any, base: int, rules: AdmissionRules, *, ahead: int) -> Verdict:
        return judge(trajectory, fold, base, replace(rules, max_lag=10**6), ahead=ahead)

    patch.setattr(selection, "judge", lax)


def lag_counts_version_numbers(patch: Patch) -> None:
    """On a branch the numbers go on, the weights do not."""

    def plain(self: PolicyFold, version: int, base: int) -> int | Reason:
        return base - version if version <= base else Reason.OTHER_BRANCH

    patch.setattr(PolicyFold, "lag", plain)


def a_stale_proof_is_accepted(patch: Patch) -> None:
    """The worker stamps the proof of the version before, and the trainer looks only at whose proof it is."""
    from tests.fakes.tiny_policy import TinyEngine

    set_proof, first = TinyEngine.set_proof, {}

    def keep_first(self: TinyEngine, proof: int) -> None:
        set_proof(self, first.setdefault(id(self), proof))

    def anybodys(trajectory: Any, version: int, offset: int, fold: Any, *, barrier: bool) -> Any:
        proof = fold.proofs.get(offset)
        mine = (trajectory.worker_id, trajectory.incarnation)
        right = proof is not None and (proof.worker, proof.incarnation) == mine
        return None if right else (Admission.REFUSE, "no proof")

    patch.setattr(TinyEngine, "set_proof", keep_first)
    patch.setattr(admission, "_unproven", anybodys)


def rows_are_trained_before_their_version_is_live(patch: Patch) -> None:
    """Barrier mode in name only: workers sample after their own proof, and the trainer takes it."""
    from producers import generator, switch_target

    unproven = admission._unproven
    patch.setattr(admission, "_unproven", lambda *args, barrier: unproven(*args, barrier=False))
    may_sample, may_serve = switch_target.may_sample, switch_target.may_serve
    patch.setattr(generator, "may_sample", lambda fold, held, *, rolling: may_sample(fold, held, rolling=True))
    patch.setattr(generator, "may_serve", lambda fold, me, held, *, rolling: may_serve(fold, me, held, rolling=True))


def dropped_groups_are_not_replaced(patch: Patch) -> None:
    """No settle transaction asks for new groups: the batch waits for ever."""
    patch.setattr(service, "requests_to_issue", lambda *args: 0)
    patch.setattr(service.TrainerService, "_settle_is_due", lambda self, at: False)


def a_dropped_group_is_not_asked_for_again(patch: Patch) -> None:
    patch.setattr(desk, "may_try_again", lambda group, rules: False)


def a_slot_is_freed_twice(patch: Patch) -> None:
    original = pacing.requests_to_issue

    def generous(open_groups: int, depth: int, rules: Any) -> int:
        return original(max(0, open_groups - 1), depth, rules)

    patch.setattr(requests, "requests_to_issue", generous)


def a_restart_decides_again(patch: Patch) -> None:
    def from_the_start(self: positions.Progress) -> dict[int, int]:
        return dict.fromkeys(self._next, 0)

    patch.setattr(positions.Progress, "low_waters", from_the_start)
    patch.setattr(positions.Progress, "is_decided", lambda self, key: False)
    patch.setattr(positions.Progress, "decide", lambda self, key: self._undecided[key[0]].discard(key[1]))


def positions_leave_out_what_is_undecided(patch: Patch) -> None:
    snapshot = positions.Progress.snapshot

    def skipping(self: positions.Progress) -> Any:
        return {p: progress.model_copy(update={"undecided": ()}) for p, progress in snapshot(self).items()}

    patch.setattr(positions.Progress, "snapshot", skipping)


def the_next_offset_is_one_too_high(patch: Patch) -> None:
    snapshot = positions.Progress.snapshot

    def beyond(self: positions.Progress) -> Any:
        found = snapshot(self).items()
        return {p: one.model_copy(update={"next_offset": one.next_offset + (one.next_offset > 0)}) for p, one in found}

    patch.setattr(positions.Progress, "snapshot", beyond)


def requests_are_issued_twice_after_a_restart(patch: Patch) -> None:
    """The Position of a transaction is that of before its own requests."""
    adopt, position = desk.Desk.adopt, desk.Desk.position
    before: dict[int, Any] = {}

    def remember(self: desk.Desk, issued: Any) -> None:
        before[id(self)] = (self.cursor, len(issued.groups))
        adopt(self, issued)

    def behind(self: desk.Desk) -> Any:
        now = position(self)
        if id(self) not in before or not before[id(self)][1]:
            return now
        cursor, new = before[id(self)]
        update = {"next_request": cursor.next_request, "prompt_cursor": cursor.prompt_cursor}
        return now.model_copy(update={**update, "open_groups": now.open_groups[:-new]})

    patch.setattr(desk.Desk, "adopt", remember)
    patch.setattr(desk.Desk, "position", behind)


def a_late_claim_opens_its_group_again(patch: Patch) -> None:
    """A second complete claim of a group that was decided is trained like a new group."""
    add = grouping.Assembler.add

    def reopening(self: grouping.Assembler, key: Any, rows: Any) -> Any:
        row = rows[0].trajectory
        if rows[0].group_id not in self._buffers and row is not None:
            self.open(
                OpenGroup(
                    group_id=row.group_id, request_position=10**6 + key[1], issued_at_us=0, attempt=row.attempt,
                    intended_step=0,
                )
            )  # fmt: skip
        return add(self, key, rows)

    patch.setattr(grouping.Assembler, "add", reopening)


def a_group_is_assembled_from_two_claims(patch: Patch) -> None:
    place = grouping.Assembler._place

    def whoever(self: grouping.Assembler, buffer: Any, key: Any, row: Any) -> Any:
        one = row.trajectory and replace(row.trajectory, claim_id="one")
        return place(self, buffer, key, replace(row, claim_id="one", trajectory=one))

    patch.setattr(grouping.Assembler, "_place", whoever)


def members_are_trained_as_they_come(patch: Patch) -> None:
    """A group counts as complete with its first member; the late ones are left behind."""
    judge_group = selection.judge_group

    def alone(buffer: Any, fold: Any, base: int, rules: Any, **more: int) -> Any:
        return judge_group(buffer, fold, base, replace(rules, min_group=1), **more)

    patch.setattr(grouping.Claim, "is_complete", lambda self, group_size: bool(self.members) and not self.broken)
    patch.setattr(selection, "judge_group", alone)


def a_deadline_is_judged_before_reading_to_the_end(patch: Patch) -> None:
    def at_once(self: deadlines.GroupDeadlines, open_ids: Any, now_s: float, reader: Any) -> frozenset[str]:
        return frozenset(g for g in open_ids if self._deadline_s.get(g, now_s + 1) <= now_s)

    patch.setattr(deadlines.GroupDeadlines, "expired", at_once)


def the_run_ends_before_everything_is_read(patch: Patch) -> None:
    patch.setattr(deadlines.GroupDeadlines, "caught_up", lambda self, reader: True)


def dropped_rows_get_no_decision(patch: Patch) -> None:
    def take_rows(self: desk.Desk, key: Any, rows: Any, now_us: int) -> None:
        self.progress.receive(key)
        if self.assembler.add(key, rows):
            self.progress.decide(key)

    patch.setattr(desk.Desk, "take_rows", take_rows)


def a_group_is_dropped_and_forgotten(patch: Patch) -> None:
    original = desk.Desk.drop

    def drop(self: desk.Desk, buffer: Any, reason: Reason, now_us: int, detail: str = "") -> None:
        before = len(self.decisions)
        original(self, buffer, reason, now_us, detail)
        del self.decisions[before]

    patch.setattr(desk.Desk, "drop", drop)


def dead_letters_are_lost(patch: Patch) -> None:
    messages = transactions.Transaction.messages

    def without(self: transactions.Transaction) -> Any:
        return [message for message in messages(self) if not message.topic.endswith(".deadletters")]

    patch.setattr(transactions.Transaction, "messages", without)


def given_up_prompts_are_ignored(patch: Patch) -> None:
    """The trainer does not read what workers say of prompts that kill them."""
    patch.setattr(intake, "poisoned_group", lambda record, run: None)


def replay_goes_beyond_max_use(patch: Patch) -> None:
    choose, expire = replay.ReplayBuffer.choose, replay.ReplayBuffer.expire

    def lax(method: Any) -> Any:
        def call(self: replay.ReplayBuffer, *args: Any, **named: Any) -> Any:
            rules, self._rules = self._rules, replace(self._rules, max_use=99)
            try:
                return method(self, *args, **named)
            finally:
                self._rules = rules

        return call

    patch.setattr(replay.ReplayBuffer, "choose", lax(choose))
    patch.setattr(replay.ReplayBuffer, "expire", lax(expire))


def a_step_is_computed_on_weights_that_were_not_put_back(patch: Patch) -> None:
    """After a transaction of unknown outcome the learner keeps what it trained in vain."""
    restore, seen = publication.Publication.restore, set()

    def once(self: Any, learner: Any, published: Any) -> None:
        if id(learner) not in seen:
            restore(self, learner, published)
        seen.add(id(learner))

    patch.setattr(publication.Publication, "restore", once)


def a_second_trainer_is_not_fenced(patch: Patch) -> None:
    """Each trainer process writes under a transactional id of its own."""
    _own_identity(patch, "-trainer")


def a_second_coordinator_is_not_fenced(patch: Patch) -> None:
    """An old coordinator goes on writing beside its successor."""
    _own_identity(patch, "-coordinator")


def _own_identity(patch: Patch, suffix: str) -> None:
    from tests.fakes.memory_ports import MemoryClient

    writer = MemoryClient.transactional_writer

    def own(self: MemoryClient, transactional_id: str) -> Any:
        if transactional_id.endswith(suffix):
            transactional_id += f"-{self.process}-{id(self)}"
        return writer(self, transactional_id)

    patch.setattr(MemoryClient, "transactional_writer", own)
