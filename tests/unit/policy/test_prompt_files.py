"""Prompts of one's own: what is read, in which order, and how a file that cannot be used says so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.config_task import TaskSection
from infra.prompt_files import prompt_rows, prompts_sha256
from infra.prompt_rows import ModelLimits, check_rows, model_limits, own_prompts
from infra.prompt_sources import ShuffledPrompts
from schemas.errors import ConfigError


def encode(text: str) -> Sequence[int]:
    if "?" in text:
        raise ValueError("no such symbol")
    return [ord(symbol) - 32 for symbol in text]


def encode_chat(messages: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[int]]:
    text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
    return text, encode(text)


LIMITS = ModelLimits(vocabulary_size=96, context_tokens=40, encode=encode, encode_chat=encode_chat)


def task(path: Path, **settings: Any) -> TaskSection:
    return TaskSection(kind="prompts", prompts=str(path), max_tokens=8, **settings)


def written(folder: Path, *rows: object, name: str = "own.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, limits: ModelLimits = LIMITS, **settings: Any) -> Any:
    section = task(path, **settings)
    return own_prompts(prompt_rows(path), section, limits)


def test_text_chat_messages_and_token_ids_become_prompts(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"prompt": "1+1", "answer": "2", "id": "first", "task": "sums"},
        {"messages": [{"role": "user", "content": "hi"}], "level": 3, "hard": True, "note": None},
        {"prompt_token_ids": [5, 6], "metadata": {"from": "x"}},
        {"prompt": [{"role": "user", "content": "a"}]},
    )

    first, second, third, fourth = read(path)

    assert ("1+1", [17, 11, 17], "first", "sums") == (
        first.text, first.token_ids.tolist(), first.prompt_id, first.task,
    )  # fmt: skip
    assert {"answer": "2"} == first.reference
    assert ("[user]hi", "row-1", "prompts") == (second.text, second.prompt_id, second.task)
    assert {"level": "3", "hard": "true"} == second.reference
    assert (None, [5, 6]) == (third.text, third.token_ids.tolist())
    assert {"metadata": '{"from": "x"}'} == third.reference
    assert "[user]a" == fourth.text
    assert [0, 1, 2, 3] == [prompt.index for prompt in read(path)]


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "1+1", "answer": "2", "chain": "long"})

    (found,) = read(path, prompt_column="question", reference_columns=["answer"])

    assert ("1+1", {"answer": "2"}) == (found.text, found.reference)


def test_every_form_of_a_table_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1", "answer": number} for number in range(7)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "one.parquet", row_group_size=2)
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    (hub / "data").mkdir(parents=True)
    pq.write_table(table.slice(0, 3), hub / "data" / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(3), hub / "data" / "train-00001-of-00002.parquet")
    saved.mkdir()
    for number, part in enumerate((table.slice(0, 3), table.slice(3))):
        with pa.OSFile(str(saved / f"data-{number:05}-of-00002.arrow"), "wb") as sink:
            new = pa.ipc.new_stream if number == 0 else pa.ipc.new_file
            with new(sink, table.schema) as writer:
                writer.write_table(part)
    names = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": names}))
    (saved / "cache-0.arrow").write_bytes(b"not one of them")

    lines = [(p.text, p.prompt_id, p.reference) for p in read(written(tmp_path, *rows))]

    for path in (tmp_path / "one.parquet", hub, saved):
        assert lines == [(p.text, p.prompt_id, p.reference) for p in read(path)]


def test_mixture_weights_repeat_a_task_in_every_epoch(tmp_path: Path) -> None:
    path = written(tmp_path, *({"prompt": str(n), "task": t} for n, t in enumerate("aabc")))

    prompts = read(path, mixture={"b": 3, "c": 0})

    assert ["0", "1", "2", "2", "2"] == [prompt.text for prompt in prompts]
    source = ShuffledPrompts(prompts, 0)
    assert ["0", "1", "2", "2", "2"] == sorted(str(source.at(cursor)[0].text) for cursor in range(5))
    with pytest.raises(ConfigError, match=r"no prompt is of task 'd' \(there: a, b, c\)"):
        read(path, mixture={"d": 1})
    with pytest.raises(ConfigError, match="leaves no prompt"):
        read(path, mixture={"a": 0, "b": 0, "c": 0})


def test_the_digest_is_of_the_bytes_and_not_of_the_place(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "1"})
    moved = written(tmp_path, {"prompt": "1"}, name="moved.jsonl")

    assert prompts_sha256(path) == prompts_sha256(moved)
    path.write_text(path.read_text() + "\n")
    assert prompts_sha256(path) != prompts_sha256(moved)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "1"}\n{"prompt"\n', r"own.jsonl:2: broken line, not JSON"),
        ('{"prompt": "1"}\n[1]\n', r"own.jsonl:2: a line holds one JSON object .* this one a list"),
        ('{"prompt": "\xff"}\n', r"own.jsonl:1: broken line"),
        ("", r"own.jsonl holds no prompt: it is empty"),
        ("\n\n", r"own.jsonl holds no prompt: it is empty"),
        ('{"question": "1"}\n', r"own.jsonl:1: no column 'prompt' or .*\(there: 'question'\).*task.prompt_column"),
        ('{"prompt": 3}\n', r"own.jsonl:1: column 'prompt' is neither text"),
        ('{"prompt": ""}\n', r"own.jsonl:1: the prompt has no token"),
        ('{"prompt": "1?"}\n', r"own.jsonl:1: column 'prompt' cannot be encoded .*ValueError: no such symbol"),
        ('{"prompt_token_ids": [1, 96]}\n', r"own.jsonl:1: token id 96 is outside the model's vocabulary \(0 to 95\)"),
        (f'{{"prompt": "{"1" * 33}"}}\n', r"own.jsonl:1: 33 prompt tokens \+ task.max_tokens = 8 are more than the 40"),
        ('{"prompt": "1", "id": "a"}\n{"prompt": "2", "id": "a"}\n', r"own.jsonl:2: id 'a' stands in .*own.jsonl:1"),
        ('{"prompt": "1", "task": ""}\n', r"own.jsonl:1: column 'task' is a name of 1 to 512 characters"),
    ],
)
def test_a_file_that_cannot_be_used_names_file_row_and_cause(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=words):
        read(path)


def test_a_missing_reference_column_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "1"})

    with pytest.raises(ConfigError, match="no column 'answer', which task.reference_columns names"):
        read(path, reference_columns=["answer"])


def test_chat_messages_need_a_chat_template(tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    plain = ModelLimits(vocabulary_size=96, context_tokens=40, encode=encode, encode_chat=None)

    with pytest.raises(ConfigError, match="has no chat template: add chat_template.jinja"):
        read(path, plain)


def test_rows_are_checked_without_a_model(tmp_path: Path) -> None:
    good, bad = written(tmp_path, {"prompt": "1?"}), written(tmp_path, {"prompt": 1}, name="bad.jsonl")

    check_rows(prompt_rows(good), task(good))
    with pytest.raises(ConfigError, match="bad.jsonl:1: column 'prompt' is neither text"):
        check_rows(prompt_rows(bad), task(bad))


def _torn(folder: Path) -> Path:
    (folder / "a.parquet").write_bytes(b"PAR1")
    return folder / "a.parquet"


def _splits(folder: Path) -> Path:
    for split in ("test", "train"):
        pq.write_table(pa.table({"prompt": ["1"]}), folder / f"{split}-00000-of-00001.parquet")
    return folder


def _dict(folder: Path) -> Path:
    (folder / "train").mkdir()
    (folder / "dataset_dict.json").write_text("{}")
    return folder


def _indices(folder: Path) -> Path:
    (folder / "state.json").write_text('{"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}')
    return folder


def _outside(folder: Path) -> Path:
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../a.arrow"}]}')
    return folder


def _suffix(folder: Path) -> Path:
    (folder / "a.csv").write_text("prompt\n1\n")
    return folder / "a.csv"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none.jsonl", "no file or folder"),
        (_suffix, "prompts are read from .jsonl"),
        (_torn, "a.parquet cannot be read after row 0"),
        (lambda folder: folder, "holds no .parquet or .arrow file"),
        (_splits, r"holds several splits \(test, train\)"),
        (_dict, r"holds several splits: name one of its folders \(train\)"),
        (_indices, r"flatten_indices\(\)"),
        (_outside, "names '../a.arrow', which is not a file of that folder"),
    ],
)
def test_a_path_that_cannot_be_used_says_what_to_name(tmp_path: Path, make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(prompt_rows(make(tmp_path)))


class TinyTokenizer:
    """As much of a tokenizer as is looked at."""

    chat_template = None

    def __init__(self, size: int, eos_token_id: int | None = 0) -> None:
        self._size, self.eos_token_id = size, eos_token_id

    def __len__(self) -> int:
        return self._size


def test_a_tokenizer_of_another_model_is_refused() -> None:
    assert model_limits(TinyTokenizer(5), vocabulary_size=8, context_tokens=None).encode_chat is None
    with pytest.raises(ConfigError, match="tokenizer has 9 tokens and the model only 8"):
        model_limits(TinyTokenizer(9), vocabulary_size=8, context_tokens=None)
    with pytest.raises(ConfigError, match="names no end token"):
        model_limits(TinyTokenizer(5, None), vocabulary_size=8, context_tokens=None)
