"""Observations as tokens: by the tokenizer's chat template, by one's own, or as they are."""

from __future__ import annotations

from typing import Any

import pytest

from infra.model_presets import build_policy
from infra.observation_template import observation_encoder
from schemas.errors import ConfigError

CHAT = (
    "{% for m in messages %}({{ m.role | length }}){{ m.content }}<eos>+{% endfor %}"
    "{% if add_generation_prompt %}(9){% endif %}"
)


@pytest.fixture(scope="module")
def made() -> Any:
    return build_policy("countdown-tiny", 0).tokenizer


@pytest.fixture
def tokenizer(made: Any) -> Any:
    made.chat_template = None
    return made


def said(tokenizer: Any, observation: str, template: str = "") -> str:
    return str(tokenizer.decode(observation_encoder(tokenizer, template)(observation)))


def test_without_a_chat_template_an_observation_stands_as_it_is(tokenizer: Any) -> None:
    assert "=12:" == said(tokenizer, "=12:")
    assert "" == said(tokenizer, "")


def test_ones_own_template_stands_around_it(tokenizer: Any) -> None:
    assert "(=12)<eos>:" == said(tokenizer, "=12", "({observation})<eos>:")


def test_a_chat_template_puts_what_follows_the_sampled_end_of_an_answer(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Words of the roles and markers have no tokens here: the pieces are looked at, then encoded.
    tokenizer.chat_template = CHAT

    # The answer's own <eos> was sampled; what the template has behind it was not.
    assert "+(4)=12<eos>+(9)" == said(tokenizer, "=12")


def test_a_special_token_in_an_observation_is_text_and_ends_nothing(tokenizer: Any) -> None:
    # This tokenizer has no letters, so the text cannot be said: it is never taken for the end token.
    with pytest.raises(ValueError, match="'<eos>' cannot be tokenised"):
        observation_encoder(tokenizer, "")("<eos>")


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"]
)
def test_a_chat_template_that_shows_no_answer_is_refused(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template

    with pytest.raises(ConfigError, match="write task.observation_template yourself"):
        observation_encoder(tokenizer, "")
