"""Environments: played from the beginning for every question, judged like any reward, loaded by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.config_task import EnvironmentEntry
from infra.environment import Ask, AskedAtOnce, EpisodeRewards, Episodic, Outcome, Start, Turn, start_of
from infra.environment_loading import load_environment
from infra.environment_shipped import Calculator, Guess
from infra.reward_wire import asks_line, asks_of, message_of, outcome_from, outcome_line
from schemas.errors import ConfigError
from tests.fakes.turn_engine import Echo
from tests.unit.policy.test_rewards import completion, request


def ask(*texts: str, observations: Sequence[str] | None = None, member: int = 0, **reference: str) -> Ask:
    said = ["", *(f"<{text}>" for text in texts[:-1])] if observations is None else observations
    return Ask(request=request(**reference), member=member, seed=7, texts=texts, observations=tuple(said[: len(texts)]))


def played(make: Any, *asks: Ask, is_async: bool = False) -> list[Outcome]:
    return Episodic("own@1", make, is_async=is_async).answers(asks)


def test_an_episode_is_worth_the_sum_of_its_turns_and_keeps_the_newest_parts() -> None:
    [opening, one, two] = played(Echo, ask(), ask("ab"), ask("ab", "end"))

    assert ("", False, {}) == (opening.observation, opening.done, opening.reward.parts)
    assert ("<ab>", False, 0.25) == (one.observation, one.done, one.reward.value)
    assert (True, 1.25, {"ended": 1.0, "length": 2.0, "turns": 2.0}) == (two.done, two.reward.value, two.reward.parts)


def test_the_seed_of_the_group_is_shared_by_its_members_and_nothing_else_is() -> None:
    a, b = start_of(ask(member=0)), start_of(ask(member=1))

    assert a.group_seed == b.group_seed
    assert 3 == len({a.group_seed, a.member_seed, b.member_seed})
    # Part of the record of a run: with other seeds no episode could be played again.
    assert 16428388738654421139 == start_of(ask()).group_seed


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (1.0, "step returned float: return a Turn"),
        (Turn(reward=float("nan")), "the reward is nan"),
        (Turn(reward="1"), "is text"),  # type: ignore[arg-type]
        (Turn(parts={"a": float("inf")}), "part 'a' of the reward is inf"),
        (Turn(observation=3), "an observation is text"),  # type: ignore[arg-type]
        (Turn(observation="x" * 200_000), "at most 100000"),
        (Turn(parts={str(n): 0.0 for n in range(64)}), "at most 63"),
    ],
)
def test_what_a_step_must_not_say_is_a_failure_with_its_cause(said: Any, cause: str) -> None:
    class Own(Echo):
        def step(self, text: str) -> Turn:
            return said  # type: ignore[no-any-return]

    [outcome] = played(Own, ask("a"))

    assert outcome.failed and outcome.done
    assert cause in str(outcome.reward.error)


def test_an_environment_that_says_something_else_when_played_again_is_found_out() -> None:
    class Moody(Echo):
        def step(self, text: str) -> Turn:
            return Turn(observation="other", done=text == "early")

    [other, early] = played(Moody, ask("a", "b"), ask("early", "b"))

    assert "before turn 2 it said '<a>', and 'other' when it was played again" in str(other.reward.error)
    assert "it ended after turn 1 already" in str(early.reward.error)


def test_async_environments_think_at_the_same_time() -> None:
    together = asyncio.Event()

    class Slow(Echo):
        async def step(self, text: str) -> Turn:  # type: ignore[override]
            if text == "waits":
                await asyncio.wait_for(together.wait(), 5.0)
            together.set()
            return super().step(text)

    found = played(Slow, ask("waits"), ask("end"), is_async=True)

    assert ["<waits>", "unseen"] == [outcome.observation for outcome in found]


def test_an_environment_that_waits_without_saying_so_is_told_what_to_do() -> None:
    class Later:
        def __await__(self) -> Any:
            yield

    class Hidden(Echo):
        def step(self, text: str) -> Turn:
            return Later()  # type: ignore[return-value]

    [outcome] = played(Hidden, ask("a"))

    assert "declare reset and step as `async def`" in str(outcome.reward.error)


def test_questions_and_answers_survive_the_way_to_a_process() -> None:
    asked = [ask("a", "end", answer="x"), ask("b", member=3, answer="x")]

    again = asks_of(asks_line(asked))

    for before, after in zip(asked, again, strict=True):
        assert (before.member, before.seed, before.texts, before.observations) == (
            after.member, after.seed, after.texts, after.observations,
        )  # fmt: skip
        assert before.request.reference == after.request.reference
        assert before.request.prompt_token_ids.tolist() == after.request.prompt_token_ids.tolist()
        assert start_of(before) == Start(
            request=before.request,
            group_seed=start_of(after).group_seed,
            member_seed=start_of(after).member_seed,
        )
    for outcome in played(Echo, ask("raise"), *asked):
        assert outcome == outcome_from(message_of(outcome_line(outcome)))


def test_rewards_of_episodes_come_with_them_and_one_without_is_a_failure() -> None:
    rewards = EpisodeRewards("own@1").submit(request(), [completion("a")]).result(0.0)

    assert ["the episode has no reward"] == [reward.error for reward in rewards]


# ---------------------------------------------------------------------- shipped


def test_the_calculator_tells_values_until_the_target_is_reached() -> None:
    def turns(*texts: str, observations: Sequence[str] = ()) -> Outcome:
        asked = ask(*texts, observations=["", *observations], numbers="2,3", target="6")
        at = AskedAtOnce(Episodic("c@1", lambda: Calculator(discount=0.25), is_async=False))
        [outcome] = at.ask([asked]).result(0.0)
        at.close()
        return outcome

    assert ("=5:", False, 0.0) == (turns("2+3").observation, turns("2+3").done, turns("2+3").reward.value)
    assert ":" == turns("2+").observation
    assert "=6:" == turns("3+3").observation, "the target with other numbers is not the answer"
    done = turns("2+3", "2*3", observations=["=5:"])
    assert (True, 0.75) == (done.done, done.reward.value)
    assert {"right": 1.0, "well_formed": 1.0, "turns": 2.0} == done.reward.parts
    assert 1.0 == turns("2*3").reward.value


def test_the_calculator_needs_the_numbers_of_the_problem() -> None:
    [outcome] = played(Calculator, ask("1", answer="x"))

    assert "no reference 'numbers'" in str(outcome.reward.error)


def test_guess_says_more_or_less_and_the_number_is_that_of_the_group() -> None:
    def answer(text: str, member: int) -> Outcome:
        [outcome] = played(Guess, ask(text, member=member))
        return outcome

    said = [answer(str(number), 0) for number in range(1, 10)]
    [secret] = [number for number, outcome in enumerate(said, start=1) if outcome.done]
    assert ["+"] * (secret - 1) + ["-"] * (9 - secret) == [o.observation for o in said if not o.done]
    assert (1.0, 0.0) == (said[secret - 1].reward.value, answer("1+1", 0).reward.value)
    assert answer("1+1", 0).done
    assert answer(str(secret), 5).done


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("calculator", {"discount": 1.0}, "from 0 to below 1"),
        ("guess", {"highest": 1}, "at least 2"),
        ("guess", {"lowest": 1}, "cannot be made: TypeError"),
        ("chess", {}, "use one of calculator, guess, package.module"),
        ("no.such:Thing", {}, "environment 'no.such:Thing': no.such cannot be imported"),
        ("infra.environment:Turn", {}, "Turn has no method 'reset'"),
        ("infra.environment:Absent", {}, "has no function 'Absent'"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_by_name(
    name: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_environment(EnvironmentEntry(name=name, arguments=arguments))


def test_the_recorded_name_carries_version_and_arguments(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.fakes.turn_engine import Echo\nclass Own(Echo):\n    version = 5\n")

    assert "calculator@1" == load_environment(EnvironmentEntry(name="calculator")).name
    assert 'guess{"highest": 5}@1' == load_environment(EnvironmentEntry(name="guess", arguments={"highest": 5})).name
    assert f"{file}:Own@5" == load_environment(EnvironmentEntry(name=f"{file}:Own")).name
