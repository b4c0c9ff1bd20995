"""Names of the learner's metrics, and those that come from the rows alone. verl's names where verl has one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from consumers.objective.statistics import percentiles, step_metrics
from consumers.trainer.admission import fingerprint_difference
from consumers.trainer.batch import BatchRow
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.step_record import StepRecord
from infra.logs import event

logger = logging.getLogger(__name__)

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


def update_metrics(
    record: StepRecord, settings: LearnerSettings, fingerprint: Mapping[str, str], rows: Sequence[BatchRow]
) -> dict[str, float]:
    """What the update did. Ratios of the first optimizer step tell of the data; later ones of drift inside the step."""
    metrics: dict[str, float] = {}
    if record.tally is not None and record.last_tally is not None:
        metrics |= objective_metrics(step_metrics(record.tally, settings.objective))
        metrics |= quantile_metrics(torch.cat(record.log_ratios), torch.cat(record.mismatch_log_ratios))
        if settings.optimizer_steps > 1:
            last = objective_metrics(step_metrics(record.last_tally, settings.objective))
            metrics |= {f"{name}_last": last[name] for name in ("actor/ppo_kl", "actor/pg_clipfrac") if name in last}
    if record.grad_norms:
        metrics["actor/grad_norm"] = float(np.mean(record.grad_norms))
    metrics["actor/lr"] = record.learning_rate
    metrics["training/optimizer_steps"] = float(record.made)
    metrics["training/optimizer_steps_masked"] = float(record.masked)
    metrics["training/optimizer_steps_nonfinite"] = float(record.not_finite)
    other = [row for row in rows if fingerprint_difference(row.trajectory.fingerprint, fingerprint)]
    if rows:
        metrics["mismatch/other_fingerprint_fraction"] = len(other) / len(rows)
    if record.worst is not None:
        metrics["mismatch/fresh_ratio_error_max"] = record.worst.ratio_error
        # Another precision or engine explains a difference; the same one does not.
        served = {row.trajectory.fingerprint.dtype for row in rows}
        if record.worst.exceeds and served | {settings.dtype} == {"float32"}:
            event(logger, "engine_and_trainer_disagree", level=logging.WARNING, words=str(record.worst))
    return metrics


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
    return metrics


def _spread(name: str, values: npt.NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
