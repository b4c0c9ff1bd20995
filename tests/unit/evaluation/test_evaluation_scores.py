"""What the answers of a version come to, against counting by hand and by brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.evaluation import ks_of, pass_at_k, scores_by_version, scores_of
from infra.metrics import unregistered
from schemas.evaluation_codec import EvaluationRow

ROW = EvaluationRow(
    version=3, task="t", prompt_id="p", sample=0, temperature=1.0, reward=1.0, reward_error=None, completion_tokens=4,
    finish_reason="stop", evaluated_at_us=10,
)  # fmt: skip


def rows(prompt: str, *rewards: float | None, temperature: float = 1.0) -> list[EvaluationRow]:
    return [
        replace(ROW, prompt_id=prompt, sample=sample, reward=reward, temperature=temperature)
        for sample, reward in enumerate(rewards)
    ]


@given(answers=st.lists(st.booleans(), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_hold_a_right_one(
    answers: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(answers)))
    choices = [any(choice) for choice in itertools.combinations(answers, k)]

    assert math.isclose(pass_at_k(len(answers), sum(answers), k), sum(choices) / len(choices), abs_tol=1e-12)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_of_an_impossible_count_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, right, k)


def test_k_doubles_up_to_the_samples_of_a_prompt() -> None:
    assert [ks_of(n) for n in (0, 1, 2, 3, 8)] == [(), (1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]


def test_greedy_and_sampled_answers_are_told_apart() -> None:
    greedy = [*rows("p", 1.0, temperature=0.0), *rows("q", 0.0, temperature=0.0)]
    sampled = [*rows("p", 1.0, 0.0, 0.0, 0.0), *rows("q", 0.0, 0.0, 0.0, 0.0)]

    scores = scores_of([*greedy, *sampled])

    assert (scores.version, scores.prompts, scores.answers, scores.rewards_failed) == (3, 2, 10, 0)
    assert (scores.greedy_reward, scores.sampled_reward) == (0.5, 0.125)
    assert scores.pass_at_k == ((1, 0.125), (2, 0.25), (4, 0.5))


def test_a_failed_reward_is_no_wrong_answer() -> None:
    scores = scores_of([*rows("p", 1.0, None, 0.0), *rows("q", None, None, None)])

    assert scores.rewards_failed == 4
    assert scores.sampled_reward == 0.5
    assert scores.pass_at_k == ((1, 0.5), (2, 1.0))  # no prompt has three scored answers
    assert scores.greedy_reward is None


def test_a_reward_that_is_part_of_a_right_answer_is_not_right() -> None:
    assert scores_of(rows("p", 0.9, 0.9)).pass_at_k == ((1, 0.0), (2, 0.0))


def test_length_and_truncation_count_every_answer() -> None:
    cut = replace(ROW, sample=1, completion_tokens=8, finish_reason="length", evaluated_at_us=30)
    scores = scores_of([ROW, cut])

    assert (scores.completion_tokens_mean, scores.truncated_share, scores.evaluated_at_us) == (6.0, 0.5, 30)


def test_every_metric_of_an_evaluation_is_registered() -> None:
    scores = scores_of([*rows("p", 1.0, temperature=0.0), *rows("p", *[1.0] * 6)])

    assert unregistered(scores.metrics()) == []
    assert len(scores.metrics()) == 8


def test_scores_of_two_versions_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly one version"):
        scores_of([ROW, replace(ROW, version=4)])
    assert [s.version for s in scores_by_version([ROW, replace(ROW, version=4)])] == [3, 4]


def test_the_words_name_what_was_measured() -> None:
    both = scores_of([*rows("p", 1.0, temperature=0.0), *rows("p", 1.0, 0.0)])

    assert both.words == "version 3: greedy 1.00, sampled 0.50, pass@2 1.00 (1 prompts)"
    assert scores_of(rows("p", None)).words == "version 3: 1 rewards failed (1 prompts)"
