"""Low-rank adapters in the learner: the layers, their first values, and where a restore finds them.

Guarantees: the forward pass is computed with the merged weights, bit for bit those that are published and served;
the first values follow from seed and module name alone and leave torch's generator untouched; B starts at zero, so
that version 0 is the base.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consumers.trainer.learner_settings import LoraSettings
from consumers.trainer.learner_state import LORA_NAME, read_tensors
from infra.model_adapter import (
    Adapter,
    AdapterConfig,
    BaseRecord,
    base_digest,
    is_adapter,
    merged,
    read_adapter,
    target_names,
)
from schemas.checkpoint import LoraRecord
from schemas.errors import CheckpointInvalid

_ALPHA, _BASE = "alpha", "base_sha256"
"""beside the adapters in LORA_NAME: without them the tensors mean nothing"""


class LoraLinear(torch.nn.Module):
    """A frozen linear layer with an adapter. Its weight keeps its name, so the model's tensors keep theirs."""

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.scale = scale
        device = base.weight.device
        self.lora_A = torch.nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))

    def merged_weight(self) -> Tensor:
        """The weight that is served; carries the adapter's gradient."""
        return merged(self.weight, self.lora_A, self.lora_B, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer with the merged weight. Two thin products would be cheaper, and other bits."""
        return torch.nn.functional.linear(x, self.merged_weight(), self.bias)


def add_adapters(model: Any, lora: LoraSettings) -> None:
    """Freeze the model and put an adapter on each target. ConfigError for a target that is none."""
    names = target_names(model, lora.target_modules)
    model.requires_grad_(False)
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = model.get_submodule(name)
        setattr(model.get_submodule(parent), last, LoraLinear(layer, lora.rank, lora.scale))


def lora_layers(model: Any) -> dict[str, LoraLinear]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def first_adapters(model: Any, lora: LoraSettings, seed: int) -> dict[str, Tensor]:
    """What every adapter starts from, by parameter name: A uniform within 1 / sqrt(inputs), as peft's; B zero."""
    found = {}
    for name, layer in lora_layers(model).items():
        stream = hashlib.sha256(f"lora/{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(stream[:8], "big") >> 1)
        bound = 1.0 / math.sqrt(layer.lora_A.shape[1])
        drawn_RK = torch.rand(layer.lora_A.shape, generator=generator)
        found[f"{name}.lora_A"] = (2.0 * drawn_RK - 1.0) * bound
        found[f"{name}.lora_B"] = torch.zeros(layer.lora_B.shape)
    return found


def restored_adapters(
    model: Any, lora: LoraSettings, seed: int, directory: Path, *, with_state: bool
) -> dict[str, Tensor]:
    """Adapters of a version's directory, checked, by parameter name; the first ones for the base itself."""
    if is_adapter(directory):
        return _of_adapter(model, lora, directory)
    if (directory / LORA_NAME).is_file() and with_state:
        return _of_state(model, lora, directory / LORA_NAME)
    if base_digest(directory) == base_digest(lora.base_directory):
        return first_adapters(model, lora, seed)
    raise CheckpointInvalid(
        f"{directory} holds merged weights without {LORA_NAME}: the adapter cannot be taken out of them again; "
        "resume from a version that has state"
    )


def adapter_of(tensors: Mapping[str, Tensor], lora: LoraSettings) -> Adapter:
    """Adapter tensors by parameter name, as they are published."""
    modules = sorted(name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A"))
    return Adapter(
        config=AdapterConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=tuple(modules)),
        base=BaseRecord(sha256=base_digest(lora.base_directory)),
        pairs={module: (tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]) for module in modules},
    )


def adapter_state(tensors: Mapping[str, Tensor], lora: LoraSettings) -> dict[str, Tensor]:
    """Adapter tensors as they lie beside merged weights, with what they mean nothing without: alpha and the base."""
    digest = torch.frombuffer(bytearray.fromhex(base_digest(lora.base_directory)), dtype=torch.uint8)
    return {**tensors, _ALPHA: torch.tensor(lora.alpha, dtype=torch.float64), _BASE: digest}


def lora_record(model: Any, lora: LoraSettings) -> LoraRecord:
    """What the manifest says of it."""
    return LoraRecord(
        rank=lora.rank,
        alpha=lora.alpha,
        publish=lora.publish,
        modules=len(lora_layers(model)),
        base_sha256=base_digest(lora.base_directory),
    )


def _of_adapter(model: Any, lora: LoraSettings, directory: Path) -> dict[str, Tensor]:
    adapter, modules = read_adapter(directory), sorted(lora_layers(model))
    if adapter.base.sha256 != (here := base_digest(lora.base_directory)):
        raise CheckpointInvalid(
            f"{directory} is an adapter on base {adapter.base.sha256[:12]}..., the trainer's base "
            f"{lora.base_directory} is {here[:12]}...: put the base model of the run where model.init says"
        )
    made = (adapter.config.r, adapter.config.lora_alpha, sorted(adapter.config.target_modules))
    if made != (lora.rank, lora.alpha, modules):
        raise CheckpointInvalid(
            f"{directory}: adapter of rank {made[0]}, alpha {made[1]:g} on {len(made[2])} modules, the configuration "
            f"has rank {lora.rank}, alpha {lora.alpha:g} on {len(modules)}: [lora] cannot change within a run"
        )
    tensors: dict[str, Tensor] = {}
    for module, pair in adapter.pairs.items():
        tensors |= {f"{module}.{part}": tensor for part, tensor in zip(("lora_A", "lora_B"), pair, strict=True)}
    return _fitting(model, tensors, directory)


def _of_state(model: Any, lora: LoraSettings, path: Path) -> dict[str, Tensor]:
    tensors = read_tensors(path)
    expected = adapter_state({}, lora)
    for name, words in ((_ALPHA, f"lora.alpha = {lora.alpha:g}"), (_BASE, f"the base {lora.base_directory}")):
        if name not in tensors or not torch.equal(tensors.pop(name), expected[name]):
            raise CheckpointInvalid(f"{path} was made with something else than {words}: it cannot change within a run")
    return _fitting(model, tensors, path)


def _fitting(model: Any, tensors: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    expected = {
        f"{name}.{part}": getattr(layer, part).shape
        for name, layer in lora_layers(model).items()
        for part in ("lora_A", "lora_B")
    }
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors or name not in expected or tensors[name].shape != expected[name]:
            found = list(tensors[name].shape) if name in tensors else "nothing"
            wanted = list(expected[name]) if name in expected else "nothing"
            raise CheckpointInvalid(f"{where}: {name} is {found}, the configured adapters have {wanted} there")
    return tensors
