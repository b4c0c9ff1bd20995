"""Reward functions: what a completion is worth.

A reward that cannot be computed is a failure with its cause, never a zero: the trainer drops and counts
the member, and the policy is not punished for a bug in the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from infra.countdown import judge, parse
from infra.ports import Completion, Reward
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest

Parts = Mapping[str, float]
Judge = Callable[[PromptRequest, Completion], tuple[float, Parts]]


class GuardedReward:
    """RewardFunction over a plain function that judges one completion and may raise."""

    def __init__(self, name: str, judge_one: Judge) -> None:
        base, at, version = name.partition("@")
        if not (base and at and version):
            raise ConfigError(
                f"reward function name {name!r}: write name@version, so that the log tells which one judged"
            )
        self.name = name
        self._judge_one = judge_one

    def score(self, request: PromptRequest, completions: Sequence[Completion]) -> Sequence[Reward]:
        """One Reward per completion, in order. Never raises."""
        return [self._guarded(request, completion) for completion in completions]

    def _guarded(self, request: PromptRequest, completion: Completion) -> Reward:
        if completion.finish_reason == "abort":
            return Reward(value=None, error="the completion was aborted")
        try:
            value, parts = self._judge_one(request, completion)
            value = float(value)
            parts = {name: float(part) for name, part in parts.items()}
        # User code may raise anything; this is the boundary where it becomes a recorded failure.
        except Exception as error:  # noqa: BLE001
            return Reward(value=None, error=f"{type(error).__name__}: {error}"[:500])
        if not math.isfinite(value):
            return Reward(value=None, error=f"the reward is {value}: return a finite number, or raise")
        return Reward(value=value, parts=parts)


def countdown_reward() -> GuardedReward:
    """1.0 for an expression that uses each number once and equals the target exactly, else 0.0."""
    return GuardedReward("countdown@1", _judge_countdown)


def _judge_countdown(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
    missing = {"numbers", "target"} - set(request.reference)
    if missing:
        raise KeyError(f"the request of {request.prompt_id} has no reference {sorted(missing)[0]!r}")
    if completion.text is None:
        raise ValueError("the completion has no text: the engine must decode for this reward")
    numbers = [int(number) for number in request.reference["numbers"].split(",")]
    right = judge(completion.text, numbers, int(request.reference["target"]))
    return float(right), {"well_formed": float(parse(completion.text) is not None)}
