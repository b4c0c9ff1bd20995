"""Environments: the other side of an episode of several turns. What one is, and what is asked of it.

An environment is made anew for every question and plays the episode from its beginning with the turns so far, so it
holds nothing that a dead process could lose; one that does not say the same again is a failed reward. Owns the
protocol that user code writes to; processes and engines are others' business.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from infra.ports import Completion, Reward
from infra.rewards import MAX_PARTS, failed, reward_of
from schemas.trajectory import PromptRequest

MAX_OBSERVATION_CHARS = 100_000
"""bounds what user code can send back; far above what fits an episode"""
TURNS_PART = "turns"
"""part of every episode's reward: how many turns the policy took"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What an episode begins with."""

    request: PromptRequest
    """prompt_id, task, prompt_text, reference, sampling ..."""
    group_seed: int
    """the same for every member of the group: what the problem is drawn from, so that members can be compared"""
    member_seed: int
    """of this member alone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the environment answers to one turn of the policy."""

    observation: str = ""
    """text the policy sees next; of the last turn nobody sees it"""
    done: bool = False
    reward: float | None = None
    """of this turn; an episode is worth the sum of its turns, None counts nothing"""
    parts: Mapping[str, float] = field(default_factory=dict)
    """numbers by name; a later turn's replaces an earlier one's"""


class Environment(Protocol):
    """One episode. Either method may be async."""

    def reset(self, start: Start) -> str | None:
        """Begin; text that the policy sees after its prompt, if there is any."""
        ...

    def step(self, text: str) -> Turn:
        """Answer one turn: its text as decoded, without the stop token. The same turns must get the same answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What does the environment say after these turns?"""

    request: PromptRequest
    member: int
    seed: int
    """of the run"""
    texts: tuple[str, ...] = ()
    """the policy's turns; empty: how the episode opens"""
    observations: tuple[str, ...] = ()
    """what was said so far, the opening first: as many as turns"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where an episode stands after the turns of an Ask."""

    observation: str = ""
    done: bool = False
    reward: Reward = field(default_factory=lambda: Reward(value=0.0))
    """of all turns so far. A failure ends the episode"""

    @property
    def failed(self) -> bool:
        """The environment could not answer."""
        return self.reward.value is None


def broken(cause: str) -> Outcome:
    """No answer, and why."""
    return Outcome(done=True, reward=failed(cause))


class EnvironmentPort(Protocol):
    """Answers without making its caller wait."""

    name: str
    """name@version"""

    def ask(self, asks: Sequence[Ask]) -> Future[Sequence[Outcome]]:
        """One Outcome per Ask, in order, within a stated limit. Neither this nor the future ever raises."""
        ...

    def close(self) -> None:
        """Stop at once; futures under way may never be done. Safe to call twice."""
        ...


class Episodic:
    """An environment by name, ready to be asked in this process."""

    def __init__(self, name: str, make: Callable[[], Any], *, is_async: bool) -> None:
        self.name = name
        self.one_by_one = not is_async
        """each question is a call of its own, so that one cannot take the others with it"""
        self._make = make

    def answers(self, asks: Sequence[Ask]) -> list[Outcome]:
        """One Outcome per Ask, in order. Never raises."""
        if self.one_by_one:
            return [_without_waiting(play(self._make, ask)) for ask in asks]
        return asyncio.run(self._together(asks))

    async def _together(self, asks: Sequence[Ask]) -> list[Outcome]:
        return list(await asyncio.gather(*(play(self._make, ask) for ask in asks)))


class AskedAtOnce:
    """EnvironmentPort that answers in this process, while it is asked: for what is ours, quick and sure."""

    def __init__(self, environment: Episodic) -> None:
        self.name = environment.name
        self._environment = environment

    def ask(self, asks: Sequence[Ask]) -> Future[Sequence[Outcome]]:
        """A future that is done."""
        future: Future[Sequence[Outcome]] = Future()
        future.set_result(self._environment.answers(asks))
        return future

    def close(self) -> None:
        """Nothing to release."""


class EpisodeRewards:
    """RewardScorer of an environment's name: what the environment said an episode is worth."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, request: PromptRequest, completions: Sequence[Completion]) -> Future[Sequence[Reward]]:
        """A future that is done: the rewards came with the completions."""
        future: Future[Sequence[Reward]] = Future()
        future.set_result([one.reward or failed("the episode has no reward") for one in completions])
        return future

    def close(self) -> None:
        """Nothing to release."""


async def play(make: Callable[[], Any], ask: Ask) -> Outcome:
    """The episode from its beginning. Never raises: what user code does wrong is a failed reward with its cause."""
    try:
        return await _played(make(), ask)
    # User code may raise anything; this is the boundary where it becomes a recorded failure.
    except Exception as error:  # noqa: BLE001
        return broken(f"{type(error).__name__}: {error}")


def start_of(ask: Ask) -> Start:
    """Seeds are pure functions of run seed, group and member: an episode can be played again anywhere."""
    group = f"{ask.seed}/{ask.request.group_id}"
    return Start(request=ask.request, group_seed=_seed(group), member_seed=_seed(f"{group}/{ask.member}"))


async def _played(environment: Any, ask: Ask) -> Outcome:
    said = _text(await _value(environment.reset(start_of(ask))), "reset")
    total, parts = 0.0, dict[str, float]()
    for number, (text, before) in enumerate(zip(ask.texts, ask.observations, strict=True), start=1):
        if said != before:
            return broken(
                f"the environment is not repeatable: before turn {number} it said {before[:60]!r}, and {said[:60]!r} "
                "when it was played again; draw everything from the seeds it is given"
            )
        turn = await _value(environment.step(text))
        if not isinstance(turn, Turn):
            return broken(f"step returned {type(turn).__name__}: return a Turn (from driftlog.multi_turn)")
        said = _text(turn.observation, "step")
        judged = reward_of((0.0 if turn.reward is None else turn.reward, turn.parts))
        if judged.value is None:
            return Outcome(done=True, reward=judged)
        total, parts = total + judged.value, parts | dict(judged.parts)
        if turn.done and number < len(ask.texts):
            return broken(f"the environment is not repeatable: played again, it ended after turn {number} already")
    if not ask.texts:
        return Outcome(observation=said)
    if len(parts) >= MAX_PARTS:
        return broken(f"the reward has {len(parts)} parts: at most {MAX_PARTS - 1}")
    parts[TURNS_PART] = float(len(ask.texts))
    return Outcome(observation=said, done=turn.done is True, reward=Reward(value=total, parts=parts))


async def _value(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def _without_waiting(played: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a coroutine that never waits: no event loop is made for environments that need none."""
    try:
        played.send(None)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
    played.close()
    return broken("the environment waits for something: declare reset and step as `async def`")


def _text(said: Any, what: str) -> str:
    if said is None:
        return ""
    if not isinstance(said, str):
        raise TypeError(f"{what} said {type(said).__name__}: an observation is text")
    if len(said) > MAX_OBSERVATION_CHARS:
        raise ValueError(f"{what} said {len(said)} characters: at most {MAX_OBSERVATION_CHARS}")
    return said


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"episode/{name}".encode()).digest()[:8], "big")
