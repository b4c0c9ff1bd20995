"""The prompt source: an endless shuffle that is a pure function of seed and cursor."""

from __future__ import annotations

import pytest

from infra.prompt_sources import ShuffledPrompts, countdown_prompts, countdown_source
from schemas.errors import ConfigError

ENCODE = lambda text: [ord(symbol) for symbol in text]  # noqa: E731


def test_every_epoch_holds_every_prompt_once_in_an_order_of_its_own() -> None:
    source = countdown_source(ENCODE, seed=3)
    size = len(source)
    epochs = [[source.at(epoch * size + place) for place in range(size)] for epoch in (0, 1)]

    for number, epoch in enumerate(epochs):
        assert sorted(prompt.index for prompt, _ in epoch) == list(range(len(source)))
        assert {of for _, of in epoch} == {number}
    assert [p.index for p, _ in epochs[0]] != [p.index for p, _ in epochs[1]]


def test_a_cursor_gives_the_same_prompt_whatever_was_asked_before() -> None:
    forward, backward = countdown_source(ENCODE, seed=3), countdown_source(ENCODE, seed=3)
    cursors = [0, 500, 3, 10_000, 130]

    expected = {cursor: forward.at(cursor)[0].index for cursor in cursors}

    assert expected == {cursor: backward.at(cursor)[0].index for cursor in reversed(cursors)}
    assert [countdown_source(ENCODE, seed=4).at(cursor)[0].index for cursor in cursors] != list(expected.values())


def test_held_out_problems_are_in_no_training_epoch() -> None:
    trained = {prompt.prompt_id for prompt in countdown_prompts(ENCODE)}
    held_out = {prompt.prompt_id for prompt in countdown_prompts(ENCODE, held_out=True)}

    assert len(held_out) == 25
    assert trained.isdisjoint(held_out)


def test_mixture_weights_repeat_a_task_under_indices_of_their_own() -> None:
    prompts = countdown_prompts(ENCODE, repeats={"pairs": 1, "four": 3})

    assert sum(prompt.task == "four" for prompt in prompts) == 18
    assert [prompt.index for prompt in prompts] == list(range(118))
    assert ShuffledPrompts(prompts, 0).by_index(117) == prompts[117]


def test_what_cannot_be_a_source_is_refused_by_name() -> None:
    prompts = countdown_prompts(ENCODE)
    with pytest.raises(ConfigError, match="empty"):
        ShuffledPrompts([], 0)
    with pytest.raises(ConfigError, match="indices must count"):
        ShuffledPrompts(prompts[1:], 0)
    with pytest.raises(ConfigError, match="no task 'fuor'"):
        countdown_prompts(ENCODE, repeats={"fuor": 1})
    with pytest.raises(ValueError, match="another prompt source"):
        ShuffledPrompts(prompts, 0).by_index(len(prompts))
    with pytest.raises(ValueError, match="negative"):
        ShuffledPrompts(prompts, 0).at(-1)


def test_prompt_tokens_are_read_only() -> None:
    prompt, _ = countdown_source(ENCODE, seed=0).at(0)

    with pytest.raises(ValueError, match="read-only"):
        prompt.token_ids[0] = 1
