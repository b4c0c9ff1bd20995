"""Garbage rounds: when one may begin, what is kept, how much a call does, and that no failure stops anything."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import pytest

from consumers.garbage import GarbageRounds, kept_uris
from infra.policy_follower import PolicyFollower
from infra.ports import Message
from schemas.errors import CheckpointMissing
from schemas.headers import control_headers
from schemas.policy_events import encode_policy_event
from tests.fakes.log_script import G0, PolicyScript, running
from tests.fakes.memory_log import MemoryLog
from tests.fakes.virtual_clock import VirtualClock

POLICY = "demo.policy"
GRACE_S = 3600.0


class Leftovers:
    """A store of nothing but names that no event knows."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.rounds: list[tuple[tuple[str, ...], float, int]] = []
        self.error: Exception | None = None

    def collect_garbage(
        self, keep_uris: Collection[str], *, grace_s: float, now_us: int, at_most: int
    ) -> Sequence[str]:
        self.rounds.append((tuple(sorted(keep_uris)), grace_s, now_us))
        if self.error is not None:
            raise self.error
        removed, self.names = self.names[:at_most], self.names[at_most:]
        return removed


class Rig:
    """A policy topic with two versions, its follower, and the rounds."""

    def __init__(self, *names: str) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        self.log.client("setup").admin().create_topics("demo")
        self.store = Leftovers(*names)
        self.rounds = GarbageRounds(self.store, self.clock, GRACE_S)  # type: ignore[arg-type]
        self.follower = PolicyFollower(self.log.client("c").reader({POLICY: 1}, "beginning"), POLICY)
        self.publish(2)

    def publish(self, versions: int) -> None:
        script = PolicyScript()
        script.started()
        for version in range(versions):
            script.published(version)
        for event in script.events:
            value = encode_policy_event(event)
            headers = control_headers(event, value, "t")
            self.log.append(Message(topic=POLICY, key=b"demo", value=value, headers=headers))


def test_no_round_begins_before_policy_is_folded_to_the_end_it_had_when_the_round_was_due() -> None:
    rig = Rig("torn")
    early = rig.rounds.step(rig.follower)
    rig.follower.advance()
    due = rig.rounds.step(rig.follower)

    assert (early, due) == (False, True)
    assert rig.store.rounds == [(("demo/a0/manifest.json", "demo/a1/manifest.json"), GRACE_S, rig.clock.now_us())]


def test_what_hides_behind_an_open_transaction_is_waited_for() -> None:
    rig = Rig("torn")
    transaction = rig.log.begin("demo-trainer", rig.log.take_over("demo-trainer"))
    rig.log.append(Message(topic=POLICY, key=b"demo", value=b"{}"), transaction)
    rig.follower.advance()
    while_open = rig.rounds.step(rig.follower)
    rig.log.end_transaction(rig.log.identity("demo-trainer"), "committed")
    rig.follower.advance()

    assert not while_open
    assert rig.rounds.step(rig.follower)


def test_rounds_are_seldom_but_one_that_found_as_much_as_a_call_may_remove_goes_on_at_once() -> None:
    rig = Rig("t1", "t2", "t3", "t4", "t5")
    rig.follower.advance()
    calls = [rig.rounds.step(rig.follower) for _ in range(4)]
    rig.clock.advance(599.0)
    between = rig.rounds.step(rig.follower)
    rig.clock.advance(1.0)
    rig.rounds.step(rig.follower)

    assert calls == [True, True, False, False]
    assert not between
    assert (rig.store.names, len(rig.store.rounds)) == ([], 3)


@pytest.mark.parametrize("error", [OSError("read-only file system"), CheckpointMissing("the store does not answer")])
def test_a_store_that_cannot_delete_is_a_warning_and_asked_again_later(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig("torn")
    rig.store.error = error
    rig.follower.advance()
    with caplog.at_level(logging.WARNING):
        failed = rig.rounds.step(rig.follower)
    rig.store.error = None
    rig.clock.advance(600.0)

    assert not failed
    assert "garbage_not_collected" in caplog.text
    assert rig.rounds.step(rig.follower)


def test_an_end_that_was_taken_before_a_restart_is_taken_again() -> None:
    rig = Rig()
    rig.rounds.step(rig.follower)
    rig.publish(1)
    rig.rounds.restart()
    rig.follower.advance(3)
    too_early = rig.rounds.step(rig.follower)

    assert (too_early, rig.store.rounds) == (False, [])


def test_the_checkpoint_of_a_retired_version_is_kept_while_a_branch_stands_on_it() -> None:
    script, _ = running(G0, versions=4)
    script.branched(1)
    start = script.fold.versions[1].event.model_copy(update={"version": 4, "parent": 1})
    assert script.tell(start) is None
    script.retired(0)
    script.retired(1)

    assert kept_uris(script.fold) == {f"demo/a{number}/manifest.json" for number in (1, 2, 3)}
