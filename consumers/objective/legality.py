"""Which settings may go together, judged once at start-up.

Guarantees that no pair of settings that is known to train something else than it says gets past the
start. Warnings are returned as text: this package writes no logs.
"""

from __future__ import annotations

from consumers.objective.corrections import has_mask, has_weight
from consumers.objective.options import (
    Aggregation,
    CorrectionKind,
    KlEstimator,
    KlPlacement,
    Objective,
    RatioDenominator,
    RatioLevel,
)
from consumers.objective.settings import ObjectiveSettings
from consumers.objective.shapes import IllegalCombination, InvalidSetting

NARROW_CLIP = 0.01
"""Bounds below it are meant for row ratios of fresh data (GSPO uses 3e-4 and 4e-4)."""


def check_legal(
    settings: ObjectiveSettings,
    *,
    epochs_times_minibatches: int,
    max_lag: int,
    fingerprint_differs: bool,
) -> tuple[str, ...]:
    """Refuse settings that contradict each other; return what is legal but worth knowing.

    epochs_times_minibatches: optimizer steps in one training step, >= 1. max_lag: the largest
    policy lag that is trained, in training steps (hard_max_lag where down-weighting is on).
    fingerprint_differs: generators use another precision or engine than the trainer. The table is
    in docs/objectives.md.

    Returns warnings, one sentence each. Raises IllegalCombination, InvalidSetting.
    """
    if epochs_times_minibatches < 1:
        raise InvalidSetting(f"epochs_times_minibatches must be >= 1, is {epochs_times_minibatches}")
    if max_lag < 0:
        raise InvalidSetting(f"max_lag must be >= 0, is {max_lag}")
    off_policy = max_lag > 0 or fingerprint_differs
    _refuse_double_count(settings)
    _refuse_unused_behaviour(settings, epochs_times_minibatches, off_policy, max_lag)
    _refuse_kl(settings)
    if settings.aggregation is Aggregation.SEQ_SUM_CONSTANT and settings.constant_length is None:
        raise IllegalCombination(
            "aggregation seq_sum_constant",
            "constant_length unset",
            "the constant must be given, usually the generator's max_tokens",
        )
    return (
        *_ratio_warnings(settings, max_lag),
        *_lag_warnings(settings, epochs_times_minibatches, off_policy),
        *_idle_settings(settings),
    )


def _refuse_double_count(settings: ObjectiveSettings) -> None:
    ratio_used = settings.objective is not Objective.REINFORCE
    over_behaviour = settings.denominator is RatioDenominator.BEHAVIOUR
    if ratio_used and over_behaviour and has_weight(settings.correction):
        raise IllegalCombination(
            f"{settings.objective} with denominator behaviour",
            f"correction {settings.correction}",
            "theta/beh already contains prox/beh, the weight would count it twice; use denominator "
            "proximal, or a correction that only masks",
        )


def _refuse_unused_behaviour(settings: ObjectiveSettings, steps: int, off_policy: bool, max_lag: int) -> None:
    if not off_policy or settings.correction is not CorrectionKind.NONE:
        return
    cause = f"max_lag {max_lag}" if max_lag > 0 else "differing fingerprints"
    if settings.objective is Objective.REINFORCE:
        raise IllegalCombination(
            "reinforce with correction none",
            cause,
            "stored behaviour log-probabilities unused: old data would be taken for fresh; set "
            "correction token_tis or another weight",
        )
    if settings.denominator is RatioDenominator.PROXIMAL and steps == 1:
        raise IllegalCombination(
            "denominator proximal with correction none",
            f"epochs x minibatches = 1 and {cause}",
            "ratio would be 1: stored behaviour log-probabilities unused; set a correction, or denominator behaviour",
        )


def _refuse_kl(settings: ObjectiveSettings) -> None:
    if settings.kl_coefficient == 0:
        return
    in_loss = settings.kl_placement is KlPlacement.LOSS
    if in_loss and settings.kl_estimator is KlEstimator.K1:
        raise IllegalCombination(
            "kl_placement loss",
            "kl_estimator k1",
            "its expected gradient is 0, so it adds only noise; use k2 or k3, or the reward",
        )
    if not in_loss and settings.kl_estimator is not KlEstimator.K1:
        raise IllegalCombination(
            "kl_placement reward",
            f"kl_estimator {settings.kl_estimator}",
            "its gradient is biased there; use k1 in the reward, or put it in the loss",
        )
    if not in_loss and settings.kl_importance_weighted:
        raise IllegalCombination(
            "kl_placement reward",
            "kl_importance_weighted true",
            "the ratio multiplies a divergence in the loss only",
        )


def _ratio_warnings(settings: ObjectiveSettings, max_lag: int) -> list[str]:
    warnings: list[str] = []
    if settings.objective is Objective.REINFORCE:
        return warnings
    if settings.level is RatioLevel.SEQUENCE_SUM:
        warnings.append(
            "level sequence_sum: the ratio is a product over the row, its spread grows with "
            "length; level sequence is the normalised form"
        )
    narrow = max(settings.clip_low, settings.clip_high) < NARROW_CLIP
    clips = settings.objective is Objective.PPO_CLIP
    if clips and narrow and max_lag > 0:
        warnings.append(
            f"clip {settings.clip_low}/{settings.clip_high} presumes lag 0: at max_lag {max_lag} nearly "
            "every row clips; watch clipfrac"
        )
    return warnings


def _lag_warnings(settings: ObjectiveSettings, steps: int, off_policy: bool) -> list[str]:
    warnings: list[str] = []
    if steps > 1:
        warnings.append(
            f"epochs x minibatches = {steps}: drift inside a training step is not covered by "
            "max_lag, which counts training steps"
        )
    masks_only = has_mask(settings.correction) and not has_weight(settings.correction)
    over_proximal = settings.denominator is RatioDenominator.PROXIMAL and steps == 1
    if off_policy and masks_only and (settings.objective is Objective.REINFORCE or over_proximal):
        warnings.append(
            f"correction {settings.correction} only rejects: what it accepts is trained as if it were fresh"
        )
    kl_in_loss = settings.kl_coefficient > 0 and settings.kl_placement is KlPlacement.LOSS
    if off_policy and kl_in_loss and not settings.kl_importance_weighted:
        warnings.append(
            f"{settings.kl_estimator} in the loss is biased on older data; kl_importance_weighted removes that"
        )
    return warnings


def _idle_settings(settings: ObjectiveSettings) -> list[str]:
    warnings: list[str] = []
    if settings.objective is not Objective.PPO_CLIP:
        for name in ("dual_clip", "two_sided_delta"):
            if getattr(settings, name) is not None:
                warnings.append(f"{name} has no effect with objective {settings.objective}")
    elif settings.dual_clip is not None and settings.two_sided_delta is not None:
        warnings.append("dual_clip and two_sided_delta are both set: the smaller bound binds")
    uses_constant = settings.aggregation is Aggregation.SEQ_SUM_CONSTANT
    if settings.constant_length is not None and not uses_constant:
        warnings.append(f"constant_length has no effect with aggregation {settings.aggregation}")
    return warnings
