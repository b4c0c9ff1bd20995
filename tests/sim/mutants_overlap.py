"""Bugs planted where a publication runs behind the compute: what must be frozen, what must wait, what is thrown away.

A function here takes a MonkeyPatch; it is called anew for every seed, and undone before the log is judged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consumers.trainer import publisher, service, transactor
from consumers.trainer.requests import Head
from schemas.errors import TransactionFailed
from tests.fakes import tiny_policy

Patch = pytest.MonkeyPatch


def the_weights_are_not_copied(patch: Patch) -> None:
    """What is saved is what the learner holds by then: perhaps one step too many."""

    class Looking:
        def __init__(self, learner: Any, with_state: bool) -> None:
            self._learner, self._with_state = learner, with_state

        def begin_save(self, directory: Path) -> Any:
            return self._learner.begin_save(directory, with_state=self._with_state)

    patch.setattr(tiny_policy.TinyLearner, "copy", lambda self, *, with_state=True: Looking(self, with_state))


def decisions_made_meanwhile_are_taken_for_committed(patch: Patch) -> None:
    """The desk is cleared when the transaction is through, not when it was put together."""
    wrote = service.TrainerService._wrote

    def too_much(self: Any, issued: Any) -> None:
        wrote(self, issued)
        self._desk.taken()

    patch.setattr(service.TrainerService, "_wrote", too_much)


def the_position_is_that_of_the_commit(patch: Patch) -> None:
    """The Position is taken when the checkpoint is written: it says decided of what no decision was written for."""
    hand_over, publish = transactor.Transactor.hand_over, transactor.Transactor.publish

    def remember(self: Any, desk: Any, *args: Any) -> Any:
        self.desk = desk
        return hand_over(self, desk, *args)

    def late(self: Any, handed_over: Any, published: Any) -> int:
        control = handed_over.transaction.control.model_copy(update={"position": self.desk.position()})
        return publish(
            self, replace(handed_over, transaction=replace(handed_over.transaction, control=control)), published
        )

    patch.setattr(transactor.Transactor, "hand_over", remember)
    patch.setattr(transactor.Transactor, "publish", late)


def lag_is_counted_to_the_committed_version(patch: Patch) -> None:
    """A step that is trained and not committed yet is no step."""
    base = service.TrainerService._base
    patch.setattr(service.TrainerService, "_base", lambda self: replace(base(self), ahead=0))


def a_failed_publication_is_not_noticed(patch: Patch) -> None:
    """Training goes on from weights that no version holds."""
    take = publisher.Publisher.take

    def carefree(self: publisher.Publisher) -> Any:
        try:
            return take(self)
        except TransactionFailed:
            return None

    patch.setattr(publisher.Publisher, "take", carefree)


def a_second_publication_begins_over_the_first(patch: Patch) -> None:
    """A step is handed over as soon as it is computed, whatever became of the one before."""
    publish, head = publisher.Publisher.publish, publisher.Publisher.head.fget

    def over(self: publisher.Publisher, *args: Any) -> None:
        self._under_way = None
        publish(self, *args)

    def at_once(self: Any, desk: Any, groups: Any, base: Any) -> None:
        patch.setattr(publisher.Publisher, "head", None)
        try:
            train(self, desk, groups, base)
        finally:
            patch.setattr(publisher.Publisher, "head", property(head))

    train = service.TrainerService._train
    patch.setattr(service.TrainerService, "_train", at_once)
    patch.setattr(publisher.Publisher, "publish", over)


def the_step_ahead_outlives_a_failed_publication(patch: Patch) -> None:
    """What was trained on a version that never came is published all the same."""
    forget = service.TrainerService._forget

    def keep(self: Any) -> None:
        computed = self._computed
        forget(self)
        self._computed = computed

    patch.setattr(service.TrainerService, "_forget", keep)


def a_settle_overtakes_the_publication(patch: Patch) -> None:
    """Decisions are committed as soon as there are any: the version behind brings back an older Position."""
    decide = service.TrainerService._decide

    def hasty(self: Any, desk: Any, base: Any) -> bool:
        if self._publisher.head is not None and desk.has_decisions():
            depth = self._fold().versions[base.committed].depth
            self._settle(desk, Head(version=base.committed, depth=depth), "decisions")
        return decide(self, desk, base)

    patch.setattr(service.TrainerService, "_decide", hasty)
