"""Prompts of one's own: rows of a file become token ids of a model, with what the reward needs.

Guarantees: every prompt can be fed to the model and leaves room for task.max_tokens; indices count 0, 1, 2, ... in
the order of the file, a task that stands k times in the mixture k times in a row. Everything is checked before a run
begins; an error names file and row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from infra.config_task import TaskSection
from infra.ports import Prompt
from infra.prompt_files import Row
from schemas.errors import ConfigError

PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids")
MAX_ID_CHARS = 512
"""as the records of the log allow"""
DEFAULT_TASK = "prompts"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a prompt must fit."""

    vocabulary_size: int
    """rows of the embedding"""
    context_tokens: int | None
    """longest sequence; None: the model states none"""
    encode: Callable[[str], Sequence[int]]
    encode_chat: Callable[[Sequence[Mapping[str, Any]]], tuple[str, Sequence[int]]] | None
    """messages -> text and token ids by the chat template; None: the tokenizer has none"""


def own_prompts(rows: Iterable[Row], task: TaskSection, model: ModelLimits) -> tuple[Prompt, ...]:
    """All prompts of the training source. ConfigError for the first row that cannot be used."""
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    tasks: set[str] = set()
    for number, row in enumerate(rows):
        prompt = _prompt(row, number, len(prompts), task, model)
        if prompt.prompt_id in seen:
            raise ConfigError(f"{row.where}: id {prompt.prompt_id!r} stands in {seen[prompt.prompt_id]} already")
        if row.values.get("id") is not None:
            seen[prompt.prompt_id] = row.where
        tasks.add(prompt.task)
        prompts += _copies(prompt, task.mixture.get(prompt.task, 1))
    unknown = sorted(set(task.mixture) - tasks)
    if unknown:
        raise ConfigError(f"task.mixture: no prompt is of task {unknown[0]!r} (there: {', '.join(sorted(tasks))})")
    if not prompts:
        raise ConfigError("task.mixture leaves no prompt: give one of its tasks a number above 0")
    return tuple(prompts)


def check_rows(rows: Iterable[Row], task: TaskSection) -> None:
    """What can be said of rows without a model: each has a prompt, and the columns that are asked for."""
    for row in rows:
        column = _column(row, task)
        if not isinstance(row.values[column], str | list):
            raise _no_prompt(row, column)
        _name(row, "id", "")
        _name(row, "task", DEFAULT_TASK)
        _reference(row, column, task)


