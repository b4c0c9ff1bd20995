"""Rewards: right, wrong, and failed are three different things."""

from __future__ import annotations

import numpy as np
import pytest

from infra.ports import Completion
from infra.rewards import GuardedReward, Judge, countdown_reward
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest, Sampling


def request(**reference: str) -> PromptRequest:
    return PromptRequest(
        group_id="t/p000000/e0/a0",  # type: ignore[arg-type]
        request_position=0,
        prompt_id="p0",
        task="pairs",
        epoch=0,
        attempt=0,
        group_size=1,
        prompt_token_ids=np.zeros(1, dtype=np.int32),
        reference=reference,
        sampling=Sampling(),
        intended_step=0,
        min_version=0,
        fallback_version=0,
        issued_at_us=0,
    )


def completion(text: str | None, finish_reason: str = "stop") -> Completion:
    return Completion(
        group_id="t/p000000/e0/a0",
        index_in_group=0,
        token_ids=np.zeros(1, dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        loss_mask=np.ones(1, dtype=np.bool_),
        segments=(),
        finish_reason=finish_reason,  # type: ignore[arg-type]
        text=text,
        started_at_us=0,
        finished_at_us=0,
    )


def test_right_wrong_and_malformed_answers_are_told_apart() -> None:
    texts = ["3*4", "3+4", "3*"]

    found = countdown_reward().score(request(numbers="3,4", target="12"), [completion(text) for text in texts])

    assert [reward.value for reward in found] == [1.0, 0.0, 0.0]
    assert [reward.parts["well_formed"] for reward in found] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("reference", "text", "words"),
    [
        ({"numbers": "3,4"}, "3*4", "no reference 'target'"),
        ({"numbers": "3,x", "target": "12"}, "3*4", "invalid literal"),
        ({"numbers": "3,4", "target": "12"}, None, "no text"),
    ],
)
def test_a_reward_that_crashes_is_a_failure_and_not_a_zero(
    reference: dict[str, str], text: str | None, words: str
) -> None:
    (found,) = countdown_reward().score(request(**reference), [completion(text)])

    assert found.value is None
    assert found.error is not None
    assert words in found.error


def test_an_aborted_completion_has_no_reward() -> None:
    (found,) = countdown_reward().score(request(numbers="3,4", target="12"), [completion("3*4", "abort")])

    assert found.value is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_a_failure(value: float) -> None:
    judge: Judge = lambda _, __: (value, {})  # noqa: E731

    (found,) = GuardedReward("mine@1", judge).score(request(), [completion("")])

    assert found.value is None
    assert "finite" in str(found.error)


def test_one_failure_leaves_the_other_members_alone() -> None:
    def judge(_: PromptRequest, done: Completion) -> tuple[float, dict[str, float]]:
        return float(str(done.text)), {}

    found = GuardedReward("mine@1", judge).score(request(), [completion("1"), completion("x"), completion("2")])

    assert [reward.value for reward in found] == [1.0, None, 2.0]


def test_a_reward_function_names_its_version() -> None:
    with pytest.raises(ConfigError, match="name@version"):
        GuardedReward("mine", lambda _, __: (0.0, {}))
    with pytest.raises(ConfigError, match="has 513 characters, at most 512 can be recorded"):
        GuardedReward("m" * 511 + "@1", lambda _, __: (0.0, {}))
