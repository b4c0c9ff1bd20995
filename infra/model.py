"""The door to transformers: building, loading, saving and swapping causal language models.

Guarantees: nothing is fetched from the network; a weight file is checked in full (names, shapes, numbers of
a floating type) before one tensor of a model is touched; only safetensors are read or written.
Generation defaults that a model directory brings along are never read.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from schemas.checkpoint import WEIGHTS_NAME
from schemas.errors import CheckpointInvalid, ConfigError, EnvironmentMissing

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
LOCAL_ONLY = {"local_files_only": True, "trust_remote_code": False}
"""For every from_pretrained: nothing is fetched, and code in a model directory is refused, not asked about."""
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE_NAME,
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

EAGER_ATTENTION_MAX_HIDDEN = 128
"""below it plain matrix products beat the fused kernel on a CPU (63 against 81 ms a step of the demo)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A causal language model with its tokenizer. The weights change; everything else is fixed for a run."""

    model: Any
    """a transformers PreTrainedModel in eval mode"""
    tokenizer: Any
    static_files: Mapping[str, bytes]
    """config and tokenizer files, byte for byte, copied into every checkpoint"""
    tokenizer_digest: str
    """sha256 over the tokenizer files and the chat template"""

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding: ids at or above it cannot be fed to the model."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode_all(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts of many token sequences; special tokens are left out."""
        return list(self.tokenizer.batch_decode(sequences, skip_special_tokens=True))


@functools.cache
def transformers_module() -> Any:
    """Import transformers once: offline, and without the garbage collector walking it (half of its cost)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    was_on = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module("transformers")
        for name in ("AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast", "DynamicCache"):
            getattr(module, name)
    finally:
        if was_on:
            gc.enable()
    module.utils.logging.disable_progress_bar()
    gc.freeze()
    return module


def load_policy(directory: Path, dtype: str = "float32", device: str = "cpu") -> Policy:
    """Load a model directory (config.json, tokenizer.json, safetensors). Names the file that is missing or wrong."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    static_files = _static_files(directory)
    try:
        weight_files(directory)
    except CheckpointInvalid as error:
        raise EnvironmentMissing(f"model directory: {error}") from error
    transformers = transformers_module()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **LOCAL_ONLY)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=DTYPES[dtype],
            **LOCAL_ONLY,
            use_safetensors=True,
            attn_implementation=attention_for(config),
            output_loading_info=True,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **LOCAL_ONLY)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model directory {directory} cannot be loaded: {error}") from error
    # transformers only warns here, and would train on with random numbers in that place.
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            raise ConfigError(
                f"model directory {directory}: {problem.replace('_', ' ')}: {sorted(map(str, report[problem]))[0]}"
            )
    return make_policy(model.to(device), tokenizer, static_files)


def load_skeleton(directory: Path) -> Policy:
    """A policy without numbers (meta device): names and shapes of its tensors, and its tokenizer. For engines that
    keep the weights elsewhere. UsageError names what is missing or wrong."""
    static_files = _static_files(directory)
    transformers = transformers_module()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **LOCAL_ONLY)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **LOCAL_ONLY)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model directory {directory} cannot be read: {error}") from error
    return make_policy(model, tokenizer, static_files)


def make_policy(model: Any, tokenizer: Any, static_files: Mapping[str, bytes]) -> Policy:
    """Put the parts together; dropout is off for good, in scoring and in training."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return Policy(
        model=model.eval(),
        tokenizer=tokenizer,
        static_files=dict(static_files),
        tokenizer_digest=tokenizer_digest(static_files),
    )


def attention_for(config: Any) -> str:
    """One rule for trainer and engine, so that both compute the same sums."""
    return "eager" if getattr(config, "hidden_size", 1 << 30) <= EAGER_ATTENTION_MAX_HIDDEN else "sdpa"


def tokenizer_digest(static_files: Mapping[str, bytes]) -> str:
    """sha256 hex over names and contents of the tokenizer files, the chat template among them."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if name in static_files:
            digest.update(f"{name}\0{len(static_files[name])}\0".encode() + static_files[name])
    return digest.hexdigest()


# ---------------------------------------------------------------- weights


