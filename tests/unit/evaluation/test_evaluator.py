"""The evaluator on the in-memory log: what it evaluates, what it leaves out, and that it never does anything twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from infra.ports import Message, Reward
from schemas.errors import ConfigError, DeliveryFailed
from schemas.policy_state import VersionStatus
from tests.fakes.evaluated_run import EVALUATIONS, PROMPTS, EvaluatedRun
from tests.fakes.memory_log import Crash

ANSWERS = PROMPTS * (1 + 4)


@pytest.fixture
def run(tmp_path: Path) -> EvaluatedRun:
    return EvaluatedRun(tmp_path)


def test_each_version_is_asked_every_prompt_greedily_and_by_samples(run: EvaluatedRun) -> None:
    service = run.evaluator()
    for version in range(3):
        run.policy.live(version)
        run.rest(service)

    assert run.versions() == [0, 1, 2]
    asked = Counter((row.version, row.temperature, row.prompt_id) for row in run.rows())
    assert asked == {(v, t, f"t{p}"): 1 if t == 0 else 4 for v in range(3) for t in (0.0, 1.0) for p in range(PROMPTS)}
    assert not service.finished


def test_only_every_kth_activated_version_is_evaluated_and_the_last_one(run: EvaluatedRun) -> None:
    service = run.evaluator(every_versions=3)
    for version in range(6):
        run.policy.live(version)
        run.rest(service)
    assert run.versions() == [0, 3]

    run.policy.ended(5)
    run.rest(service)

    assert run.versions() == [0, 3, 5]
    assert service.finished
    assert service.left_out == {}


def test_a_version_that_is_published_and_not_live_is_left_alone_until_the_run_has_ended(run: EvaluatedRun) -> None:
    service = run.evaluator()
    run.policy.live(0)
    run.policy.published(1)
    run.rest(service)
    assert run.store.fetched == [0]

    run.policy.ended(1)
    run.rest(service)

    assert run.versions() == [0, 1]


def test_a_late_evaluator_takes_the_newest_and_says_what_it_leaves_out(run: EvaluatedRun) -> None:
    run.policy.live(0, 1, 2, 3)
    service = run.evaluator()
    run.rest(service)

    assert run.versions() == [3]
    assert sorted(service.left_out) == [0, 1, 2]
    assert set(service.left_out.values()) == {"version 3 was there before its turn came"}


def test_a_restart_does_not_ask_what_the_topic_holds(run: EvaluatedRun) -> None:
    run.policy.live(0)
    run.rest(run.evaluator())
    run.policy.live(1)
    again = run.evaluator()
    run.rest(again)
    run.rest(run.evaluator())

    assert run.versions() == [0, 1]
    assert run.store.fetched == [0, 1]
    assert again.left_out == {}


def test_a_death_at_any_port_call_loses_no_version_and_writes_none_twice(run: EvaluatedRun, tmp_path: Path) -> None:
    """Dies at the n-th call, for every n until a process gets through."""
    for calls in range(200):
        world = EvaluatedRun(tmp_path)
        world.policy.live(0, 1)
        world.policy.ended(1)
        left = [calls]

        def on_call(name: str, phase: Literal["before", "after"], left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Crash(f"{phase} {name}")

        dying = world.evaluator(client=world.log.client("evaluator", on_call=on_call))
        try:
            while not dying.finished:
                dying.step()
        except Crash:
            world.log.crash("evaluator")
        survived = left[0] >= 0
        after = world.evaluator()
        world.rest(after)
        assert after.finished
        assert world.versions() == [1], calls
        if survived:
            return
    raise AssertionError("no process got through")


def test_two_evaluators_at_once_write_one_record(run: EvaluatedRun) -> None:
    run.policy.live(0)
    first, second = run.evaluator(), run.evaluator(client=run.log.client("another"))
    for _ in range(3):
        second.step()  # it has read both topics, and begins
    run.rest(first)
    run.rest(second)

    assert run.versions() == [0]
    assert first.left_out | second.left_out == {0: "another evaluator was first"}


def test_answers_are_the_same_whoever_asks_and_when(tmp_path: Path) -> None:
    found = []
    for wait_s in (0.0, 100.0):
        run = EvaluatedRun(tmp_path)
        run.clock.advance(wait_s)
        run.policy.live(0)
        run.rest(run.evaluator())
        found.append([replace(row, evaluated_at_us=0) for row in run.rows()])

    assert found[0] == found[1]
    assert len(found[0]) == ANSWERS


def test_a_version_that_is_retired_while_it_is_fetched_is_left_out(run: EvaluatedRun) -> None:
    run.policy.live(0, 1)
    service = run.evaluator()
    while run.store.fetched == []:
        run.store.missing = {1}
        run.store.on_fetch = lambda version: run.policy.live(2, 3)
        service.step()
    run.store.on_fetch = lambda version: None
    assert run.policy.retired(1) is None
    run.rest(service)

    assert service.left_out[1] == "retired while it was being loaded"
    assert run.versions() == [3]
    assert run.policy.fold.versions[1].status is VersionStatus.RETIRED


def test_a_load_that_fails_for_a_while_is_tried_again(run: EvaluatedRun) -> None:
    run.policy.live(0)
    run.store.missing = {0}
    run.store.on_fetch = lambda version: run.store.missing.clear() if len(run.store.fetched) == 2 else None
    service = run.evaluator()
    run.rest(service)

    assert run.store.fetched == [0, 0]
    assert run.versions() == [0]


def test_a_load_that_keeps_failing_is_left_out_and_the_next_version_is_evaluated(run: EvaluatedRun) -> None:
    run.policy.live(0)
    run.store.missing = {0}
    service = run.evaluator()
    run.rest(service)
    run.policy.live(1)
    run.rest(service)

    assert service.left_out == {0: "not loaded in 2 tries: demo/a0/manifest.json: planted"}
    assert run.versions() == [1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_the_engine_refuses_answer_nothing(run: EvaluatedRun, when: Literal["before", "after"]) -> None:
    run.policy.live(0)
    service = run.evaluator()
    run.engine.fail_load = when
    run.rest(service)
    assert service.left_out[0].startswith("not loaded in 2 tries: planted")

    run.engine.fail_load = None
    run.policy.live(1)
    run.rest(service)

    assert run.versions() == [1]


def test_after_the_end_of_the_run_time_runs_out(run: EvaluatedRun) -> None:
    run.policy.live(0)
    service = run.evaluator(end_limit_s=5.0)
    run.engine.polls_of = lambda request: 1_000_000
    for _ in range(20):
        service.step()
    run.policy.ended(0)
    for _ in range(3):
        service.step()
    assert not service.finished

    run.clock.advance(6.0)
    service.step()

    assert service.finished
    assert run.versions() == []


def test_a_run_that_is_opened_again_is_followed_on(run: EvaluatedRun) -> None:
    service, again = run.evaluator(), ("g0", "i2")
    run.policy.live(0)
    run.policy.ended(0)
    run.rest(service)
    assert service.finished

    run.policy.started(segment=1)
    run.policy.joined(again)
    run.policy.loaded(again, 0, None)
    run.policy.admitted(again, 0, run.policy.last)
    run.rest(service)
    assert not service.finished
    run.policy.goes_live(1, [again])
    run.policy.ended(1)
    run.rest(service)

    assert service.finished
    assert run.versions() == [0, 1]


def test_a_record_that_cannot_be_read_is_no_evaluation(run: EvaluatedRun) -> None:
    run.log.append(Message(topic=EVALUATIONS, key=b"0", value=b"noise"))
    run.policy.live(0)
    service = run.evaluator()
    run.rest(service)

    assert service.evaluated == {0}


def test_a_prompt_that_the_engine_cannot_take_is_the_users_to_put_right(run: EvaluatedRun) -> None:
    def refuse(request: object) -> None:
        raise ConfigError("prompt too long")

    run.policy.live(0)
    service = run.evaluator()
    run.engine.submit = refuse  # type: ignore[method-assign]

    with pytest.raises(ConfigError, match="too long"):
        run.rest(service)


def test_a_slow_reward_is_waited_for_and_holds_up_no_step(run: EvaluatedRun) -> None:
    waiting: list[Future[Sequence[Reward]]] = []

    def later(request: object, completions: Sequence[object]) -> Future[Sequence[Reward]]:
        waiting.append(Future())
        return waiting[-1]

    run.policy.live(0)
    service = run.evaluator()
    service._p.reward.submit = later  # type: ignore[method-assign,assignment]
    run.rest(service)
    assert (len(waiting), run.versions()) == (2 * PROMPTS, [])

    for number, future in enumerate(waiting):
        future.set_result([Reward(value=None, error="planted")] * (1 if number % 2 == 0 else 4))
    run.rest(service)

    assert run.versions() == [0]
    assert {(row.reward, row.reward_error) for row in run.rows()} == {(None, "planted")}


def test_a_delivery_that_failed_ends_the_process(run: EvaluatedRun) -> None:
    class Lost:
        def done(self) -> bool:
            return True

        def result(self, timeout_s: float) -> None:
            raise DeliveryFailed("planted")

    run.policy.live(0)
    service = run.evaluator()
    service._p.writer.send = lambda message: Lost()  # type: ignore[method-assign,assignment,return-value]

    with pytest.raises(DeliveryFailed):
        run.rest(service)
    run.rest(run.evaluator())
    assert run.versions() == [0]
