"""Which versions are promoted now: the live one, the best one, and the pinned ones. Pure.

Made from the whole log up to a point, not from the way there: it does not matter how the topics were interleaved,
how often somebody looked, or whether the projector was started again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from infra.tracker_port import Promotions
from schemas.evaluation_codec import EvaluationRow
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus


class Scores:
    """How good each version is: mean reward of its evaluation, and the metric of the step that made it."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._by_metric: dict[int, float] = {}
        self._evaluated: dict[int, tuple[int, float]] = {}
        """version -> (answers with a reward, sum of the rewards)"""
        self._seen: set[int] = set()
        """versions with an evaluation, also where every reward failed"""

    def step(self, version: int, metrics: dict[str, float]) -> None:
        """The metrics of the step that made the version."""
        value = metrics.get(self._metric)
        if value is not None and math.isfinite(value):
            self._by_metric[version] = value

    def evaluated(self, rows: Sequence[EvaluationRow]) -> None:
        """Answers to held-out prompts."""
        for row in rows:
            self._seen.add(row.version)
            if row.reward is not None and math.isfinite(row.reward):
                count, total = self._evaluated.get(row.version, (0, 0.0))
                self._evaluated[row.version] = count + 1, total + row.reward

    def was_evaluated(self, version: int) -> bool:
        """There are answers of it."""
        return version in self._seen

    def mean_evaluation(self, version: int) -> float | None:
        """Mean reward over every answer of the version; None when it has none."""
        count, total = self._evaluated.get(version, (0, 0.0))
        return total / count if count else None

    def best(self, fold: PolicyFold) -> int | None:
        """The version with the highest score whose weights are kept; of equals the newest. An evaluation counts more
        than any metric of training: where one version was evaluated, only evaluated ones are compared."""
        kept = [number for number, state in fold.versions.items() if state.status is not VersionStatus.RETIRED]
        scores = {number: score for number in kept if (score := self.mean_evaluation(number)) is not None}
        if not scores:
            scores = {number: self._by_metric[number] for number in kept if number in self._by_metric}
        return max(scores, key=lambda number: (scores[number], number), default=None)


def promotions(fold: PolicyFold, scores: Scores) -> Promotions:
    """What the registry shall hold."""
    named = {"live": fold.live, "best": scores.best(fold)}
    aliases = {alias: version for alias, version in named.items() if version is not None}
    pinned = tuple(sorted(fold.pinned))
    sources = {
        version: (fold.versions[version].event.manifest_uri, fold.versions[version].event.manifest_sha256)
        for version in sorted({*aliases.values(), *pinned})
    }
    return Promotions(aliases=aliases, pinned=pinned, sources=sources)
