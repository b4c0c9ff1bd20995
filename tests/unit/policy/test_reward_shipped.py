"""Shipped rewards by hand-made numbers, their sum, and the shapes a function of one's own may have."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from infra.config_task import RewardEntry
from infra.ports import Completion, Reward
from infra.reward_loading import UserReward, is_batched, load_reward, load_rewards
from infra.reward_wire import job_line, job_of, message_of, reward_from, reward_line
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest, Segment
from tests.unit.policy.test_rewards import completion, request


def of_length(tokens: int) -> Completion:
    return replace(completion(""), token_ids=np.zeros(tokens, dtype=np.int32))


def values(rewards: Sequence[Reward]) -> list[float | None]:
    return [reward.value for reward in rewards]


def test_soft_overlong_is_zero_then_falls_to_minus_one_over_the_buffer() -> None:
    reward = load_reward("soft-overlong", {"buffer_tokens": 4})  # max_tokens 16: L = 12

    found = reward.score(request(), [of_length(tokens) for tokens in (1, 12, 13, 14, 16)])

    assert [0.0, 0.0, -0.25, -0.5, -1.0] == values(found)


def test_length_is_minus_the_share_of_what_was_allowed() -> None:
    assert [-0.25, -1.0] == values(load_reward("length").score(request(), [of_length(4), of_length(16)]))


def test_format_matches_the_whole_text() -> None:
    reward = load_reward("format", {"pattern": "<a>.*</a>"})

    found = reward.score(request(), [completion(text) for text in ("<a>1\n2</a>\n", "x<a></a>", "<a></a>x", None)])

    assert [1.0, 0.0, 0.0, None] == values(found)


def test_exact_compares_with_the_reference_and_a_missing_one_is_a_failure() -> None:
    assert [1.0, 0.0] == values(
        load_reward("exact").score(request(answer="12"), [completion(" 12 "), completion("1 2")])
    )
    (found,) = load_reward("exact", {"column": "solution"}).score(request(answer="12"), [completion("12")])
    assert "no reference column 'solution' (there: answer)" in str(found.error)


def test_math_answers_are_compared_as_mathematics() -> None:
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    reward = load_reward("math")
    texts = ["so it is $0.5$", r"\boxed{\frac{2}{4}}", "no answer", "$0.6$", r"$\frac{1}{$"]

    found = reward.score(request(answer=r"\frac{1}{2}"), [completion(text) for text in texts])

    assert [1.0, 1.0, 0.0, 0.0, 0.0] == values(found)
    assert [1.0, 1.0, 0.0] == [one.parts["has_answer"] for one in found[:3]]
    (broken,) = reward.score(request(answer="?"), [completion("$1$")])
    assert "is no mathematics" in str(broken.error)


def test_math_without_its_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)

    with pytest.raises(ConfigError, match=r"pip install 'driftlog\[math\]'"):
        load_reward("math")


def test_a_sum_keeps_the_raw_values_as_parts() -> None:
    entries = [
        RewardEntry(name="exact", weight=2.0),
        RewardEntry(name="length", weight=0.5),
        RewardEntry(name="countdown", weight=0.0),
    ]
    reward = load_rewards(entries)
    asked = request(answer="3*4", numbers="3,4", target="12")

    (found,) = reward.score(asked, [completion("3*4")])

    assert "2*exact@1+0.5*length@1+0*countdown@1" == reward.name
    assert 2.0 - 0.5 / 16 == found.value
    assert {"exact": 1.0, "length": -1 / 16, "countdown": 1.0, "countdown/well_formed": 1.0} == found.parts


def test_a_sum_fails_where_one_of_its_rewards_fails() -> None:
    reward = load_rewards([RewardEntry(name="exact"), RewardEntry(name="length")])

    (found,) = reward.score(request(), [completion("1")])

    assert found.value is None
    assert str(found.error).startswith("exact: KeyError")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("soft-overlong", {}, "arguments: .*buffer_tokens"),
        ("soft-overlong", {"buffer_tokens": 0}, "1 or more"),
        ("format", {"pattern": "("}, "is no regular expression"),
        ("length", {"wieght": 1}, "arguments: .*wieght"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_reward(name, arguments)


def test_a_buffer_above_the_limit_is_a_failed_reward() -> None:
    (found,) = load_reward("soft-overlong", {"buffer_tokens": 17}).score(request(), [of_length(1)])

    assert "is above max_tokens = 16" in str(found.error)


# ---------------------------------------------------------------------- one's own


def one(asked: PromptRequest, done: Completion) -> float:
    return float(str(done.text))


def group(asked: PromptRequest, completions: Sequence[Completion]) -> list[float]:
    return [float(str(done.text)) for done in completions]


async def one_later(asked: PromptRequest, done: Completion) -> float:
    await asyncio.sleep(0)
    return float(str(done.text))


async def group_later(asked: PromptRequest, completions: Sequence[Completion]) -> list[float]:
    await asyncio.sleep(0)
    return group(asked, completions)


@pytest.mark.parametrize("function", [one, group, one_later, group_later])
def test_each_shape_of_a_function_gives_one_reward_a_completion(function: Callable[..., Any]) -> None:
    reward = UserReward("f@1", function, {})

    found = reward.score(request(), [completion("1"), completion("2", "abort"), completion("3")])

    assert [1.0, None, 3.0] == values(found)
    assert (function is one) == reward.one_by_one


def test_an_attribute_says_more_than_a_name() -> None:
    def judge(asked: object, texts: object) -> None: ...

    assert not is_batched(judge)
    judge.batched = True  # type: ignore[attr-defined]
    assert is_batched(judge)


@pytest.mark.parametrize(
    ("found", "words"), [({"a": 1}, "returned dict"), ("ab", "returned str"), (1.0, "returned fl")]
)
def test_a_batched_function_that_returns_no_list_fails_for_all(found: object, words: str) -> None:
    def judge(asked: object, completions: object) -> object:
        return found

    rewards = UserReward("f@1", judge, {}).score(request(), [completion("1"), completion("2")])

    assert [None, None] == values(rewards)
    assert words in str(rewards[0].error)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("1.0", "is text"), (None, "is None"), (object(), "TypeError"), ((1.0, {"a": float("nan")}), "part 'a'"),
        ((1.0, {"a": "b"}), "is text"), ((1.0, {str(n): n for n in range(65)}), "65 parts"), ((1, 2, 3), "TypeError"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_no_reward(found: object, words: str) -> None:
    (reward,) = UserReward("f@1", lambda _, __: found, {}).score(request(), [completion("")])

    assert reward.value is None
    assert words in str(reward.error)


# ---------------------------------------------------------------------- the wire


def test_a_job_and_a_reward_survive_the_wire() -> None:
    asked = replace(request(answer="\u00e4"), prompt_token_ids=np.array([1, 70000], dtype=np.int32))
    done = replace(
        completion("a\nb"),
        logprobs=np.array([-0.5], dtype=np.float32),
        segments=(Segment(version=1, length=1, proof=7),),
    )

    again, (member,) = job_of(job_line(asked, [done]))

    assert asked.prompt_token_ids.tolist() == again.prompt_token_ids.tolist()
    assert replace(asked, prompt_token_ids=again.prompt_token_ids) == again
    assert ("a\nb", [-0.5], done.segments) == (member.text, member.logprobs.tolist(), member.segments)
    reward = Reward(value=0.1, parts={"a": 1.0}, error=None)
    assert reward == reward_from(message_of(reward_line(reward)))
    with pytest.raises(ValueError, match="not an object"):
        message_of(b"[1]\n")
