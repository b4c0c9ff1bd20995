"""Everything the maths can be told, as one value, and the five presets.

Guarantees that a value that exists is inside its ranges. Whether its parts go together depends on
the run (lag limit, minibatches, fingerprints) and is judged by legality.py. Knows no file or
format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from types import MappingProxyType

from consumers.objective.advantages import EPSILON, ZERO_VARIANCE_TOLERANCE
from consumers.objective.options import (
    AdvantageEstimator,
    Aggregation,
    CorrectionKind,
    KlEstimator,
    KlPlacement,
    Objective,
    RatioDenominator,
    RatioLevel,
    RejectionDenominator,
    StdKind,
)
from consumers.objective.shapes import InvalidSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """One objective, complete. Defaults are the preset grpo without its dual clip.

    Example: replace(DAPO, clip_high=0.3). Raises InvalidSetting, naming the field and its range.
    """

    objective: Objective = Objective.PPO_CLIP
    denominator: RatioDenominator = RatioDenominator.BEHAVIOUR
    """of the clip ratio; reinforce has none"""
    level: RatioLevel = RatioLevel.TOKEN

    clip_low: float = 0.2
    """lo in [0,1): the ratio is clipped below at 1 - lo"""
    clip_high: float = 0.2
    """hi >= 0: the ratio is clipped above at 1 + hi"""
    dual_clip: float | None = None
    """c > 1: the loss of a token with A < 0 is at most c * |A|; None: off"""
    two_sided_delta: float | None = None
    """delta > 1 + hi: the same purpose, inside the minimum; None: off"""
    cispo_cap: float = 5.0
    """> 0, an absolute ratio"""
    cispo_floor: float = 0.0
    """>= 0 and below the cap, an absolute ratio; 0: off"""

    correction: CorrectionKind = CorrectionKind.NONE
    correction_cap: float = 2.0
    """C > 0: largest weight, where the correction has a capped weight"""
    band_low: float = 0.5
    """>= 0: smallest accepted ratio, inclusive; without a mask it only reports"""
    band_high: float = 2.0
    """largest accepted ratio, inclusive"""
    denominator_after_rejection: RejectionDenominator = RejectionDenominator.ORIGINAL

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int | None = None
    """L, tokens, for seq_sum_constant; usually the generator's max_tokens"""

    advantage: AdvantageEstimator = AdvantageEstimator.GROUP_MEAN_STD
    std_kind: StdKind = StdKind.SAMPLE
    min_group: int = 2
    """>= 2 usable members, or the group is dropped"""
    advantage_epsilon: float = EPSILON
    zero_variance_tolerance: float = ZERO_VARIANCE_TOLERANCE

    kl_coefficient: float = 0.0
    """beta >= 0; 0 switches the divergence off (it is still measured where a reference is given)"""
    kl_estimator: KlEstimator = KlEstimator.K3
    kl_placement: KlPlacement = KlPlacement.LOSS
    kl_importance_weighted: bool = False
    """multiply the divergence in the loss by the constant token ratio theta/beh"""
    entropy_coefficient: float = 0.0
    """c_H >= 0: entropy bonus, subtracted from the loss"""

    def __post_init__(self) -> None:
        for field, kind in _CHOICES.items():
            value = getattr(self, field)
            if not isinstance(value, kind):
                words = ", ".join(kind)
                raise InvalidSetting(f'{field} must be one of {words}, is "{value}"')
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidSetting(f"{item.name} must be finite, is {value}")
        _require("clip_low", self.clip_low, 0 <= self.clip_low < 1, "in [0,1)")
        _require("clip_high", self.clip_high, self.clip_high >= 0, ">= 0")
        if self.dual_clip is not None:
            _require("dual_clip", self.dual_clip, self.dual_clip > 1, "> 1")
        if self.two_sided_delta is not None:
            above = self.two_sided_delta > 1 + self.clip_high
            _require("two_sided_delta", self.two_sided_delta, above, "> 1 + clip_high")
        _require("cispo_cap", self.cispo_cap, self.cispo_cap > 0, "> 0")
        floor_fits = 0 <= self.cispo_floor < self.cispo_cap
        _require("cispo_floor", self.cispo_floor, floor_fits, "in [0,cispo_cap)")
        _require("correction_cap", self.correction_cap, self.correction_cap > 0, "> 0")
        band_fits = 0 <= self.band_low <= self.band_high
        _require("band_low", self.band_low, band_fits, "in [0,band_high]")
        _require("min_group", self.min_group, self.min_group >= 2, ">= 2")
        if self.constant_length is not None:
            _require("constant_length", self.constant_length, self.constant_length >= 1, ">= 1")
        for field in _NOT_NEGATIVE:
            _require(field, getattr(self, field), getattr(self, field) >= 0, ">= 0")


_CHOICES: Mapping[str, type[StrEnum]] = {
    "objective": Objective,
    "denominator": RatioDenominator,
    "level": RatioLevel,
    "correction": CorrectionKind,
    "denominator_after_rejection": RejectionDenominator,
    "aggregation": Aggregation,
    "advantage": AdvantageEstimator,
    "std_kind": StdKind,
    "kl_estimator": KlEstimator,
    "kl_placement": KlPlacement,
}

_NOT_NEGATIVE = (
    "kl_coefficient",
    "entropy_coefficient",
    "advantage_epsilon",
    "zero_variance_tolerance",
)


def _require(name: str, value: float, holds: bool, meaning: str) -> None:
    if not holds:
        raise InvalidSetting(f"{name} must be {meaning}, is {value}")


GRPO = ObjectiveSettings(dual_clip=3.0)
"""Shao et al. 2024, with three departures: token_mean, KL off, dual clip for stale tokens."""

DR_GRPO = ObjectiveSettings(advantage=AdvantageEstimator.MEAN_ONLY, aggregation=Aggregation.SEQ_SUM_CONSTANT)
"""Liu et al. 2025: no division by the spread or by the length. Needs constant_length."""

DAPO = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
"""Yu et al. 2025: higher upper bound, token_mean. Filter and overlong rule: the trainer."""

GSPO = ObjectiveSettings(
    level=RatioLevel.SEQUENCE,
    clip_low=3e-4,
    clip_high=4e-4,
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
)
"""Zheng et al. 2025. The narrow band presumes policy lag 0."""

DECOUPLED = ObjectiveSettings(denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.TOKEN_TIS)
"""Hilton et al. 2021, Fu et al. 2025 (AReaL): clip against the step's start, weigh the rest."""

PRESETS: Mapping[str, ObjectiveSettings] = MappingProxyType(
    {"grpo": GRPO, "dr_grpo": DR_GRPO, "dapo": DAPO, "gspo": GSPO, "decoupled": DECOUPLED}
)


def preset(name: str, **changes: object) -> ObjectiveSettings:
    """A preset by name, some fields changed. Raises InvalidSetting for an unknown name or field."""
    if name not in PRESETS:
        raise InvalidSetting(f'preset must be one of {", ".join(PRESETS)}, is "{name}"')
    unknown = changes.keys() - {item.name for item in fields(ObjectiveSettings)}
    if unknown:
        raise InvalidSetting(f"ObjectiveSettings has no field {', '.join(sorted(unknown))}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
