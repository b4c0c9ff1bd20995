"""Reward functions: what a completion is worth.

A reward that cannot be computed is a failure with its cause, never a zero: the trainer drops and counts
the member, and the policy is not punished for a bug in the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from infra.countdown import judge, parse
from infra.ports import Completion, Reward, RewardFunction, RewardScorer
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest

Parts = Mapping[str, float]
Judge = Callable[[PromptRequest, Completion], tuple[float, Parts]]

MAX_NAME_CHARS = 512
"""as the records of the log allow"""
MAX_ERROR_CHARS = 500
MAX_PARTS = 64
"""both bound what user code can put into a row"""


class GuardedReward:
    """RewardFunction over a plain function that judges one completion and may raise."""

    def __init__(self, name: str, judge_one: Judge) -> None:
        self.name = checked_name(name)
        self._judge_one = judge_one

    def score(self, request: PromptRequest, completions: Sequence[Completion]) -> Sequence[Reward]:
        """One Reward per completion, in order. Never raises."""
        return [self._guarded(request, completion) for completion in completions]

    def _guarded(self, request: PromptRequest, completion: Completion) -> Reward:
        if completion.finish_reason == "abort":
            return ABORTED
        try:
            found = self._judge_one(request, completion)
        # User code may raise anything; this is the boundary where it becomes a recorded failure.
        except Exception as error:  # noqa: BLE001
            return failed(f"{type(error).__name__}: {error}")
        return reward_of(found)


class ScoredAtOnce:
    """RewardScorer that scores in this process, while it is asked: for functions that are ours, quick and sure."""

    def __init__(self, function: RewardFunction) -> None:
        self.name = function.name
        self._function = function

    def submit(self, request: PromptRequest, completions: Sequence[Completion]) -> Future[Sequence[Reward]]:
        """A future that is done."""
        future: Future[Sequence[Reward]] = Future()
        future.set_result(self._function.score(request, completions))
        return future

    def close(self) -> None:
        """Nothing to release."""


class Awaited:
    """RewardFunction over a scorer: for callers that may wait. The scorer's own limits end every wait."""

    def __init__(self, scorer: RewardScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer

    def score(self, request: PromptRequest, completions: Sequence[Completion]) -> Sequence[Reward]:
        """One Reward per completion, in order. Never raises."""
        return self._scorer.submit(request, completions).result()


def failed(cause: str) -> Reward:
    """No reward, and why."""
    return Reward(value=None, error=cause[:MAX_ERROR_CHARS])


ABORTED = failed("the completion was aborted")


def checked_name(name: str) -> str:
    """The name as it is, when it carries a version."""
    base, at, version = name.partition("@")
    if not (base and at and version):
        raise ConfigError(f"reward function name {name!r}: write name@version, so that the log tells which one judged")
    if len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f"reward function name {name[:60]!r}... has {len(name)} characters, at most {MAX_NAME_CHARS} can be "
            "recorded: use shorter paths, or one function that adds up the others"
        )
    return name


def reward_of(found: Any) -> Reward:
    """What a function returned for one completion: a finite number, or (number, parts). Anything else is a failure."""
    value, parts = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if value is None:
        return failed("the reward is None: return a finite number, or raise")
    try:
        number = _number(value)
        numbers = {str(name)[:100]: _number(part) for name, part in dict(parts).items()}
    # float() of a stranger's type may raise anything.
    except Exception as error:  # noqa: BLE001
        return failed(f"the reward is no number: {type(error).__name__}: {error}")
    if not math.isfinite(number):
        return failed(f"the reward is {number}: return a finite number, or raise")
    wild = sorted(name for name, part in numbers.items() if not math.isfinite(part))
    if wild:
        return failed(f"part {wild[0]!r} of the reward is {numbers[wild[0]]}: return finite numbers, or raise")
    if len(numbers) > MAX_PARTS:
        return failed(f"the reward has {len(numbers)} parts: at most {MAX_PARTS}")
    return Reward(value=number, parts=numbers)


def countdown_reward() -> GuardedReward:
    """1.0 for an expression that uses each number once and equals the target exactly, else 0.0."""
    return GuardedReward("countdown@1", _judge_countdown)


def _number(value: Any) -> float:
    # float("1.0") is a number to Python; to us it is a function that forgot to convert, and "nan" is next.
    if isinstance(value, str | bytes):
        raise TypeError(f"{value[:40]!r} is text")
    return float(value)


def _judge_countdown(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
    missing = {"numbers", "target"} - set(request.reference)
    if missing:
        raise KeyError(f"the request of {request.prompt_id} has no reference {sorted(missing)[0]!r}")
    if completion.text is None:
        raise ValueError("the completion has no text: the engine must decode for this reward")
    numbers = [int(number) for number in request.reference["numbers"].split(",")]
    right = judge(completion.text, numbers, int(request.reference["target"]))
    return float(right), {"well_formed": float(parse(completion.text) is not None)}