def model_limits(tokenizer: Any, *, vocabulary_size: int, context_tokens: int | None) -> ModelLimits:
    """From a Hugging Face tokenizer and the model's numbers. ConfigError where they are no pair."""
    if len(tokenizer) > vocabulary_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {vocabulary_size}: they are of different "
            "models, or the model's embedding was not resized; put the right tokenizer files into the model directory"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer names no end token (eos_token): answers would never end; add it to its config")

    def encode(text: str) -> Sequence[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(messages: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[int]]:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return text, encode(text)

    return ModelLimits(
        vocabulary_size=vocabulary_size,
        context_tokens=context_tokens,
        encode=encode,
        encode_chat=encode_chat if getattr(tokenizer, "chat_template", None) else None,
    )


def _prompt(row: Row, number: int, index: int, task: TaskSection, model: ModelLimits) -> Prompt:
    column = _column(row, task)
    text, ids = _tokens(row, column, model)
    _check_fits(row, ids, task, model)
    token_ids = np.asarray(ids, dtype=np.int32)
    token_ids.setflags(write=False)
    return Prompt(
        index=index,
        prompt_id=_name(row, "id", f"row-{number}"),
        task=_name(row, "task", DEFAULT_TASK),
        text=text,
        token_ids=token_ids,
        reference=_reference(row, column, task),
    )


def _copies(prompt: Prompt, count: int) -> Iterator[Prompt]:
    for offset in range(count):
        yield Prompt(
            index=prompt.index + offset,
            prompt_id=prompt.prompt_id,
            task=prompt.task,
            text=prompt.text,
            token_ids=prompt.token_ids,
            reference=prompt.reference,
        )


def _column(row: Row, task: TaskSection) -> str:
    wanted = (task.prompt_column,) if task.prompt_column else PROMPT_COLUMNS
    for name in wanted:
        if row.values.get(name) is not None:
            return name
    there = ", ".join(map(repr, row.values)) or "none"
    raise ConfigError(
        f"{row.where}: no column {' or '.join(map(repr, wanted))} (there: {there}): name the one that holds the prompt "
        "with task.prompt_column"
    )


def _tokens(row: Row, column: str, model: ModelLimits) -> tuple[str | None, Sequence[int]]:
    """Text (where there is one) and token ids; the value's type says what it is."""
    value = row.values[column]
    if isinstance(value, str):
        return value, _encoded(row, column, lambda: model.encode(value))
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        chat = model.encode_chat
        if chat is None:
            raise ConfigError(
                f"{row.where}: column {column!r} holds chat messages, and the tokenizer has no chat template: add "
                "chat_template.jinja to the model directory, or give the prompt as text"
            )
        return _encoded(row, column, lambda: chat(value))
    if isinstance(value, list) and all(type(token) is int for token in value):
        return None, value
    raise _no_prompt(row, column)


def _no_prompt(row: Row, column: str) -> ConfigError:
    return ConfigError(
        f"{row.where}: column {column!r} is neither text, nor a list of chat messages, nor a list of token ids"
    )


def _encoded(row: Row, column: str, encode: Callable[[], T]) -> T:
    try:
        return encode()
    # Tokenizers and chat templates raise whatever they like; here it becomes a message that names the row.
    except Exception as error:
        raise ConfigError(
            f"{row.where}: column {column!r} cannot be encoded by the model's tokenizer: {type(error).__name__}: "
            f"{error}"
        ) from error


def _check_fits(row: Row, ids: Sequence[int], task: TaskSection, model: ModelLimits) -> None:
    if len(ids) == 0:
        raise ConfigError(f"{row.where}: the prompt has no token: remove the row")
    if min(ids) < 0 or max(ids) >= model.vocabulary_size:
        bad = next(token for token in ids if not 0 <= token < model.vocabulary_size)
        raise ConfigError(
            f"{row.where}: token id {bad} is outside the model's vocabulary (0 to {model.vocabulary_size - 1}): the "
            "ids were made by another tokenizer"
        )
    if model.context_tokens is not None and len(ids) + task.max_tokens > model.context_tokens:
        raise ConfigError(
            f"{row.where}: {len(ids)} prompt tokens + task.max_tokens = {task.max_tokens} are more than the "
            f"{model.context_tokens} the model allows: shorten or remove the row, or lower task.max_tokens"
        )


def _name(row: Row, column: str, default: str) -> str:
    value = row.values.get(column)
    if value is None:
        return default
    text = str(value)
    if isinstance(value, list | dict | float) or not 0 < len(text) <= MAX_ID_CHARS:
        raise ConfigError(f"{row.where}: column {column!r} is a name of 1 to {MAX_ID_CHARS} characters, or left out")
    return text


def _reference(row: Row, column: str, task: TaskSection) -> dict[str, str]:
    """The columns the reward gets, as text; what is empty is left out."""
    names = task.reference_columns
    if names is None:
        # The other forms of the prompt are no answers.
        names = [name for name in row.values if name not in (column, "id", "task", *PROMPT_COLUMNS)]
    missing = [name for name in names if name not in row.values]
    if missing:
        raise ConfigError(f"{row.where}: no column {missing[0]!r}, which task.reference_columns names")
    return {name: _text(row.values[name]) for name in names if row.values[name] is not None}


def _text(value: Any) -> str:
    """Text as it is, anything else as JSON would write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
