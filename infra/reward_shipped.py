"""Rewards that come with the project, beside Countdown's: length, soft overlong, format, answers; and their sum.

Each is small enough to be read as an example. They judge tokens as sampled, or the decoded text.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from infra.ports import Completion, Reward, RewardFunction
from infra.rewards import GuardedReward, Parts, checked_name, failed
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)


def length_reward() -> GuardedReward:
    """minus the share of the allowed tokens that was used: -T / max_tokens, from -1 to 0."""

    def judge(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
        return -len(completion.token_ids) / request.sampling.max_tokens, {}

    return GuardedReward("length@1", judge)


def soft_overlong_reward(buffer_tokens: int) -> GuardedReward:
    """DAPO's soft overlong punishment: 0 up to L = max_tokens - buffer, then (L - T) / buffer, down to -1.

    Source: Yu et al. 2025, eq. 13. max_tokens cuts a completion, so T > max_tokens (-1 there) does not happen; a
    completion that was cut has T = max_tokens, and gets -1 by the same line.
    """
    if buffer_tokens < 1:
        raise ConfigError(f"reward soft-overlong: buffer_tokens = {buffer_tokens}: 1 or more")

    def judge(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
        if buffer_tokens > request.sampling.max_tokens:
            raise ValueError(f"buffer_tokens = {buffer_tokens} is above max_tokens = {request.sampling.max_tokens}")
        over = len(completion.token_ids) - (request.sampling.max_tokens - buffer_tokens)
        return -min(max(over / buffer_tokens, 0.0), 1.0), {}

    return GuardedReward("soft-overlong@1", judge)


def format_reward(pattern: str) -> GuardedReward:
    """1 when the whole text (blanks around it aside) matches the regular expression, else 0."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward format: pattern {pattern!r} is no regular expression: {error}") from error

    def judge(_: PromptRequest, completion: Completion) -> tuple[float, Parts]:
        return float(compiled.fullmatch(_text(completion).strip()) is not None), {}

    return GuardedReward("format@1", judge)


def exact_reward(column: str = "answer") -> GuardedReward:
    """1 when the text equals the reference answer, blanks around both aside, else 0."""

    def judge(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
        return float(_text(completion).strip() == _reference(request, column).strip()), {}

    return GuardedReward("exact@1", judge)


def number_reward(column: str = "answer") -> GuardedReward:
    """1 when the last number in the text equals the reference's, else 0. For answers in words around a number.

    What a minus sign is follows from what stands before it: "10-7" ends in 7, "= -7" in -7.
    """

    def judge(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
        expected = _last_number(_reference(request, column))
        if expected is None:
            raise ValueError(f"the reference of {request.prompt_id} holds no number")
        found = _last_number(_text(completion))
        return float(found == expected), {"has_number": float(found is not None)}

    return GuardedReward("number@1", judge)


def math_reward(column: str = "answer") -> GuardedReward:
    """1 when the text ends in an answer equal to the reference as mathematics (LaTeX or plain), else 0.

    By the library math-verify, an extra of this project. Its own time-outs are off: they would call an answer wrong
    that nobody judged; the limit of the reward process calls it a failed reward.
    """
    try:
        library = importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError("reward math needs the library math-verify: pip install 'driftlog[math]'") from error

    def judge(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
        reference = _reference(request, column)
        untimed: dict[str, Any] = {"parsing_timeout": None}
        expected = library.parse(f"${reference}$", **untimed) or library.parse(reference, **untimed)
        if all(isinstance(one, str) for one in expected):  # what it could not read, it hands back as text
            raise ValueError(f"the reference {reference[:60]!r} of {request.prompt_id} is no mathematics")
        found = library.parse(_text(completion), **untimed)
        right = library.verify(expected, found, timeout_seconds=None, raise_on_error=True)
        return float(right), {"has_answer": float(bool(found))}

    return GuardedReward("math@1", judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """One term of a sum."""

    label: str
    """the name under which its value is logged"""
    weight: float
    function: RewardFunction


class WeightedSum:
    """RewardFunction: sum of weight x value. Parts carry each raw value; one that fails makes the sum fail."""

    def __init__(self, terms: Sequence[Weighted]) -> None:
        self.terms = tuple(terms)
        self.name = checked_name(summed_name([(term.weight, term.function.name) for term in terms]))

    def score(self, request: PromptRequest, completions: Sequence[Completion]) -> Sequence[Reward]:
        """One Reward per completion, in order. Never raises."""
        found = [list(term.function.score(request, completions)) for term in self.terms]
        return [self._sum(rewards) for rewards in zip(*found, strict=True)]

    def _sum(self, rewards: Sequence[Reward]) -> Reward:
        total, parts = 0.0, dict[str, float]()
        for term, reward in zip(self.terms, rewards, strict=True):
            if reward.value is None:
                return failed(f"{term.label}: {reward.error}")
            total += term.weight * reward.value
            parts[term.label] = reward.value
            parts |= {f"{term.label}/{name}": value for name, value in reward.parts.items()}
        return Reward(value=total, parts=parts)


def summed_name(terms: Sequence[tuple[float, str]]) -> str:
    """Weights and names of a sum: what stands in the log as its name@version.

    >>> summed_name([(1.0, "exact@1"), (0.2, "format@1")])
    '1*exact@1+0.2*format@1'
    """
    return "+".join(f"{weight:g}*{name}" for weight, name in terms)


def _last_number(text: str) -> Decimal | None:
    """The last number of a text, thousands separators aside.

    >>> _last_number("23 + 1,200 = 1,223."), _last_number("none")
    (Decimal('1223'), None)
    """
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _reference(request: PromptRequest, column: str) -> str:
    if column not in request.reference:
        there = ", ".join(sorted(request.reference)) or "none"
        raise KeyError(f"the prompt {request.prompt_id} has no reference column {column!r} (there: {there})")
    return request.reference[column]


def _text(completion: Completion) -> str:
    if completion.text is None:
        raise ValueError("the completion has no text: it must be decoded for this reward")
    return completion.text
