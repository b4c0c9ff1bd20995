"""Statistics over all versions: sums that add up, and percentiles from a fixed histogram. Constant memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from consumers.objective.settings import ObjectiveSettings
from consumers.objective.statistics import QUANTILES, Tally, step_metrics
from consumers.offline.reanalyse.maths import StepStatistics, no_tally
from consumers.trainer.learner_metrics import objective_metrics

WIDTH_NATS = 0.001
"""Percentiles of the whole run are true to half of it."""
_LIMIT_NATS = 20.0
_BINS = round(2 * _LIMIT_NATS / WIDTH_NATS) + 1


@dataclass(slots=True)
class LogRatioHistogram:
    """Log ratios of a whole run. Mutable. What lies beyond +-20 nats counts in the outermost bins."""

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, dtype=np.int64))

    def add(self, values_N: npt.NDArray[np.float32]) -> None:
        """Count them."""
        if len(values_N):
            places = np.rint((values_N.astype(np.float64) + _LIMIT_NATS) / WIDTH_NATS)
            self.counts += np.bincount(np.clip(places, 0, _BINS - 1).astype(np.int64), minlength=_BINS)

    def percentiles(self) -> dict[str, float]:
        """p01, p05, p50, p95, p99, the middle of the bin each lies in; {} for none."""
        total = int(self.counts.sum())
        if not total:
            return {}
        summed = np.cumsum(self.counts)
        found = {}
        for quantile in QUANTILES:
            rank = min(total, math.floor(quantile / 100 * (total - 1)) + 1)
            place = int(np.searchsorted(summed, rank))
            found[f"p{quantile:02d}"] = round(place * WIDTH_NATS - _LIMIT_NATS, 3)
        return found


@dataclass(slots=True)
class StatisticsTotal:
    """Mutable; feed it every step."""

    tally: Tally = field(default_factory=no_tally)
    objective: ObjectiveSettings | None = None
    ratios: LogRatioHistogram = field(default_factory=LogRatioHistogram)
    mismatches: LogRatioHistogram = field(default_factory=LogRatioHistogram)

    def add(self, found: StepStatistics, objective: ObjectiveSettings) -> None:
        """One step. Of several objectives (segments of a run) the last one names the clip fractions."""
        self.tally = self.tally + found.tally
        self.objective = objective
        self.ratios.add(found.log_ratio_N.numpy())
        self.mismatches.add(found.mismatch_log_ratio_N.numpy())

    def metrics(self) -> dict[str, float]:
        """Over every token of the run. The loss is left out: losses of steps do not add up."""
        if self.objective is None:
            return {}
        found = objective_metrics(step_metrics(self.tally, self.objective))
        found.pop("actor/pg_loss", None)
        found |= {f"actor/log_ratio_{name}": value for name, value in self.ratios.percentiles().items()}
        found |= {f"mismatch/log_{name}": value for name, value in self.mismatches.percentiles().items()}
        return found
