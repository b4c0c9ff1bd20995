"""Learners with adapters over the tiny policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings, LoraSettings
from tests.fakes.policy_rows import tiny_directory


def lora_settings(publish: str = "merged", **changes: Any) -> LoraSettings:
    """Rank 4 on every linear layer of the tiny policy."""
    values: dict[str, Any] = {"rank": 4, "alpha": 8.0, "publish": publish, "base_directory": tiny_directory()}
    return LoraSettings(**{**values, **changes})


def fresh_lora_learner(publish: str = "merged", *, lora: dict[str, Any] | None = None, **settings: Any) -> HfLearner:
    """A learner that holds nothing yet."""
    values: dict[str, Any] = {"learning_rate": 1e-2, "warmup_steps": 0, **settings}
    return HfLearner(LearnerSettings(lora=lora_settings(publish, **(lora or {})), **values))


def lora_learner(
    publish: str = "merged",
    *,
    directory: Path | None = None,
    lora: dict[str, Any] | None = None,
    **settings: Any,
) -> HfLearner:
    """A learner at the start of a run, or at a version's directory, without optimizer state."""
    made = fresh_lora_learner(publish, lora=lora, **settings)
    made.restore(directory or tiny_directory(), with_state=False)
    return made
