"""Episodes: turns of the policy and observations become one trajectory, token for token, whatever happens between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.environment import EpisodeRewards
from infra.ports import Completion, EngineRequest
from producers.episodes import EpisodeEngine, EpisodeSettings
from schemas.errors import IllegalState
from schemas.trajectory import PromptRequest, Sampling
from tests.fakes.turn_engine import STOP, Asked, Echo, TurnEngine
from tests.unit.generator.requests_of import request_of

Script = Callable[[int, int], str]


def two_turns(member: int, turn: int) -> str:
    return ("ab", "end")[min(turn, 1)]


def codes(text: str) -> list[int]:
    return list(map(ord, text))


class Rig:
    """An engine, an environment, and the episodes between them."""

    def __init__(
        self, script: Script, environment: Asked | None = None, *, max_turns: int = 4, in_step: bool = True
    ) -> None:
        self.engine = TurnEngine(script=script)
        self.environment = environment or Asked()
        settings = EpisodeSettings(max_turns=max_turns, in_step=in_step)
        self.episodes = EpisodeEngine(self.engine, self.environment, self.encode, settings)

    @staticmethod
    def encode(text: str) -> list[int]:
        if "?" in text:
            raise ValueError(f"the observation {text!r} cannot be tokenised")
        return codes(text)

    def submit(self, size: int = 1, number: int = 0, max_tokens: int = 40) -> PromptRequest:
        request = request_of(number, group_size=size, sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,)))
        self.episodes.submit(EngineRequest(request=request, rng_seed=7))
        return request

    def play(self, polls: int = 20) -> list[Completion]:
        done: list[Completion] = []
        for _ in range(polls):
            done += self.episodes.poll()
        return sorted(done, key=lambda completion: completion.index_in_group)


def test_an_episode_is_one_completion_and_what_was_sampled_is_never_tokenised_again() -> None:
    rig = Rig(two_turns)
    rig.submit()

    [done] = rig.play()

    assert done.loss_mask is not None and done.reward is not None
    assert [*codes("ab"), STOP, *codes("<ab>"), *codes("end"), STOP] == done.token_ids.tolist()
    assert [True] * 3 + [False] * 4 + [True] * 4 == done.loss_mask.tolist()
    assert [-0.5] * 3 + [0.0] * 4 + [-1.5] * 4 == done.logprobs.tolist()
    assert [(3, 11, 30)] == [(s.version, s.length, s.proof) for s in done.segments]
    assert "ab<ab>end" == done.text
    assert ("stop", 100, 201) == (done.finish_reason, done.started_at_us, done.finished_at_us)
    assert 1.25 == done.reward.value
    assert {"ended": 1.0, "length": 2.0, "turns": 2.0} == done.reward.parts
    assert 7 == done.sampled_tokens


def test_the_next_turn_continues_the_very_tokens_of_its_member_and_a_first_turn_is_a_whole_group() -> None:
    rig = Rig(lambda member, turn: "end" if turn == member else "ab")
    request = rig.submit(size=3)

    done = rig.play()

    assert [1, 2, 3] == [int(c.reward.parts["turns"]) for c in done if c.reward is not None]
    first, *later = rig.engine.asked
    assert (request, None, ()) == (first.request, first.member, first.context)
    context = (*codes("ab"), STOP, *codes("<ab>"))
    assert [(1, context), (2, context), (2, context * 2)] == [(one.member, one.context) for one in later]
    assert {7} == {one.rng_seed for one in rig.engine.asked}


def test_the_opening_stands_before_the_first_turn_masked_and_in_the_segment_of_that_turn() -> None:
    class Opening(Echo):
        opening = "go"

    rig = Rig(lambda member, turn: "end", Asked(Opening))
    rig.submit(size=2)

    done = rig.play()

    for completion in done:
        assert completion.loss_mask is not None
        assert [*codes("go"), *codes("end"), STOP] == completion.token_ids.tolist()
        assert [False] * 2 + [True] * 4 == completion.loss_mask.tolist()
        assert [(3, 6, 30)] == [(s.version, s.length, s.proof) for s in completion.segments]
    assert [(0, (103, 111)), (1, (103, 111))] == [(one.member, one.context) for one in rig.engine.asked]


def test_an_episode_ends_at_max_turns_with_the_reward_so_far() -> None:
    rig = Rig(lambda member, turn: "ab", max_turns=3)
    rig.submit()

    [done] = rig.play()

    assert done.reward is not None
    assert (3.0, 0.75, "stop") == (done.reward.parts["turns"], done.reward.value, done.finish_reason)
    assert done.token_ids.tolist()[-3:] == [*codes("ab"), STOP]


@pytest.mark.parametrize(("max_tokens", "turns", "length"), [(3, 1, 3), (7, 1, 3), (8, 2, 8), (9, 2, 9), (10, 2, 10)])
def test_max_tokens_bounds_the_whole_episode_and_it_ends_with_what_the_policy_said(
    max_tokens: int, turns: int, length: int
) -> None:
    rig = Rig(lambda member, turn: "ab")  # a turn of 3, an observation of 4
    rig.submit(max_tokens=max_tokens)

    [done] = rig.play()

    assert done.reward is not None and done.loss_mask is not None
    assert (turns, length) == (done.reward.parts["turns"], len(done.token_ids))
    assert done.finish_reason == "length"
    assert done.loss_mask[-1]
    assert 0.25 * turns == done.reward.value


def test_what_an_environment_does_wrong_is_a_failed_reward_of_that_member_alone() -> None:
    rig = Rig(lambda member, turn: "raise" if member == 1 else "end")
    rig.submit(size=3)

    done = rig.play()

    rewards = EpisodeRewards("echo@1").submit(rig.environment.asks[0].request, done).result(0.0)
    assert [1.0, None, 1.0] == [reward.value for reward in rewards]
    assert "ValueError: no such tool" == rewards[1].error
    assert [*codes("raise"), STOP] == done[1].token_ids.tolist()


def test_an_observation_that_cannot_be_tokenised_is_a_failed_reward() -> None:
    rig = Rig(lambda member, turn: "?")
    rig.submit()

    [done] = rig.play()

    assert done.reward is not None and done.reward.value is None
    assert "cannot be tokenised" in str(done.reward.error)


@pytest.mark.parametrize(
    ("opening", "words"), [("raise", "ValueError"), ("?", "cannot be tokenised"), ("long" * 10, "leaves no room")]
)
def test_an_episode_that_does_not_open_still_has_a_turn_and_fails(opening: str, words: str) -> None:
    class Broken(Echo):
        def reset(self, start: Any) -> str:
            if opening == "raise":
                raise ValueError("no world")
            return opening

    rig = Rig(two_turns, Asked(Broken))
    rig.submit()

    [done] = rig.play()

    assert done.reward is not None and done.reward.value is None
    assert words in str(done.reward.error)
    assert [*codes("ab"), STOP] == done.token_ids.tolist()


def test_an_aborted_turn_ends_its_episode_without_a_reward() -> None:
    rig = Rig(two_turns)
    rig.engine.finish = "abort"
    rig.submit()

    [done] = rig.play()

    assert done.reward is not None
    assert ("abort", "the completion was aborted") == (done.finish_reason, done.reward.error)


def test_a_turn_without_text_is_a_failed_reward_and_not_an_empty_turn() -> None:
    rig = Rig(two_turns)
    rig.engine.has_text = False
    rig.submit()

    [done] = rig.play()

    assert done.reward is not None and "no text" in str(done.reward.error)


def test_a_group_runs_while_its_environment_thinks_and_nobody_polls_in_vain() -> None:
    rig = Rig(two_turns, Asked(slow=True))
    request = rig.submit()
    group = frozenset({str(request.group_id)})

    assert (group, False) == (rig.episodes.running_groups(), rig.episodes.busy())
    assert rig.play() == []
    rig.environment.answer()
    assert rig.episodes.busy()
    assert rig.play() == []
    assert (group, False) == (rig.episodes.running_groups(), rig.episodes.busy())
    rig.environment.answer()
    assert rig.play() == []
    rig.environment.answer()
    assert 1 == len(rig.play())
    assert (frozenset(), False) == (rig.episodes.running_groups(), rig.episodes.busy())


@pytest.mark.parametrize(
    ("in_step", "asked"),
    [
        (True, [[None], [None], [None], [None, 0, 1, 2]]),
        (False, [[None], [None, 0], [None, 0, 1], [None, 0, 1, 2]]),
    ],
)
def test_in_step_the_turns_of_a_group_begin_together_and_otherwise_each_as_soon_as_it_can(
    in_step: bool, asked: list[list[int | None]]
) -> None:
    rig = Rig(lambda member, turn: "ab", in_step=in_step)
    rig.engine.turns_per_poll = 1  # the members of a group end one after another
    rig.submit(size=3)
    seen = []
    for _ in range(4):
        rig.episodes.poll()
        seen.append([one.member for one in rig.engine.asked][:4])

    assert asked == seen


# ---------------------------------------------------------------------- switches


def test_finish_lets_whole_episodes_end_under_the_old_weights_and_holds_later_groups() -> None:
    rig = Rig(two_turns, Asked(slow=True))
    early = rig.submit(number=0)
    rig.environment.answer()
    rig.play(1)
    rig.episodes.pause("finish")
    late = rig.submit(number=1)

    assert rig.engine.paused is None, "the engine must go on: there is a turn to come"
    rig.environment.answer()
    assert rig.play(3) == []
    rig.environment.answer()
    [done] = rig.play(2)

    assert (str(early.group_id), {3}) == (done.group_id, {segment.version for segment in done.segments})
    assert "finish" == rig.engine.paused
    assert frozenset({str(late.group_id)}) == rig.episodes.running_groups()
    rig.episodes.load(Path(), 4)
    rig.episodes.set_proof(40)
    rig.episodes.resume()
    rig.environment.slow = False
    rig.environment.answer()
    [after] = rig.play()
    assert {(4, 40)} == {(segment.version, segment.proof) for segment in after.segments}


def test_keep_between_two_turns_makes_the_later_turn_a_segment_of_its_own() -> None:
    rig = Rig(two_turns, Asked(slow=True))
    rig.submit()
    rig.environment.answer()
    rig.play(2)
    rig.episodes.pause("keep")
    rig.environment.answer()
    assert rig.play(3) == [], "nothing is sampled while it is frozen"
    rig.episodes.load(Path(), 4)
    rig.episodes.set_proof(40)
    rig.episodes.resume()
    rig.play(2)
    rig.environment.answer()

    [done] = rig.play()

    # The observation lies in the segment of the turn before it: it names no version of its own.
    assert [(3, 7, 30), (4, 4, 40)] == [(s.version, s.length, s.proof) for s in done.segments]


def test_a_drain_that_took_too_long_freezes_what_is_left() -> None:
    rig = Rig(two_turns, Asked(slow=True))
    rig.submit()
    rig.environment.answer()
    rig.play(2)
    rig.episodes.pause("finish")
    assert rig.play(2) == []

    rig.episodes.pause("keep")

    assert "keep" == rig.engine.paused
    assert 1 == len(rig.episodes.running_groups())


def test_an_idle_engine_is_told_to_finish_at_once() -> None:
    rig = Rig(two_turns)

    rig.episodes.pause("finish")

    assert "finish" == rig.engine.paused


# ---------------------------------------------------------------------- the rest of the port


def test_everything_else_is_the_engines() -> None:
    rig = Rig(two_turns)

    assert rig.episodes.score([[1, 2]], [1]) == ["scored", [[1, 2]], [1]]
    assert rig.episodes.generate_greedily([[1]], 2) == ["greedy", [[1]], 2]
    assert (16, {"engine": "turns"}, False) == (
        rig.episodes.prefix_block(),
        rig.episodes.identity(),
        rig.episodes.weights_touched(),
    )


def test_a_request_for_a_later_turn_is_a_defect_of_ours() -> None:
    rig = Rig(two_turns)
    request = request_of(0, group_size=2)

    with pytest.raises(IllegalState, match="begins with its group"):
        rig.episodes.submit(EngineRequest(request=request, rng_seed=7, member=1))


def test_closing_twice_ends_engine_and_environment_and_leaves_it_idle() -> None:
    rig = Rig(two_turns)
    rig.submit()

    rig.episodes.close()
    rig.episodes.close()

    assert rig.engine.closed and rig.environment.closed
    assert rig.episodes.poll() == []
    assert frozenset() == rig.episodes.running_groups()
