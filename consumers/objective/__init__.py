"""The maths of training: tensors in, tensors out. Imports torch and nothing else of this project.

Specification and every metric in docs/objectives.md. The call of a training step:

    denominators = step_denominators(proximal, behaviour, mask, settings)     # all rows of the step
    for rows in micro_batches:
        outputs = policy_loss(LossInputs(...), settings, denominators)
        outputs.loss.backward()                                               # shares add up
        tally = tally + outputs.tally                                         # and so do statistics
    check_step(tally, settings, denominators)
    if not denominators.skipped: ...                                          # clip, optimizer step
"""

from consumers.objective.advantages import Advantages, group_advantages, rewards_from
from consumers.objective.aggregation import Denominators, aggregate, count_denominators
from consumers.objective.corrections import (
    Correction,
    Mismatch,
    correct,
    mismatch_ratios,
    staleness_weights,
)
from consumers.objective.gradients import clip_gradients, gradient_norm
from consumers.objective.guards import WorstToken, check_step, worst_fresh_token
from consumers.objective.inputs import LossInputs, check_inputs
from consumers.objective.kl import KlTerms, kl_in_reward, kl_terms
from consumers.objective.legality import check_legal
from consumers.objective.logprobs import (
    CHUNK_TOKENS,
    TokenLogprobs,
    scatter_to_rows,
    score_logprobs,
    token_logprobs,
)
from consumers.objective.loss import LossOutputs, policy_loss, step_denominators
from consumers.objective.objectives import cispo_loss, ppo_clip_loss, reinforce_loss
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
from consumers.objective.ratios import Ratio, importance_ratio
from consumers.objective.settings import PRESETS, ObjectiveSettings, preset
from consumers.objective.shapes import (
    DenominatorMismatch,
    GroupingError,
    IllegalCombination,
    InvalidSetting,
    NegativeDivergence,
    NonFinite,
    ObjectiveError,
    RecomputedBehaviour,
    ShapeError,
    length_mask,
    sel,
    training_mask,
)
from consumers.objective.statistics import METRICS, Tally, percentiles, step_metrics

__all__ = [
    "CHUNK_TOKENS",
    "METRICS",
    "PRESETS",
    "AdvantageEstimator",
    "Advantages",
    "Aggregation",
    "Correction",
    "CorrectionKind",
    "DenominatorMismatch",
    "Denominators",
    "GroupingError",
    "IllegalCombination",
    "InvalidSetting",
    "KlEstimator",
    "KlPlacement",
    "KlTerms",
    "LossInputs",
    "LossOutputs",
    "Mismatch",
    "NegativeDivergence",
    "NonFinite",
    "Objective",
    "ObjectiveError",
    "ObjectiveSettings",
    "Ratio",
    "RatioDenominator",
    "RatioLevel",
    "RecomputedBehaviour",
    "RejectionDenominator",
    "ShapeError",
    "StdKind",
    "Tally",
    "TokenLogprobs",
    "WorstToken",
    "aggregate",
    "check_inputs",
    "check_legal",
    "check_step",
    "cispo_loss",
    "clip_gradients",
    "correct",
    "count_denominators",
    "gradient_norm",
    "group_advantages",
    "importance_ratio",
    "kl_in_reward",
    "kl_terms",
    "length_mask",
    "mismatch_ratios",
    "percentiles",
    "policy_loss",
    "ppo_clip_loss",
    "preset",
    "reinforce_loss",
    "rewards_from",
    "scatter_to_rows",
    "score_logprobs",
    "sel",
    "staleness_weights",
    "step_denominators",
    "step_metrics",
    "token_logprobs",
    "training_mask",
    "worst_fresh_token",
]
