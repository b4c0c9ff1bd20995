"""Reading the committed state back: the last control record, however far back it lies; damage is a loud stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from consumers.trainer.recovery import CommittedState
from infra.policy_follower import PolicyFollower
from infra.ports import Message
from schemas.errors import Fenced, IllegalState, LogUnavailable
from schemas.headers import arrow_headers, control_headers, event_headers
from schemas.ledger import LedgerControl, Position, Settled, StepCompleted, encode_ledger_control
from schemas.policy_events import AnyPolicyEvent, encode_policy_event
from schemas.topics import ARROW_STREAM
from tests.fakes.log_script import PolicyScript
from tests.fakes.memory_log import MemoryLog
from tests.fakes.virtual_clock import VirtualClock

POSITION = Position(open_groups=(), next_request=3, prompt_cursor=3, partitions={})


class Place:
    """A log with the topics policy and ledger, and a trainer's view of them."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        self.log.client("setup").admin().create_topics("demo")
        self.client = self.log.client("trainer")
        self.writer = self.log.client("setup").writer()
        self.script = PolicyScript()

    def policy(self, versions: int) -> None:
        self.script.started()
        for version in range(versions):
            self.script.published(version)
        for event in self.script.events:
            self._put("demo.policy", encode_policy_event(event), control_headers(event, b"", "t"))

    def settled(self, number: int = 0) -> None:
        self.ledger(Settled(run="demo", at_us=number, position=POSITION, policy_read_up_to=0, reason="first"))

    def stepped(self, version_out: int) -> None:
        self.ledger(self._step(version_out))

    def _step(self, version_out: int) -> StepCompleted:
        return StepCompleted(
            run="demo", at_us=0, position=POSITION, policy_read_up_to=0, version_in=version_out - 1,
            version_out=version_out, groups=1, trajectories=1, batch_digest="d", metrics={}, phase_s={},
            rng_digest="r", config_digest="c", code_revision="x",
        )  # fmt: skip

    def ledger(self, control: Any) -> None:
        assert isinstance(control, LedgerControl)
        self._put("demo.ledger", encode_ledger_control(control), control_headers(control, b"", "t"))

    def decisions(self, count: int) -> None:
        headers = event_headers(event_type="D", source="t", event_id="1", at_us=0, content_type=ARROW_STREAM)
        for _ in range(count):
            self._put("demo.ledger", b"x", headers + arrow_headers("d", "1.0", 1, b"x"))

    def garbage(self) -> None:
        self._put("demo.ledger", b"{", control_headers(self._any_event(), b"", "t"))

    def begun(self) -> CommittedState:
        """A reading whose ends are taken."""
        follower = PolicyFollower(self.client.reader({"demo.policy": 1}, "beginning"), "demo.policy")
        ledger = self.client.reader({"demo.ledger": 1}, "beginning")
        return CommittedState(follower, ledger, "demo.ledger", self.clock)

    def read(self, state: CommittedState | None = None) -> CommittedState:
        """A reading to its end."""
        state = state or self.begun()
        for _ in range(50):
            if state.advance():
                return state
        raise AssertionError("the state is never complete")

    def newer_trainer(self, version_out: int, *, between: Callable[[], None] = lambda: None) -> None:
        """Another trainer takes over and commits a step; `between` happens while its policy record is not there yet."""
        self.script.events.clear()
        self.script.published(version_out)
        (published,) = self.script.events
        epoch = self.log.take_over("demo-trainer")
        transaction = self.log.begin("demo-trainer", epoch)
        control = self._step(version_out)
        self._append(transaction, "demo.ledger", encode_ledger_control(control), control_headers(control, b"", "t"))
        between()
        headers = control_headers(published, b"", "t")
        self._append(transaction, "demo.policy", encode_policy_event(published), headers)
        self.log.end_transaction(self.log.identity("demo-trainer"), "committed")

    def _append(self, transaction: Any, topic: str, value: bytes, headers: Any) -> None:
        self.log.append(Message(topic=topic, key=b"k", value=value, headers=headers), transaction)

    def _any_event(self) -> AnyPolicyEvent:
        if not self.script.events:
            self.script.started()
        return self.script.events[0]

    def _put(self, topic: str, value: bytes, headers: Any) -> None:
        self.writer.send(Message(topic=topic, key=b"k", value=value, headers=headers))


@pytest.fixture
def place() -> Place:
    return Place()


def test_an_empty_log_is_the_beginning_of_a_run(place: Place) -> None:
    assert place.read().control is None


def test_the_last_control_record_is_the_truth(place: Place) -> None:
    place.policy(2)
    place.settled(1)
    place.decisions(2)
    place.stepped(1)
    place.settled(7)

    control = place.read().control

    assert isinstance(control, Settled)
    assert control.at_us == 7


