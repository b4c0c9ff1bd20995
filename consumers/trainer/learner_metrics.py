"""Names of the learner's metrics, and those that come from the rows alone. verl's names where verl has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from consumers.objective.statistics import percentiles
from consumers.trainer.batch import BatchRow

RENAMED = {
    "loss": "actor/pg_loss",
    "ppo_kl": "actor/ppo_kl",
    "clipfrac": "actor/pg_clipfrac",
    "clipfrac_dual": "actor/pg_clipfrac_lower",
    "entropy": "actor/entropy",
    "tokens": "training/tokens",
    "rows": "training/rows",
}
"""objective metric -> verl's name; every other one becomes actor/<name> or mismatch/<name>"""


def objective_metrics(found: Mapping[str, float]) -> dict[str, float]:
    """The objective's metrics under the names that are published."""
    named = {}
    for name, value in found.items():
        if name.startswith("mismatch_"):
            named[f"mismatch/{name.removeprefix('mismatch_')}"] = value
        else:
            named[RENAMED.get(name, f"actor/{name}")] = value
    return named


def quantile_metrics(log_ratio_N: torch.Tensor, mismatch_log_ratio_N: torch.Tensor) -> dict[str, float]:
    """Percentiles of both log ratios, raw: before any clamp, clip, cap or mask."""
    ratios = {f"actor/log_ratio_{name}": value for name, value in percentiles(log_ratio_N).items()}
    mismatches = {f"mismatch/log_{name}": value for name, value in percentiles(mismatch_log_ratio_N).items()}
    return ratios | mismatches


def row_metrics(rows: Sequence[BatchRow]) -> dict[str, float]:
    """What the learner saw of its rows; rewards by task, lag and age are the step's to report."""
    if not rows:
        return {}
    rewards = np.array([row.trajectory.reward for row in rows if row.trajectory.reward is not None], dtype=np.float64)
    metrics = {
        **_spread("critic/rewards", rewards),
        **_spread("critic/advantages", np.array([row.advantage for row in rows], dtype=np.float64)),
        **_spread("response_length", np.array([len(row.trajectory.token_ids) for row in rows], dtype=np.float64)),
        **_spread("prompt_length", np.array([len(row.trajectory.prompt_token_ids) for row in rows], dtype=np.float64)),
        "training/row_weight_mean": float(np.mean([row.weight for row in rows])),
    }
    if len(rewards):
        metrics["critic/rewards/std"] = float(rewards.std())
        groups: dict[str, list[float]] = {}
        for row in rows:
            if row.trajectory.reward is not None:
                groups.setdefault(str(row.trajectory.group_id), []).append(row.trajectory.reward)
        metrics["training/group_reward_variance"] = float(np.mean([np.var(values) for values in groups.values()]))
    return metrics


def _spread(name: str, values: npt.NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
