"""From a run's stored configurations, and what is changed of them, to the rules of `reanalyse`. Imports torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from consumers.offline.reanalyse.judge import ReanalysisRules
from consumers.trainer.selection import SelectionRules
from consumers.trainer.step import AgeWeights
from driftlog.learning_settings import admission_rules, advantages_of, learner_settings, objective_settings
from infra.config import Config, apply_override, parse_config
from schemas.errors import ConfigError

JUDGED_BY = (
    "trainer.max_lag", "trainer.stale_action", "trainer.hard_max_lag", "trainer.stale_decay", "trainer.min_group",
    "trainer.filter_zero_variance", "trainer.mask_truncated", "objective.preset", "objective.overrides",
    "coordinator.mode", "task.reward",
)  # fmt: skip
"""settings a decision at a recorded instant, or a statistic at the start of a recorded step, depends on"""
REWARD = "task.reward"


def changed_config(config: Config, overrides: Sequence[str]) -> Config:
    """The stored configuration with `section.key=value` put in. ConfigError for a key that is unknown, or that decides
    nothing here. What the run did of pacing, replay and retention stays, so their keys cannot contradict."""
    data: dict[str, Any] = config.model_dump(mode="json")
    for override in overrides:
        apply_override(data, override)
    # Before the keys are judged: an unknown one is named before an idle one.
    changed = parse_config(_settled(config, data, overrides), "--set", is_stored=True)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == known or key.startswith(f"{known}.") for known in JUDGED_BY):
            raise ConfigError(
                f"--set {key}: a log cannot tell what it would have changed; reanalyse judges by {', '.join(JUDGED_BY)}"
            )
    return changed


def split_reward(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """The overrides without `task.reward=...`, and its value."""
    rest, reward = [], None
    for override in overrides:
        key, separator, text = override.partition("=")
        if key.strip() != REWARD or not separator:
            rest.append(override)
            continue
        try:
            reward = str(tomllib.loads(f"x = {text}")["x"])
        except tomllib.TOMLDecodeError:
            reward = text.strip()
    return rest, reward


def rules_of(config: Config, fingerprint: Mapping[str, str], ranks: int) -> ReanalysisRules:
    """What a trainer of this configuration decides by. ConfigError for settings the maths refuses."""
    objective = objective_settings(config)
    return ReanalysisRules(
        selection=SelectionRules(
            groups_per_step=config.trainer.groups_per_step,
            order=config.trainer.order,
            min_group=config.trainer.min_group,
            filter_zero_variance=config.trainer.filter_zero_variance,
            admission=admission_rules(config, fingerprint),
        ),
        group_size=config.task.group_size,
        age_weights=AgeWeights(max_lag=config.trainer.max_lag, decay=config.trainer.decay),
        advantages=advantages_of(objective),
        learner=learner_settings(config, "the initial policy"),
        fingerprint=fingerprint,
        ranks=ranks,
    )


def _settled(config: Config, data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Without settings that only pace a run: it has been paced already."""
    changed = {override.partition("=")[0].strip() for override in overrides}
    settled = {section: dict(values) if isinstance(values, Mapping) else values for section, values in data.items()}
    trainer = settled["trainer"]
    if "trainer.run_ahead" not in changed:
        trainer["run_ahead"] = None
    if trainer.get("stale_action") != "down_weight" and "trainer.hard_max_lag" not in changed:
        trainer["hard_max_lag"] = None
    if not any(key.startswith("replay.") for key in changed):
        settled.pop("replay", None)
    if "checkpoints.keep" not in changed:
        settled["checkpoints"]["keep"] = "all"
    return settled
