"""What a restore reads from disk, checked in full before one tensor of the learner is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from consumers.trainer.learner_lora import add_adapters, restored_adapters
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.learner_state import REFERENCE_NAME, TrainerState, read_state, read_tensors
from consumers.trainer.policy_forward import check_head
from infra.model import Policy, check_static_files, load_policy, read_weights
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Everything a restore found."""

    policy: Policy | None = None
    """only the first time; later `weights` go into the model that is there"""
    reference: Policy | None = None
    """only the first time, and only where there is one"""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: TrainerState | None = None
    reference_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """empty: the reference holds the right ones already"""


def read_first(directory: Path, settings: LearnerSettings, *, with_state: bool) -> Restored:
    """The first restore of a process: models, and the state when asked."""
    lora = settings.lora
    policy = load_policy(directory if lora is None else lora.base_directory, "float32", settings.device)
    check_head(policy.model)
    if lora is not None:
        add_adapters(policy.model, lora)
    if settings.gradient_checkpointing:
        # It acts in training mode only; dropout is zero, so the mode changes nothing else.
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy.model.train()
    reference = None
    if settings.reference_directory is not None:
        reference = load_policy(settings.reference_directory, "float32", settings.device)
        if reference.tokenizer_digest != policy.tokenizer_digest:
            raise ConfigError(f"reference.directory {settings.reference_directory} has another tokenizer")
        reference.model.requires_grad_(False)
    state = read_state(directory) if with_state else None
    return Restored(
        policy=policy,
        reference=reference,
        weights={} if lora is None else _weights(policy, settings, directory, with_state=with_state),
        state=state,
        reference_weights=_refreshed(directory, settings, state) if reference is not None else {},
    )


def read_again(
    directory: Path,
    settings: LearnerSettings,
    policy: Policy,
    reference: Policy | None,
    reference_version: int | None,
    *,
    with_state: bool,
) -> Restored:
    """A later restore: weights into the models that are there. `reference_version`: the one it holds now."""
    weights = _weights(policy, settings, directory, with_state=with_state)
    state = read_state(directory) if with_state else None
    reference_weights: Mapping[str, torch.Tensor] = {}
    if reference is not None:
        reference_weights = _refreshed(directory, settings, state)
        if not reference_weights and reference_version != settings.reference_version:
            assert settings.reference_directory is not None
            reference_weights = read_weights(reference.model, settings.reference_directory)
    return Restored(weights=weights, state=state, reference_weights=reference_weights)


def _weights(
    policy: Policy, settings: LearnerSettings, directory: Path, *, with_state: bool
) -> dict[str, torch.Tensor]:
    """What is trained, from a version's directory: all weights, or the adapters on the base that is loaded."""
    check_static_files(policy, directory)
    if settings.lora is None:
        return read_weights(policy.model, directory)
    return restored_adapters(policy.model, settings.lora, settings.seed, directory, with_state=with_state)


def _refreshed(directory: Path, settings: LearnerSettings, state: TrainerState | None) -> Mapping[str, torch.Tensor]:
    """Weights of a reference that was refreshed during the run: they are part of the state."""
    if state is None or state.reference_version in (None, settings.reference_version):
        return {}  # None: there was no reference then, or one of no version: the directory's is the right one
    return read_tensors(directory / REFERENCE_NAME)