def test_the_search_goes_back_twice_as_far_until_it_finds_a_control_record(place: Place) -> None:
    place.policy(1)
    place.settled(5)
    place.decisions(150)

    control = place.read().control

    assert control is not None
    assert control.at_us == 5


def test_records_that_others_write_while_we_read_do_not_keep_us_waiting(place: Place) -> None:
    place.policy(1)
    place.settled(1)
    state = place.begun()
    for _ in range(500):
        place._put("demo.policy", b"{", ())

    assert state.advance()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: p.policy(1), "policy has RunStarted but the ledger is empty"),
        (lambda p: p.settled(), "policy names no version"),
        (lambda p: (p.policy(3), p.stepped(1)), "ledger ends with version 1, policy with 2"),
        (lambda p: (p.policy(1), p.stepped(1)), "ledger ends with version 1, policy with 0"),
        (lambda p: (p.policy(1), p.settled(), p.garbage()), "ledger@1 cannot be read"),
    ],
)
def test_topics_that_contradict_each_other_are_a_loud_stop(place: Place, write: Any, words: str) -> None:
    write(place)

    with pytest.raises(IllegalState, match=words):
        place.read()


def test_reading_is_given_up_after_its_limit(place: Place) -> None:
    place.policy(1)
    place.settled()
    follower = PolicyFollower(place.client.reader({"demo.policy": 1}, "beginning"), "demo.policy")
    state = CommittedState(follower, place.client.reader({"demo.ledger": 1}, "beginning"), "demo.ledger", place.clock)
    place.clock.advance(61)

    with pytest.raises(LogUnavailable, match="not read within 60 s"):
        state.advance()


def test_what_hides_behind_somebody_elses_open_transaction_is_waited_for(place: Place) -> None:
    """Found by the simulator: a coordinator died inside a transaction, the run ended behind it, and was ended again."""
    place.policy(1)
    died = place.log.client("coordinator").transactional_writer("demo-coordinator")
    died.init()
    identity = place.log.identity("demo-coordinator")
    transaction = place.log.begin("demo-coordinator", identity.epoch)
    place.log.append(Message(topic="demo.policy", key=b"k", value=b"{}"), transaction)
    place.script.events.clear()
    place.script.published(1)
    (event,) = place.script.events
    place._put("demo.policy", encode_policy_event(event), control_headers(event, b"", "t"))
    place.stepped(1)
    follower = PolicyFollower(place.client.reader({"demo.policy": 1}, "beginning"), "demo.policy")
    state = CommittedState(follower, place.client.reader({"demo.ledger": 1}, "beginning"), "demo.ledger", place.clock)
    while_open = [state.advance() for _ in range(5)]
    place.clock.advance(10.5)

    assert not any(while_open)
    assert state.advance()
    assert follower.fold.newest == 1


def test_a_newer_trainer_that_commits_while_the_state_is_read_is_found_out(place: Place) -> None:
    """Policy is read further than the ledger: that was taken for damage, and the trainer started again by exit 1."""
    place.policy(2)
    place.stepped(1)
    reading = place.begun()
    place.newer_trainer(2)

    with pytest.raises(Fenced, match="a newer trainer owns the run"):
        place.read(reading)


def test_a_newer_trainer_whose_transaction_lies_across_the_first_look_is_waited_for(place: Place) -> None:
    place.policy(2)
    place.stepped(1)
    readings: list[CommittedState] = []
    place.newer_trainer(2, between=lambda: readings.append(place.begun()))

    state = place.read(readings[0])

    assert isinstance(state.control, StepCompleted)
    assert state.control.version_out == 2, "its first commit will tell that it is fenced"


def test_a_newer_trainer_that_gave_its_transaction_up_changes_nothing(place: Place) -> None:
    place.policy(2)
    place.stepped(1)
    reading = place.begun()
    transaction = place.log.begin("demo-trainer", place.log.take_over("demo-trainer"))
    control = place._step(2)
    place._append(transaction, "demo.ledger", encode_ledger_control(control), control_headers(control, b"", "t"))
    place.log.end_transaction(place.log.identity("demo-trainer"), "aborted")

    state = place.read(reading)

    assert isinstance(state.control, StepCompleted)
    assert state.control.version_out == 1


def test_damage_is_declared_after_a_second_reading_only(place: Place) -> None:
    place.policy(1)
    place.stepped(1)
    state = place.begun()

    first = state.advance()

    assert not first
    with pytest.raises(IllegalState, match="ledger ends with version 1, policy with 0"):
        place.read(state)
