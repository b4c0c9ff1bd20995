"""Prompt sources: a fixed list of prompts in an endless seeded shuffle.

`at(cursor)` is a pure function of (seed, cursor): a restart, a replay and an audit all see the same order,
on any machine and library version, because the shuffle is by sha256 and not by a random generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from infra.countdown import FOUR, PAIRS, Problem, problems
from infra.ports import Prompt
from schemas.errors import ConfigError

Encode = Callable[[str], Sequence[int]]

COUNTDOWN_REPEATS: Mapping[str, int] = {PAIRS: 1, FOUR: 4}
"""how often each task's problems stand in one epoch: the mixture weights of the demo"""


class ShuffledPrompts:
    """PromptSource over a list: every epoch holds every prompt once, in an order of its own."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ConfigError("the prompt source is empty: name a file or task with at least one prompt")
        if any(prompt.index != place for place, prompt in enumerate(prompts)):
            raise ConfigError(
                "prompt indices must count 0, 1, 2, ... in the order of the list: group ids are made of them"
            )
        self._prompts = tuple(prompts)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, cursor: int) -> tuple[Prompt, int]:
        """The prompt at this cursor, and its epoch."""
        if cursor < 0:
            raise ValueError(f"cursor {cursor} is negative")
        epoch, place = divmod(cursor, len(self._prompts))
        return self._prompts[self._order(epoch)[place]], epoch

    def by_index(self, index: int) -> Prompt:
        """The prompt with that index."""
        if not 0 <= index < len(self._prompts):
            raise ValueError(
                f"prompt index {index} is not in 0..{len(self._prompts) - 1}: another prompt source made it"
            )
        return self._prompts[index]

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = sorted(range(len(self._prompts)), key=lambda index: _shuffle_key(self._seed, epoch, index))
            # Requests straddle at most two epochs; more would only hold memory.
            self._orders = {known: self._orders[known] for known in self._orders if known == epoch - 1}
            self._orders[epoch] = order
        return order


def countdown_prompts(
    encode: Encode, *, held_out: bool = False, repeats: Mapping[str, int] = COUNTDOWN_REPEATS
) -> tuple[Prompt, ...]:
    """The trained (or the held-out) countdown problems; a problem repeated in the mixture has one index each time."""
    unknown = sorted(set(repeats) - {PAIRS, FOUR})
    if unknown:
        raise ConfigError(f"countdown has no task {unknown[0]!r}: use {PAIRS} and {FOUR}")
    chosen = [problem for problem in problems() if problem.held_out == held_out]
    entries = [problem for problem in chosen for _ in range(1 if held_out else repeats.get(problem.task, 0))]
    return tuple(_prompt(index, problem, encode) for index, problem in enumerate(entries))


def countdown_source(encode: Encode, seed: int, *, repeats: Mapping[str, int] = COUNTDOWN_REPEATS) -> ShuffledPrompts:
    """The training source of the demo; held-out pairs are not in it."""
    return ShuffledPrompts(countdown_prompts(encode, repeats=repeats), seed)


def _prompt(index: int, problem: Problem, encode: Encode) -> Prompt:
    token_ids = np.asarray(encode(problem.prompt), dtype=np.int32)
    token_ids.setflags(write=False)
    return Prompt(
        index=index,
        prompt_id=problem.prompt_id,
        task=problem.task,
        text=problem.prompt,
        token_ids=token_ids,
        reference=problem.reference,
    )


def _shuffle_key(seed: int, epoch: int, index: int) -> bytes:
    return hashlib.sha256(f"prompt-order/{seed}/{epoch}/{index}".encode()).digest()
