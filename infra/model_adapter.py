"""Published versions that are an adapter on a base model, and the one way to whole weights from either form.

Guarantees: the base is known by the sha256 of its weight files and another one is refused before a tensor is
touched; base and adapter are joined by one function, in float32, so that trainer and engine hold the same bits.
An adapter directory is in the form of peft (adapter_config.json, adapter_model.safetensors), and holds no base weight.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from infra.model import Policy, apply_weights, check_static_files, load_policy, read_weights, weight_files
from schemas.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_NAME, BASE_NAME, WEIGHTS_NAME
from schemas.errors import CheckpointInvalid, ConfigError

T = TypeVar("T", bound=BaseModel)

_PREFIX = "base_model.model."
"""peft's name of the model inside its wrapper"""
_PARTS = ("lora_A", "lora_B")


class AdapterConfig(BaseModel):
    """adapter_config.json: what peft reads, with the choices of peft that are not made here fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    base_model_name_or_path: None = None
    """a path of one machine would be wrong on the others; base.json names the base by its content"""
    inference_mode: Literal[True] = True
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    lora_dropout: Literal[0] = 0
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] = False
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    target_modules: tuple[str, ...] = Field(min_length=1)
    """whole names, sorted"""

    @property
    def scale(self) -> float:
        """How often the product counts."""
        return self.lora_alpha / self.r


class BaseRecord(BaseModel):
    """base.json: the base model, by content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    sha256: str
    """`base_digest` of the directory with the base"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What an adapter directory holds. Tensors by module, each a pair A [rank, in] and B [out, rank], float32."""

    config: AdapterConfig
    base: BaseRecord
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def is_adapter(directory: Path) -> bool:
    """The directory is an adapter without its base. CheckpointInvalid where it is both an adapter and a whole model."""
    found = [(directory / name).is_file() for name in (ADAPTER_NAME, ADAPTER_CONFIG_NAME, BASE_NAME)]
    if not any(found):
        return False
    if (directory / WEIGHTS_NAME).is_file():
        raise CheckpointInvalid(
            f"{directory} holds both {WEIGHTS_NAME} and an adapter: which one is served is not said"
        )
    return True


def base_digest(directory: Path) -> str:
    """sha256 hex over the lines that `sha256sum` prints for the weight files there. CheckpointInvalid without any."""
    stamps = []
    for path in sorted(weight_files(directory)):
        status = path.stat()
        stamps.append((path, status.st_size, status.st_mtime_ns))
    return _digest_of(tuple(stamps))


@functools.lru_cache(maxsize=8)
def _digest_of(stamps: tuple[tuple[Path, int, int], ...]) -> str:
    """Hashing a large base takes seconds and every version asks for it; size and time tell another file."""
    lines = []
    for path, _, _ in stamps:
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# ---------------------------------------------------------------- whole weights


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """The weight that base and adapter give together, float32: the only place where the two meet."""
    with torch.autocast(weight.device.type, enabled=False):
        whole: torch.Tensor = weight.float() + (b @ a) * scale
        return whole


def serving_tensors(model: Any, directory: Path, base: Path | None) -> dict[str, torch.Tensor]:
    """Whole weights of a version, checked against the model, whichever form it was published in.

    `base`: this process's base model, None where it has none. Touches nothing of the model. CheckpointInvalid says
    what is wrong with the files, or that the adapter belongs on another base."""
    if not is_adapter(directory):
        return read_weights(model, directory)
    adapter = read_adapter(directory)
    checked = _base_of(adapter, directory, base)
    whole = read_weights(model, checked)
    for module, (a, b) in adapter.pairs.items():
        name = f"{module}.weight"
        if name not in whole:
            raise CheckpointInvalid(f"{directory / ADAPTER_NAME}: {module} is no module with a weight of this model")
        weight = whole[name]
        if weight.shape != (b.shape[0], a.shape[1]):
            raise CheckpointInvalid(
                f"{directory / ADAPTER_NAME}: the adapter of {module} is {b.shape[0]} x {a.shape[1]}, "
                f"its weight {' x '.join(map(str, weight.shape))}"
            )
        whole[name] = merged(weight, a, b, adapter.config.scale)
    return whole


