"""driftlog init writes a configuration that runs, or says what is wrong and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftlog.__main__ import main
from infra.config import load_config
from tests.fakes.policy_rows import tiny_directory

GOOD = '{"prompt": "1,2=3:", "answer": "1+2"}\n{"prompt": "1,3=4:", "answer": "1+3"}\n'


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(GOOD)
    return path


def init(folder: Path, prompts: Path, *more: str, model: str = "", reward: str = "exact") -> tuple[int, Path]:
    out = folder / "my.toml"
    words = ["init", "--model", model or str(tiny_directory()), "--prompts", str(prompts), "--reward", reward]
    return main([*words, "--out", str(out), "--run", "mine", *more]), out


def test_what_is_written_is_a_configuration_of_what_was_given(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = init(tmp_path, prompts, "--json")

    config = load_config(out)
    assert 0 == code
    assert ("mine", str(tiny_directory()), 58) == (config.run.name, config.model.init, config.task.max_tokens)
    assert ("prompts", str(prompts), "exact") == (config.task.kind, config.task.prompts, config.task.reward)
    said = capsys.readouterr()
    assert f"  driftlog up --config {out}" in said.err.splitlines()
    found = json.loads(said.out)
    assert (2, 6, 1.0, "exact@1") == (
        found["prompts"], found["longest_prompt_tokens"], found["example_reward"], found["reward_function"],
    )  # fmt: skip


def test_the_comment_on_several_rewards_can_be_taken_as_it_stands(tmp_path: Path, prompts: Path) -> None:
    _, out = init(tmp_path, prompts)
    text = out.read_text()
    start = text.index("# rewards = [")
    block = text[start : text.index("# ]\n") + 4]
    plain = "".join(line.removeprefix("# ") for line in block.splitlines(keepends=True))

    out.write_text(text.replace(block, plain).replace('reward = "exact"\n', "", 1))

    assert ["exact", "soft-overlong"] == [entry.name for entry in load_config(out).task.rewards]


@pytest.mark.parametrize(
    ("text", "reward", "more", "words"),
    [
        ('{"prompt": "1,2"\n', "exact", (), "prompts.jsonl:1: broken line"),
        ('{"prompt": "abc", "answer": "1"}\n', "exact", (), "cannot be encoded by the model's tokenizer"),
        (GOOD, "nothing", (), "use one of countdown"),
        (GOOD, "no.such:f", (), "no.such cannot be imported: ModuleNotFoundError"),
        (GOOD, "countdown", (), "fails on an example (prompt row-0"),
        (GOOD, "exact", ("--max-tokens", "60"), "the longest prompt has 6 tokens and the model allows 64: at most 58"),
        ('{"prompt": "' + "1" * 64 + '"}\n', "exact", (), "are more than the 64 the model allows"),
        ('{"messages": [{"role": "user", "content": "1"}]}\n', "exact", (), "no chat template"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, prompts: Path, text: str, reward: str, more: tuple[str, ...], words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prompts.write_text(text)

    code, out = init(tmp_path, prompts, *more, reward=reward)

    assert 2 == code
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_tokenizer_that_is_not_the_models_is_refused(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_directory().iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 4}))

    code, _ = init(tmp_path, prompts, model=str(model))

    assert 2 == code
    assert "tokens and the model only 4" in capsys.readouterr().err


def test_a_file_that_is_there_is_not_written_over(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.toml").write_text("mine")

    code, out = init(tmp_path, prompts)

    assert 2 == code
    assert "mine" == out.read_text()
    assert "exists already" in capsys.readouterr().err
