"""A model directory from strangers is data: no code that lies in it is run, neither as Python nor out of a pickle."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from infra.model import load_policy
from schemas.errors import ConfigError, EnvironmentMissing
from tests.fakes.policy_rows import tiny_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a good one."""
    return Path(shutil.copytree(tiny_directory(), tmp_path / "model"))


@pytest.mark.parametrize("named", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_code_in_a_model_directory_is_not_run(directory: Path, tmp_path: Path, named: str) -> None:
    trace = tmp_path / "it-ran"
    (directory / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Evil: pass\n")
    where = "tokenizer_config.json" if named == "AutoTokenizer" else "config.json"
    path = directory / where
    content = json.loads(path.read_text()) if path.exists() else {}
    value = ["evil.Evil", None] if named == "AutoTokenizer" else "evil.Evil"
    content |= {"auto_map": {named: value}}
    if named == "AutoConfig":
        content |= {"model_type": "evil"}
    path.write_text(json.dumps(content))

    with contextlib.suppress(ConfigError):  # refused, or loaded by the library's own code
        load_policy(directory)

    assert not trace.exists()


class _Command:
    """What a pickle can be."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._trace),)


def test_weights_as_a_pickle_are_not_opened(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Command(trace)))

    with pytest.raises(EnvironmentMissing, match="model.safetensors"):
        load_policy(directory)

    assert not trace.exists()
    pickle.loads((directory / "pytorch_model.bin").read_bytes())
    assert trace.exists()
