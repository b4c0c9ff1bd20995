"""Optimizer and counters of the learner on disk: safetensors and JSON, never pickle.

Guarantees that restoring is exact: training on after a restore gives the bits of training without one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from infra.model import Policy, save_weights
from infra.model_adapter import Adapter, save_adapter
from schemas.checkpoint import OPTIMIZER_NAME, PROBE_NAME, TRAINER_STATE_NAME
from schemas.errors import CheckpointInvalid

REFERENCE_NAME = "reference.safetensors"
"""weights of a reference that is refreshed; a frozen one is not part of the state"""
LORA_NAME = "lora.safetensors"
"""the adapters, where merged weights are published: they cannot be taken out of those again"""
_METADATA = {"format": "pt"}
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TrainerState(BaseModel):
    """Contents of trainer_state.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    optimizer_step: int
    """optimizer steps made since the start of the run; the learning rate is a function of it"""
    training_step: int
    """training steps seen, skipped ones too"""
    skipped_steps: int
    """optimizer steps not made: nothing to train on, or a non-finite gradient"""
    bad_steps_in_row: int
    """of those, since the last that was made"""
    seed: int
    torch_rng: str
    """base64 of torch's CPU generator state"""
    reference_version: int | None = None
    """version whose weights are the reference; None: none of this run"""

    def rng_digest(self) -> str:
        """sha256 hex over everything random."""
        return hashlib.sha256(f"{self.seed}/{self.training_step}/{self.torch_rng}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Everything of a checkpoint. Whose memory the tensors are in decides whether training on may change them."""

    policy: Policy
    """for its static files"""
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    reference: Mapping[str, torch.Tensor]
    """empty unless the reference was refreshed"""
    state: TrainerState | None
    """None: saved without optimizer and RNG state"""
    probe: Callable[[], bytes]
    """asked once, after everything else is written, on the thread that saves"""
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """by parameter name, where merged weights are published"""
    adapter: Adapter | None = None
    """published in the place of the weights"""

    def save(self, directory: Path) -> None:
        """Write it into an empty directory."""
        self.begin_save(directory)()

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Write all of it but the probe into an empty directory; what is returned writes that."""
        if self.adapter is not None:
            save_adapter(self.policy, directory, self.adapter)
        else:
            save_weights(self.policy, directory, self.weights)
        if self.state is not None:
            if self.adapters:
                write_tensors(self.adapters, directory / LORA_NAME)
            write_tensors(self.moments, directory / OPTIMIZER_NAME)
            write_state(self.state, directory)
            if self.reference:
                write_tensors(self.reference, directory / REFERENCE_NAME)
        return partial(self._write_probe, directory)

    def _write_probe(self, directory: Path) -> None:
        (directory / PROBE_NAME).write_bytes(self.probe())


def torch_rng_text() -> str:
    """State of torch's CPU generator, as text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def set_torch_rng(text: str) -> None:
    """Put torch's CPU generator into that state."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))


def optimizer_tensors(
    optimizer: Any, names: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The moments of every parameter that has made a step, by parameter name; `whole` joins the ranks' parts."""
    return {
        f"{name}.{part}": whole(optimizer.state[parameter][part])
        for name, parameter in names.items()
        if parameter in optimizer.state
        for part in MOMENTS
    }


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write whole tensors as safetensors."""
    # The same bytes by either way. Optimizer state is many small tensors, and as arrays they cost half the time; an
    # array that is not contiguous would be written wrongly there, and here it is an error.
    if all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors.values()):
        save_arrays({name: tensor.detach().numpy() for name, tensor in tensors.items()}, path, _METADATA)
    else:
        save_file(dict(tensors), path, _METADATA)


def load_optimizer(
    optimizer: Any,
    names: Mapping[str, torch.Tensor],
    directory: Path,
    place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Read the moments back; CheckpointInvalid names what does not fit. Nothing is set before all is checked.

    `place` gives this rank's part of a whole tensor, for the parameter it belongs to."""
    path = directory / OPTIMIZER_NAME
    known = {f"{name}.{part}": (parameter, part) for name, parameter in names.items() for part in MOMENTS}
    loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(path).items():
        if key not in known:
            raise CheckpointInvalid(f"{path}: {key} belongs to no parameter of this model")
        parameter, part = known[key]
        if part != "step" and tensor.shape != parameter.shape:
            raise CheckpointInvalid(f"{path}: {key} has shape {list(tensor.shape)}, not {list(parameter.shape)}")
        # The step counter stays on the CPU, where AdamW keeps it.
        moved = tensor.clone() if part == "step" else place(parameter, tensor)
        loaded.setdefault(parameter, {})[part] = moved
    for parts in loaded.values():
        if set(parts) != set(MOMENTS):
            raise CheckpointInvalid(f"{path}: a parameter has only {sorted(parts)}")
    if loaded and len(loaded) != len(names):
        raise CheckpointInvalid(f"{path}: has state of {len(loaded)} parameters, the model has {len(names)}")
    optimizer.state.clear()
    optimizer.state.update(loaded)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file of the trainer's state; CheckpointInvalid when it cannot be read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}; resume from a version that has state") from error


def write_state(state: TrainerState, directory: Path) -> None:
    """Write trainer_state.json."""
    (directory / TRAINER_STATE_NAME).write_text(state.model_dump_json(indent=1) + "\n")


def read_state(directory: Path) -> TrainerState:
    """Read trainer_state.json; CheckpointInvalid says what is wrong."""
    path = directory / TRAINER_STATE_NAME
    try:
        state = TrainerState.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}; resume from a version that has state") from error
    except ValidationError as error:
        raise CheckpointInvalid(f"{path}: {error}") from error
    if state.format != 1:
        raise CheckpointInvalid(f"{path}: format {state.format}, this build knows 1; upgrade the trainer")
    return state
