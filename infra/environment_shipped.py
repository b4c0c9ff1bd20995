"""Environments that come with the project: a calculator beside Countdown, and guess the number.

Each is small enough to be read as an example, and speaks only characters that the tiny model has.
"""

from __future__ import annotations

import random

from infra.countdown import judge, parse
from infra.environment import Start, Turn
from schemas.errors import ConfigError

BEGUN = 0.1
"""what an episode of guesses is worth that never hits"""


class Calculator:
    """Countdown with a tool: every turn is an expression, the answer is its value, and one may try again.

    Ends with an expression that uses each number once and reaches the target (reward 1, less `discount` for each
    turn before it). What cannot be read is answered with nothing but the prompt's colon.
    """

    def __init__(self, discount: float = 0.0) -> None:
        if not 0.0 <= discount < 1.0:
            raise ConfigError(f"environment calculator: discount = {discount}: from 0 to below 1")
        self._discount = discount
        self._turns = 0
        self._numbers: list[int] = []
        self._target = 0

    def reset(self, start: Start) -> None:
        """Numbers and target stand in the prompt; they come with the request as references."""
        reference = start.request.reference
        missing = {"numbers", "target"} - set(reference)
        if missing:
            raise KeyError(f"the request of {start.request.prompt_id} has no reference {sorted(missing)[0]!r}")
        self._numbers = [int(number) for number in reference["numbers"].split(",")]
        self._target = int(reference["target"])

    def step(self, text: str) -> Turn:
        """The value of the expression, as `=value:`."""
        self._turns += 1
        parsed = parse(text)
        right = judge(text, self._numbers, self._target)
        parts = {"right": float(right), "well_formed": float(parsed is not None)}
        if right:
            return Turn(done=True, reward=max(0.0, 1.0 - self._discount * (self._turns - 1)), parts=parts)
        return Turn(observation=":" if parsed is None else f"={parsed.value}:", parts=parts)


class Guess:
    """Guess a number from 1 to `highest`: every turn is a guess, answered with + (it is more) or - (it is less).

    The number is the same for all members of a group. An episode is worth 1 with a hit, 0.1 without one when it
    began with a number at all (so that there is something to learn before the first hit), else 0. Anything that is no
    number ends it.
    """

    def __init__(self, highest: int = 9) -> None:
        if highest < 2:
            raise ConfigError(f"environment guess: highest = {highest}: at least 2")
        self._highest = highest
        self._secret = 0
        self._guesses = 0

    def reset(self, start: Start) -> None:
        """Draw the number."""
        self._secret = random.Random(start.group_seed).randint(1, self._highest)

    def step(self, text: str) -> Turn:
        """More, less, or right."""
        if not (text.isascii() and text.isdigit() and len(text) <= 9):
            return Turn(done=True, parts={"hit": 0.0, "well_formed": 0.0})
        self._guesses += 1
        begun, guess = (BEGUN if self._guesses == 1 else 0.0), int(text)
        if guess == self._secret:
            earlier = BEGUN if self._guesses > 1 else 0.0
            return Turn(done=True, reward=1.0 - earlier, parts={"hit": 1.0, "well_formed": 1.0})
        said = "+" if guess < self._secret else "-"
        return Turn(observation=said, reward=begun, parts={"hit": 0.0, "well_formed": 1.0})
