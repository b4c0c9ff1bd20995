"""Which logged statistics the log can repeat to the last bit, and why the others cannot be. One table, one place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from consumers.objective.corrections import has_mask
from consumers.trainer.learner_settings import LearnerSettings

_FROM_ROWS = (
    "critic/rewards", "critic/advantages", "group/", "policy_lag", "age_seconds", "response_length", "prompt_length",
    "samples_per_version", "reward_by_", "replay/rows", "training/row_weight_mean", "dropped",
)  # fmt: skip
_FROM_SCORES = ("mismatch/", "training/tokens", "training/rows", "actor/rejected_fraction")
_FROM_FIRST_PASS = (
    "actor/ppo_kl", "actor/ratio_", "actor/log_ratio_", "actor/pg_clipfrac", "actor/clipfrac_", "actor/cispo_",
    "actor/kl_ref_", "actor/pg_loss",
)  # fmt: skip

NEVER: tuple[tuple[str, str], ...] = (
    (r"actor/(ppo_kl|pg_clipfrac)_last", "of the last optimizer step, whose weights were never stored"),
    (r"actor/grad_norm", "of a backward pass: `driftlog replay` makes it"),
    (r"actor/entropy", "over the whole vocabulary; only the sampled token's log-probability is stored"),
    (r"actor/lr|training/optimizer_steps.*|training/skipped_in_row|skipped_step", "of the optimizer's state"),
    (r"reference/version", "of the learner's state"),
    (r"critic/kl_in_reward", "its scores were made in another pass than those stored"),
    (r"trainer/.*", "a measured time"),
)
"""(names, why): no log holds what they were made from"""

FIRST_PASS_STORED = (
    "the loss and its ratios are exact where the scores of the step are those of its only forward pass: one optimizer "
    "step a training step, and no separate scoring before it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Whether one statistic of one step can be repeated exactly."""

    exact: bool
    why_not: str = ""


def never_known(name: str) -> str:
    """Why no log holds what this metric was made from; "" for the others."""
    return next((why for pattern, why in NEVER if re.fullmatch(pattern, name)), "")


def knowledge(name: str, settings: LearnerSettings, *, ranks: int = 1) -> Knowledge:
    """What the log knows of a metric that was logged under these settings.

    >>> knowledge("mismatch/raw_ess", LearnerSettings()).exact
    True
    >>> knowledge("actor/grad_norm", LearnerSettings()).why_not
    'of a backward pass: `driftlog replay` makes it'
    """
    why = never_known(name)
    if why:
        return Knowledge(exact=False, why_not=why)
    if name.startswith("critic/advantages") and settings.kl_in_reward:
        return Knowledge(exact=False, why_not="rewards were lowered by a divergence that is not stored")
    if name.startswith(_FROM_ROWS):
        return Knowledge(exact=True)
    if not name.startswith(_FROM_SCORES + _FROM_FIRST_PASS):
        return Knowledge(exact=False, why_not="not known to this command")
    if settings.device != "cpu":
        return Knowledge(exact=False, why_not=f"summed on {settings.device}, in another order")
    if ranks > 2:
        return Knowledge(exact=False, why_not=f"summed over {ranks} processes, in an order nobody recorded")
    if name.startswith(_FROM_SCORES):
        return Knowledge(exact=True)
    return _first_pass(name, settings, ranks)


def _first_pass(name: str, settings: LearnerSettings, ranks: int) -> Knowledge:
    if settings.optimizer_steps > 1:
        return Knowledge(exact=False, why_not="scores are of a pass before the first optimizer step, in other batches")
    if has_mask(settings.objective.correction):
        return Knowledge(exact=False, why_not="a mask may need a scoring pass of its own before the update")
    if ranks > 1:
        return Knowledge(exact=False, why_not="the loss was summed over several processes")
    if name == "actor/pg_loss" and settings.objective.entropy_coefficient > 0:
        return Knowledge(exact=False, why_not="the entropy bonus is in it, and entropies are not stored")
    return Knowledge(exact=True)


@dataclass(slots=True)
class Reproduced:
    """One statistic over the run. Mutable."""

    exact: bool = True
    why_not: str = ""
    compared: int = 0
    different: int = 0
    largest_difference: float = 0.0
    first_difference: str = ""
    not_computed: int = 0
    """steps where it was logged and cannot be computed here"""


@dataclass(slots=True)
class Reproduction:
    """How far the log repeats what was logged, under the run's own settings. Mutable."""

    statistics: dict[str, Reproduced] = field(default_factory=dict)
    decisions: int = 0
    """about groups and trajectories, derived again"""
    carried_over: Counter[str] = field(default_factory=Counter)
    """reason -> decisions that follow from no rule"""
    different: list[str] = field(default_factory=list)
    """the first decisions that are not derived again"""
    different_count: int = 0
    partial_steps: int = 0
    """steps with rows whose scores are not stored (replayed ones): their ratios were not compared"""

    def differs(self, words: str) -> None:
        """A decision that its own rules do not repeat."""
        self.different_count += 1
        if len(self.different) < 20:
            self.different.append(words)

    def compare(
        self,
        version: int,
        logged: Mapping[str, float],
        again: Mapping[str, float],
        settings: LearnerSettings,
        *,
        ranks: int,
        scores_are_whole: bool,
    ) -> None:
        """One step's logged metrics against the same ones computed anew."""
        self.partial_steps += not scores_are_whole
        for name, value in logged.items():
            known = knowledge(name, settings, ranks=ranks)
            at = self.statistics.setdefault(name, Reproduced())
            if not known.exact:
                at.exact, at.why_not = False, known.why_not
            if not scores_are_whole and name.startswith(_FROM_SCORES + _FROM_FIRST_PASS):
                at.not_computed += 1
                continue
            if name not in again:
                at.not_computed += 1
                if known.exact:
                    self._note(at, version, f"logged {value!r}, not computed here")
                continue
            at.compared += 1
            if again[name] != value:
                at.largest_difference = max(at.largest_difference, abs(again[name] - value))
                self._note(at, version, f"logged {value!r}, now {again[name]!r}")

    def _note(self, at: Reproduced, version: int, words: str) -> None:
        at.different += 1
        at.first_difference = at.first_difference or f"version {version}: {words}"

    @property
    def failed(self) -> bool:
        """Something that must be repeated exactly is not."""
        return self.different_count > 0 or any(s.exact and s.different for s in self.statistics.values())
