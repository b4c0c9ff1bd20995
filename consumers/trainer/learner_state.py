"""Optimizer and counters of the learner on disk: safetensors and JSON, never pickle.

Guarantees that restoring is exact: training on after a restore gives the bits of training without one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from schemas.checkpoint import OPTIMIZER_NAME, TRAINER_STATE_NAME
from schemas.errors import CheckpointInvalid

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
    seed: int
    torch_rng: str
    """base64 of torch's CPU generator state"""

    def rng_digest(self) -> str:
        """sha256 hex over everything random."""
        return hashlib.sha256(f"{self.seed}/{self.training_step}/{self.torch_rng}".encode()).hexdigest()


def torch_rng_text() -> str:
    """State of torch's CPU generator, as text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def set_torch_rng(text: str) -> None:
    """Put torch's CPU generator into that state."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))


def save_optimizer(optimizer: Any, names: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the moments of every parameter that has made a step, by parameter name."""
    tensors = {
        f"{name}.{part}": optimizer.state[parameter][part].detach().cpu().contiguous()
        for name, parameter in names.items()
        if parameter in optimizer.state
        for part in MOMENTS
    }
    save_file(tensors, directory / OPTIMIZER_NAME, metadata={"format": "pt"})


def load_optimizer(optimizer: Any, names: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Read the moments back; CheckpointInvalid names what does not fit. Nothing is set before all is checked."""
    path = directory / OPTIMIZER_NAME
    known = {f"{name}.{part}": (parameter, part) for name, parameter in names.items() for part in MOMENTS}
    loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if key not in known:
                    raise CheckpointInvalid(f"{path}: {key} belongs to no parameter of this model")
                parameter, part = known[key]
                tensor = file.get_tensor(key)
                if part != "step" and tensor.shape != parameter.shape:
                    raise CheckpointInvalid(
                        f"{path}: {key} has shape {list(tensor.shape)}, not {list(parameter.shape)}"
                    )
                # The step counter stays on the CPU, where AdamW keeps it.
                moved = tensor.clone() if part == "step" else tensor.to(parameter.device).clone()
                loaded.setdefault(parameter, {})[part] = moved
    except (SafetensorError, OSError) as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}; resume from a version that has state") from error
    for parts in loaded.values():
        if set(parts) != set(MOMENTS):
            raise CheckpointInvalid(f"{path}: a parameter has only {sorted(parts)}")
    if loaded and len(loaded) != len(names):
        raise CheckpointInvalid(f"{path}: has state of {len(loaded)} parameters, the model has {len(names)}")
    optimizer.state.clear()
    optimizer.state.update(loaded)


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
