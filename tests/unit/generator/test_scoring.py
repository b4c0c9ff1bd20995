"""Rewards that take their time: the generator goes on, keeps its claim, and publishes when they are in."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from infra.ports import Completion, Reward
from schemas.trajectory import PromptRequest
from tests.unit.generator.generator_rig import GeneratorRig


class LateScorer:
    """The RewardScorer port; the test says when a group is scored."""

    name = "late@1"

    def __init__(self) -> None:
        self.asked: dict[str, tuple[int, Future[Sequence[Reward]]]] = {}
        self.closed = False

    def submit(self, request: PromptRequest, completions: Sequence[Completion]) -> Future[Sequence[Reward]]:
        future: Future[Sequence[Reward]] = Future()
        self.asked[request.group_id] = (len(completions), future)
        return future

    def answer(self, group_id: str, reward: Reward) -> None:
        count, future = self.asked.pop(group_id)
        future.set_result([reward] * count)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def late() -> LateScorer:
    return LateScorer()


@pytest.fixture
def rig(tmp_path: Path, late: LateScorer) -> GeneratorRig:
    return GeneratorRig(tmp_path, reward=late).serving()


def test_a_group_whose_reward_is_not_in_is_claimed_and_not_published(rig: GeneratorRig, late: LateScorer) -> None:
    rig.ask(0, 1)
    rig.until(lambda: len(late.asked) == 2)
    first, second = sorted(late.asked)
    rig.step(15)

    assert [] == rig.groups()
    assert (first, second) == rig.beats()[-1].claims
    late.answer(second, Reward(value=0.5))
    rig.step(3)
    assert [second] == rig.groups()  # the first holds nobody back
    assert {0.5} == {row.reward for row in rig.rows()}
    assert {"late@1"} == {row.reward_function for row in rig.rows()}


def test_a_failed_reward_is_published_with_its_cause(rig: GeneratorRig, late: LateScorer) -> None:
    rig.ask(0)
    group = rig.until(lambda: next(iter(late.asked), ""))
    late.answer(group, Reward(value=None, error="crash: it ended its process"))
    rig.step(3)

    assert {(None, "crash: it ended its process")} == {(row.reward, row.reward_error) for row in rig.rows()}


def test_groups_that_wait_for_rewards_count_as_in_flight(rig: GeneratorRig, late: LateScorer) -> None:
    rig.ask(*range(6))
    rig.until(lambda: len(late.asked) == 4)
    rig.step(20)
    assert 4 == len(late.asked)  # max_groups_in_flight of the rig

    late.answer(min(late.asked), Reward(value=1.0))
    rig.until(lambda: len(rig.groups()) == 1 and len(late.asked) == 4)


def test_a_worker_that_is_told_to_stop_waits_for_its_rewards(rig: GeneratorRig, late: LateScorer) -> None:
    rig.ask(0)
    group = rig.until(lambda: next(iter(late.asked), ""))
    rig.service.request_stop("test")
    rig.step(10)
    assert not rig.service.finished

    late.answer(group, Reward(value=1.0))
    rig.until(lambda: rig.service.finished)
    assert [group] == rig.groups()


def test_closing_ends_the_scorer(rig: GeneratorRig, late: LateScorer) -> None:
    rig.service.close()

    assert late.closed