def unique_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; of tied tensors only the first name."""
    seen: set[int] = set()
    unique: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor
    return unique


def tied_groups(model: Any) -> tuple[tuple[str, ...], ...]:
    """Names that share one tensor; only the first of each group is in a weight file."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def dtype_groups(model: Any) -> dict[str, str]:
    """First part of the tensor names -> dtype ("mixed" where they differ)."""
    groups: dict[str, set[str]] = {}
    for name, tensor in unique_tensors(model).items():
        groups.setdefault(name.partition(".")[0], set()).add(str(tensor.dtype).removeprefix("torch."))
    return {group: dtypes.pop() if len(dtypes) == 1 else "mixed" for group, dtypes in sorted(groups.items())}


def read_weights(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Map the weight files of a directory and check them against the model; touches nothing of the model.

    Raises CheckpointInvalid naming the tensor that is missing, unknown, or of another shape or kind.
    """
    expected = unique_tensors(model)
    aliases = {alias: group[0] for group in tied_groups(model) for alias in group[1:]}
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if name in found:
                        raise CheckpointInvalid(f"{path}: tensor {name} is in two weight files")
                    found[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointInvalid(f"{path} is not a complete safetensors file: {error}") from error
    for alias in sorted(set(found) & set(aliases)):
        # Files of other tools may carry a tied tensor twice; two different ones would be two models.
        copy = found.pop(alias)
        if aliases[alias] not in found or not torch.equal(copy, found[aliases[alias]]):
            raise CheckpointInvalid(f"{directory}: {alias} is tied to {aliases[alias]} and differs from it in the file")
    _check_names_and_shapes(expected, found, directory)
    return found


def check_static_files(policy: Policy, directory: Path) -> None:
    """CheckpointInvalid unless config and tokenizer of the directory are the policy's own, byte for byte."""
    for name, content in policy.static_files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointInvalid(f"{directory} has no {name}")
        if path.read_bytes() != content:
            raise CheckpointInvalid(
                f"{path} differs from that of the loaded model: it belongs to another model or tokenizer"
            )


def apply_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy checked tensors (`read_weights`) into the model's own storage; tied names follow by themselves."""
    targets = unique_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


def load_weights_in_place(model: Any, directory: Path) -> None:
    """Read, check, then replace the weights of a model. CheckpointInvalid before anything was touched."""
    apply_weights(model, read_weights(model, directory))


def save_weights(policy: Policy, directory: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write model.safetensors and the static files into an existing directory (not fsynced: the store does that).

    `tensors`: whole tensors to write in the place of the model's own, which may be one rank's shards."""
    if tensors is None:
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in unique_tensors(policy.model).items()}
    save_file(dict(tensors), directory / WEIGHTS_NAME, metadata={"format": "pt"})
    for name, content in policy.static_files.items():
        (directory / name).write_bytes(content)


@functools.cache
def library_versions() -> Mapping[str, str]:
    """What besides the weights decides the bits of a training step. Read once: a look-up costs a millisecond."""
    names = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return MappingProxyType({name: importlib.metadata.version(name) for name in names})


def _check_names_and_shapes(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], directory: Path
) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        raise CheckpointInvalid(
            f"{directory}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} in all)"
        )
    if unknown:
        raise CheckpointInvalid(f"{directory}: tensor {unknown[0]} is not part of this model ({len(unknown)} unknown)")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointInvalid(
                f"{directory}: tensor {name} has shape {list(tensor.shape)}, the model {list(expected[name].shape)}"
            )
        if tensor.dtype.is_floating_point != expected[name].dtype.is_floating_point:
            raise CheckpointInvalid(
                f"{directory}: tensor {name} is {tensor.dtype}, the model has {expected[name].dtype}"
            )


def _static_files(directory: Path) -> dict[str, bytes]:
    for name in (CONFIG_NAME, TOKENIZER_NAME):
        if not (directory / name).is_file():
            raise EnvironmentMissing(
                f"model directory {directory} has no {name}: name a directory in Hugging Face form"
            )
    names = (CONFIG_NAME, *TOKENIZER_FILES)
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files with the weights of a model directory. CheckpointInvalid when there are none."""
    if (directory / WEIGHTS_NAME).is_file():
        return [directory / WEIGHTS_NAME]
    index = directory / INDEX_NAME
    if not index.is_file():
        raise CheckpointInvalid(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointInvalid(f"{index} has no readable weight_map: {error}") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointInvalid(f"{index} names {name!r}, which is not a file of that directory")
    return [directory / name for name in names]