def load_served(directory: Path, base: Path | None, dtype: str = "float32", device: str = "cpu") -> Policy:
    """`load_policy` for a version in either form. CheckpointInvalid for an adapter whose base is not here."""
    if not is_adapter(directory):
        return load_policy(directory, dtype, device)
    checked = _base_of(read_adapter(directory), directory, base)
    policy = load_policy(checked, dtype, device)
    check_static_files(policy, directory)
    apply_weights(policy.model, serving_tensors(policy.model, directory, checked))
    return policy


def _base_of(adapter: Adapter, directory: Path, base: Path | None) -> Path:
    """The base of this process, when it is the adapter's."""
    wanted = adapter.base.sha256
    words = f"{directory} is an adapter on base {wanted[:12]}...; "
    way_out = "put the base model of the run where model.init says and start again"
    if base is None or not base.is_dir():
        here = "no base model" if base is None else f"no base model (there is no directory {base})"
        raise CheckpointInvalid(f"{words}this process has {here}: {way_out}")
    found = base_digest(base)
    if found != wanted:
        raise CheckpointInvalid(f"{words}this process has {found[:12]}... in {base}: {way_out}")
    return base


# ---------------------------------------------------------------- the directory


def read_adapter(directory: Path) -> Adapter:
    """Read and check an adapter directory by itself. CheckpointInvalid names file and fault."""
    config = _parsed(AdapterConfig, directory / ADAPTER_CONFIG_NAME)
    base = _parsed(BaseRecord, directory / BASE_NAME)
    path = directory / ADAPTER_NAME
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointInvalid(f"{path} is not a complete safetensors file: {error}") from error
    pairs = {}
    for module in config.target_modules:
        names = [f"{_PREFIX}{module}.{part}.weight" for part in _PARTS]
        for name in names:
            if name not in found:
                raise CheckpointInvalid(f"{path}: tensor {name} is missing; {ADAPTER_CONFIG_NAME} names its module")
        a, b = (found.pop(name) for name in names)
        if a.dtype != torch.float32 or b.dtype != torch.float32:
            raise CheckpointInvalid(f"{path}: the adapter of {module} is {a.dtype} and {b.dtype}, not float32")
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != config.r or b.shape[1] != config.r:
            raise CheckpointInvalid(f"{path}: the adapter of {module} does not have rank {config.r}")
        pairs[module] = (a, b)
    if found:
        raise CheckpointInvalid(f"{path}: tensor {sorted(found)[0]} belongs to no module of {ADAPTER_CONFIG_NAME}")
    return Adapter(config=config, base=base, pairs=pairs)


def save_adapter(policy: Policy, directory: Path, adapter: Adapter) -> None:
    """Write adapter, its base's name and the static files into an existing directory (not fsynced)."""
    tensors = {
        f"{_PREFIX}{module}.{part}.weight": tensor
        for module, pair in adapter.pairs.items()
        for part, tensor in zip(_PARTS, pair, strict=True)
    }
    save_file(tensors, directory / ADAPTER_NAME, metadata={"format": "pt"})
    for name, model in ((ADAPTER_CONFIG_NAME, adapter.config), (BASE_NAME, adapter.base)):
        (directory / name).write_text(model.model_dump_json(indent=1) + "\n")
    for name, content in policy.static_files.items():
        (directory / name).write_bytes(content)


def target_names(model: Any, wanted: Sequence[str] | str) -> tuple[str, ...]:
    """Names of the modules that get an adapter, sorted. ConfigError for one that cannot have one."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    inner = sorted(name for name, module in linear.items() if module is not head)
    if isinstance(wanted, str):
        chosen = inner
    else:
        for part in wanted:
            if not any(_ends_in(name, part) for name in inner):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in inner})) or "none"
                raise ConfigError(
                    f"lora.target_modules: no linear layer of {type(model).__name__} is named {part!r} (the output "
                    f"layer cannot be one); it has {known}"
                )
        chosen = [name for name in inner if any(_ends_in(name, part) for part in wanted)]
    if not chosen:
        raise ConfigError(f"lora.target_modules: {type(model).__name__} has no linear layer to put an adapter on")
    return tuple(chosen)


def _ends_in(name: str, part: str) -> bool:
    return name == part or name.endswith(f".{part}")


def _parsed(kind: type[T], path: Path) -> T:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        raise CheckpointInvalid(f"{path}: {error}") from error
