"""What the answers of one version come to: mean reward, pass@k, length. Pure; the evaluator and every reader share it.

A failed reward is no answer: it is counted apart and leaves every mean. An answer is right from reward 1 up.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from schemas.evaluation_codec import EvaluationRow

_RIGHT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionScores:
    """One version on held-out prompts."""

    version: int
    prompts: int
    answers: int
    rewards_failed: int
    greedy_reward: float | None
    """mean over the most probable answers; None: none was asked for, or every reward failed"""
    sampled_reward: float | None
    pass_at_k: tuple[tuple[int, float], ...]
    """(k, mean over prompts of the chance that one of k samples is right); k = 1, 2, 4, ... and all samples"""
    completion_tokens_mean: float
    truncated_share: float
    """answers cut off by max_tokens"""
    evaluated_at_us: int

    @property
    def words(self) -> str:
        """For a person, in one line."""
        parts = [] if self.greedy_reward is None else [f"greedy {self.greedy_reward:.2f}"]
        parts += [] if self.sampled_reward is None else [f"sampled {self.sampled_reward:.2f}"]
        parts += [f"pass@{k} {share:.2f}" for k, share in self.pass_at_k[-1:]]
        parts += [f"{self.rewards_failed} rewards failed"] if self.rewards_failed else []
        return f"version {self.version}: {', '.join(parts) or 'no reward'} ({self.prompts} prompts)"

    def metrics(self) -> dict[str, float]:
        """Under their registered names."""
        found = {f"evaluation/pass_at_{k}": share for k, share in self.pass_at_k}
        if self.greedy_reward is not None:
            found["evaluation/greedy_reward_mean"] = self.greedy_reward
        if self.sampled_reward is not None:
            found["evaluation/sampled_reward_mean"] = self.sampled_reward
        found["evaluation/response_length_mean"] = self.completion_tokens_mean
        found["evaluation/truncated_share"] = self.truncated_share
        return found

    def figures(self) -> dict[str, float]:
        """Version and metrics without their prefix: for JSON."""
        plain = {name.removeprefix("evaluation/"): value for name, value in self.metrics().items()}
        return {"version": self.version, "prompts": self.prompts, "rewards_failed": self.rewards_failed, **plain}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k answers is right, estimated without bias from `right` of `samples` answers.

    1 - C(samples - right, k) / C(samples, k): the share of all choices of k answers that hold a right one.
    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {right} right answers among {samples}: needs 0 <= right <= samples, 1 <= k <= n")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def ks_of(samples: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the samples of a prompt, and that number itself.

    >>> ks_of(6), ks_of(0)
    ((1, 2, 4, 6), ())
    """
    doubled = [1 << power for power in range(max(0, samples).bit_length())]
    return tuple(sorted({*doubled, samples})) if samples > 0 else ()


def scores_of(rows: Sequence[EvaluationRow]) -> VersionScores:
    """The scores of one version; `rows` holds all of its answers, at least one, and of no other version."""
    if len({row.version for row in rows}) != 1:
        raise ValueError("scores_of takes the answers of exactly one version")
    sampled = [row for row in rows if row.temperature > 0]
    by_prompt: defaultdict[str, list[float]] = defaultdict(list)
    for row in sampled:
        if (reward := _reward(row)) is not None:
            by_prompt[row.prompt_id].append(reward)
    return VersionScores(
        version=rows[0].version,
        prompts=len({row.prompt_id for row in rows}),
        answers=len(rows),
        rewards_failed=sum(_reward(row) is None for row in rows),
        greedy_reward=_mean([_reward(row) for row in rows if row.temperature == 0]),
        sampled_reward=_mean([_reward(row) for row in sampled]),
        pass_at_k=_pass_at(list(by_prompt.values()), ks_of(_samples_of_a_prompt(sampled))),
        completion_tokens_mean=math.fsum(row.completion_tokens for row in rows) / len(rows),
        truncated_share=sum(row.finish_reason == "length" for row in rows) / len(rows),
        evaluated_at_us=max(row.evaluated_at_us for row in rows),
    )


def scores_by_version(rows: Iterable[EvaluationRow]) -> Iterator[VersionScores]:
    """Scores in the order of the log; a version's answers lie side by side there, in one record."""
    for _, own in itertools.groupby(rows, key=lambda row: row.version):
        yield scores_of(list(own))


def _pass_at(rewards: Sequence[Sequence[float]], ks: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """A prompt with fewer than k scored answers says nothing about pass@k."""
    found = []
    for k in ks:
        shares = [pass_at_k(len(own), sum(r >= _RIGHT for r in own), k) for own in rewards if len(own) >= k]
        if shares:
            found.append((k, math.fsum(shares) / len(shares)))
    return tuple(found)


def _samples_of_a_prompt(sampled: Sequence[EvaluationRow]) -> int:
    return max((row.sample + 1 for row in sampled), default=0)


def _reward(row: EvaluationRow) -> float | None:
    return row.reward if row.reward is not None and math.isfinite(row.reward) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
