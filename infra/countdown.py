"""The demo task: reach a target from given numbers with + - *. Problems, prompt text, and the exact reward.

Owns the problem set (125 pair problems, 25 of them held out of training, and 6 four-number problems that
reach 24) and the judge of an answer. Values are exact fractions; nothing is ever evaluated as code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

DIGITS = "0123456789"
OPERATORS = "+-*/"
SYMBOLS = DIGITS + OPERATORS + "()" + ",=:"
"""every character a prompt or an answer may hold"""

PAIRS = "pairs"
FOUR = "four"

MAX_EXPRESSION_CHARS = 200
MAX_NESTING = 20
"""both bound the parser's recursion and the size of its numbers, whatever a model writes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Use each number exactly once to reach the target."""

    prompt_id: str
    task: str
    """pairs | four"""
    numbers: tuple[int, ...]
    target: int
    held_out: bool
    """never trained on, neither in the warm start nor by the prompt source"""

    @property
    def prompt(self) -> str:
        """The text the model is given.

        >>> Problem(prompt_id="x", task="pairs", numbers=(3, 4), target=12, held_out=False).prompt
        '3,4=12:'
        """
        return f"{','.join(map(str, self.numbers))}={self.target}:"

    @property
    def reference(self) -> dict[str, str]:
        """What the reward function needs."""
        return {"numbers": ",".join(map(str, self.numbers)), "target": str(self.target)}


@functools.cache
def problems() -> tuple[Problem, ...]:
    """Every problem, in a fixed order: pairs first."""
    return (*_pair_problems(), *_four_problems())


def solutions(problem: Problem) -> tuple[str, ...]:
    """Every answer without parentheses or division that is right, sorted."""
    found = {text for text in _flat_expressions(problem.numbers) if judge(text, problem.numbers, problem.target)}
    return tuple(sorted(found))


def judge(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether `text` is a well-formed expression that uses each number exactly once and equals the target.

    Never raises. + - * / and parentheses are understood; anything else is simply wrong.

    >>> judge("(1+3)*6/1", [1, 1, 3, 6], 24), judge("4*6", [1, 4, 6], 24), judge("__import__", [1], 1)
    (True, False, False)
    """
    parsed = parse(text)
    return parsed is not None and sorted(parsed.numbers) == sorted(numbers) and parsed.value == target


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A well-formed expression: its exact value and the numbers as written."""

    value: Fraction
    numbers: tuple[int, ...]


def parse(text: str) -> Parsed | None:
    """Read an expression; None when it is not well formed or divides by zero. Never raises."""
    if len(text) > MAX_EXPRESSION_CHARS:
        return None
    parser = _Parser(text)
    try:
        value = parser.sum_of_terms(0)
        if parser.rest():
            return None
    except (_Malformed, ZeroDivisionError):
        return None
    return Parsed(value=value, numbers=tuple(parser.numbers))


class _Malformed(Exception):
    """Not an expression."""


class _Parser:
    """Recursive descent: sum := product (+|- product)*; product := atom (*|/ atom)*; atom := number | ( sum )."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.numbers: list[int] = []

    def rest(self) -> str:
        return self._text[self._at :]

    def sum_of_terms(self, depth: int) -> Fraction:
        value = self._product(depth)
        while (operator := self._take("+-")) is not None:
            term = self._product(depth)
            value = value + term if operator == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while (operator := self._take("*/")) is not None:
            factor = self._atom(depth)
            value = value * factor if operator == "*" else value / factor
        return value

    def _atom(self, depth: int) -> Fraction:
        if self._take("(") is not None:
            if depth >= MAX_NESTING:
                raise _Malformed
            value = self.sum_of_terms(depth + 1)
            if self._take(")") is None:
                raise _Malformed
            return value
        return Fraction(self._number())

    def _number(self) -> int:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in DIGITS:
            self._at += 1
        digits = self._text[start : self._at]
        if not digits or (len(digits) > 1 and digits[0] == "0"):
            raise _Malformed
        self.numbers.append(int(digits))
        return self.numbers[-1]

    def _take(self, wanted: str) -> str | None:
        if self._at < len(self._text) and self._text[self._at] in wanted:
            self._at += 1
            return self._text[self._at - 1]
        return None


HELD_OUT_EVERY = 5
"""every fifth pair problem: 25 of 125, spread over all numbers and operators"""


def _pair_problems() -> Iterator[Problem]:
    operations: tuple[Callable[[int, int], int], ...] = (lambda a, b: a + b, lambda a, b: a * b, lambda a, b: b - a)
    index = 0
    for a, b in itertools.combinations_with_replacement(range(1, 10), 2):
        for target in sorted({operation(a, b) for operation in operations}):
            if not 1 <= target <= 81:
                continue
            yield Problem(
                prompt_id=f"{PAIRS}-{a}-{b}-{target}",
                task=PAIRS,
                numbers=(a, b),
                target=target,
                held_out=index % HELD_OUT_EVERY == 2,
            )
            index += 1


def _four_problems() -> Iterator[Problem]:
    for numbers in itertools.combinations_with_replacement(range(1, 5), 4):
        if any(judge(text, numbers, 24) for text in _flat_expressions(numbers)):
            name = "-".join(map(str, numbers))
            yield Problem(prompt_id=f"{FOUR}-{name}-24", task=FOUR, numbers=numbers, target=24, held_out=False)


def _flat_expressions(numbers: Sequence[int]) -> Iterator[str]:
    for order in sorted(set(itertools.permutations(numbers))):
        for operators in itertools.product("+-*", repeat=len(numbers) - 1):
            tail = "".join(f"{operator}{number}" for operator, number in zip(operators, order[1:], strict=True))
            yield f"{order[0]}{tail}"
