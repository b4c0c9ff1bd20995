"""How an observation becomes tokens between two turns: text before it, the observation, text after it.

The three are tokenised apart from each other and from what was sampled: sampled tokens are never tokenised again, and
special tokens written in an observation are plain text, so that an environment (or what it quotes) cannot end a
message or begin one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from schemas.errors import ConfigError

PLACE = "{observation}"
# Text that no template holds and no tokenizer has a special token for.
_QUESTION, _ANSWER, _OBSERVATION = "<<QUESTION>>", "<<ANSWER>>", "<<OBSERVATION>>"


def observation_encoder(tokenizer: Any, template: str) -> Callable[[str], Sequence[int]]:
    """observation -> token ids. `template`: task.observation_template; empty: the tokenizer's chat template, or nothing
    around the observation where it has none. The encoder raises ValueError for text the tokenizer cannot say."""
    before, after = _around(tokenizer, template)
    before_ids, after_ids = _encode(tokenizer, before), _encode(tokenizer, after)

    def encode(observation: str) -> Sequence[int]:
        try:
            middle = list(tokenizer.encode(observation, add_special_tokens=False, split_special_tokens=True))
        # Tokenizers raise what they like for a character they do not know.
        except Exception as error:
            raise ValueError(
                f"the observation {observation[:60]!r} cannot be tokenised: {type(error).__name__}: {error}"
            ) from error
        return [*before_ids, *middle, *after_ids]

    return encode


def _around(tokenizer: Any, template: str) -> tuple[str, str]:
    if template:
        before, _, after = template.partition(PLACE)
        return before, after
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    return _chat_pieces(tokenizer)


def _chat_pieces(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts between an answer's stop token and the next answer, around a user's message."""
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _OBSERVATION},
    ]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    if text.count(_ANSWER) != 1 or text.count(_OBSERVATION) != 1 or text.find(_ANSWER) > text.find(_OBSERVATION):
        raise ConfigError(
            "the tokenizer's chat template does not show an answer and the next message once each, in order: write "
            "task.observation_template yourself, with {observation} in it"
        )
    between, _, after = text.partition(_ANSWER)[2].partition(_OBSERVATION)
    # The policy has sampled the token that ends its message; what stands before it in the template is not sampled.
    _, stop, rest = between.partition(str(tokenizer.eos_token))
    return (rest if stop else between), after


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
