"""What the evaluator wrote of a run, for summary and status: first, best, newest. Reads one version at a time."""

from __future__ import annotations

from dataclasses import dataclass

from consumers.evaluation import VersionScores, scores_by_version
from consumers.offline.run_log import RunLog


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRun:
    """Figures by name; `version` is one of them."""

    versions: int
    """evaluated; 0: the log holds no evaluations"""
    first: dict[str, float]
    best: dict[str, float]
    """by greedy reward, where there is one, otherwise by that of the samples; of equals the later one"""
    newest: dict[str, float]
    words: tuple[str, ...]
    """for a person: one line, or none"""


def evaluated_run(run_log: RunLog) -> EvaluatedRun:
    """Read the topic `evaluations` once."""
    first: VersionScores | None = None
    best: VersionScores | None = None
    newest: VersionScores | None = None
    seen: set[int] = set()
    for scores in scores_by_version(run_log.evaluations()):
        if scores.version in seen:
            continue  # two evaluators ran at once: their answers are the same
        seen.add(scores.version)
        first = first or scores
        newest = scores if newest is None or scores.version > newest.version else newest
        best = scores if best is None or _reward(scores) >= _reward(best) else best
    if first is None or best is None or newest is None:
        return EvaluatedRun(versions=0, first={}, best={}, newest={}, words=())
    words = f"{len(seen)} versions; {newest.words}" + ("" if best is newest else f"; best was {best.words}")
    return EvaluatedRun(
        versions=len(seen), first=first.figures(), best=best.figures(), newest=newest.figures(), words=(words,)
    )


def _reward(scores: VersionScores) -> float:
    found = scores.greedy_reward if scores.greedy_reward is not None else scores.sampled_reward
    return float("-inf") if found is None else found
