"""The closed sets of choices. The words are those of the configuration file and of the metrics."""

from __future__ import annotations

from enum import StrEnum


class Objective(StrEnum):
    """What is done to each token; see objectives.py."""

    REINFORCE = "reinforce"
    PPO_CLIP = "ppo_clip"
    CISPO = "cispo"


class RatioDenominator(StrEnum):
    """What the current policy is divided by in the clip ratio."""

    BEHAVIOUR = "behaviour"
    """the stored log-probabilities of the policy that sampled"""
    PROXIMAL = "proximal"
    """the weights at the start of the training step"""


class RatioLevel(StrEnum):
    """Over what the log ratio is taken; see ratios.py."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """mean over the row's counted tokens: the geometric mean of the token ratios"""
    SEQUENCE_SUM = "sequence_sum"
    """sum over the row: the product; its spread grows with length"""


class CorrectionKind(StrEnum):
    """What is done about trainer and generator disagreeing; see corrections.py."""

    NONE = "none"
    TOKEN_TIS = "token_tis"
    """weight: token ratio, capped"""
    SEQUENCE_TIS = "sequence_tis"
    """weight: product over the row, capped"""
    ICEPOP = "icepop"
    """weight: token ratio; tokens outside the band are rejected"""
    MIS = "mis"
    """weight: product over the row; rows outside the band are rejected"""
    GEOMETRIC = "geometric"
    """no weight; rows whose geometric mean is outside the band are rejected"""
    GEOMETRIC_TOKEN_TIS = "geometric_token_tis"
    """the row mask of GEOMETRIC, and inside it the weight of TOKEN_TIS"""
    TOKEN_MASK = "token_mask"
    """the mask of ICEPOP without its weight"""
    SEQUENCE_MASK = "sequence_mask"
    """the mask of MIS without its weight"""


class RejectionDenominator(StrEnum):
    """Whether rejected tokens stay in the denominators of the loss."""

    ORIGINAL = "original"
    KEPT = "kept"


class Aggregation(StrEnum):
    """How token losses become one number; see aggregation.py."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    SEQ_SUM_CONSTANT = "seq_sum_constant"


class AdvantageEstimator(StrEnum):
    """How rewards become advantages; see advantages.py."""

    GROUP_MEAN_STD = "group_mean_std"
    LEAVE_ONE_OUT = "leave_one_out"
    MEAN_ONLY = "mean_only"
    BATCH_STD = "batch_std"


class StdKind(StrEnum):
    """The divisor of the variance."""

    SAMPLE = "sample"
    """n - 1"""
    POPULATION = "population"
    """n"""


class KlEstimator(StrEnum):
    """Which estimate of the divergence from the reference policy; see kl.py."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class KlPlacement(StrEnum):
    """Where the divergence acts."""

    LOSS = "loss"
    REWARD = "reward"
