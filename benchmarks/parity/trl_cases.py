"""Every option that this project and TRL both have."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.parity import batches, ours
from benchmarks.parity import trl_oracle as trl
from benchmarks.parity.batches import Variant, same
from benchmarks.parity.comparison import Case, Side
from benchmarks.parity.trl_oracle import TrlOptions
from consumers.objective import (
    AdvantageEstimator,
    Aggregation,
    CorrectionKind,
    KlEstimator,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    RatioLevel,
)

PPO, DAPO = ObjectiveSettings(), TrlOptions()
LENGTH = 16
PLAIN = ours.loss(PPO)
"""What an option has to differ from, or the row says nothing about it."""
UNCORRECTED = ours.loss(replace(PPO, denominator=RatioDenominator.PROXIMAL))
AGGREGATIONS = (
    (Aggregation.TOKEN_MEAN, "dapo"),
    (Aggregation.SEQ_MEAN_TOKEN_MEAN, "grpo"),
    (Aggregation.SEQ_MEAN_TOKEN_SUM, "luspo"),
    (Aggregation.SEQ_SUM_CONSTANT, "dr_grpo"),
)


def cases() -> list[Case]:
    """All of them, an explained one after its proof."""
    return [*_advantages(), *_objectives(), *_aggregations(), *_divergence(), *_corrections(), *_entropy()]


def _case(
    option: str,
    mine: Side,
    theirs: Side,
    *,
    plain: Side | None = None,
    variant: Variant = same,
    explained: str = "",
    proof: str = "",
) -> Case:
    return Case(
        option=option,
        oracle="trl",
        ours=mine,
        theirs=theirs,
        plain=plain,
        variant=variant,
        explained=explained,
        proof=proof,
    )


def _advantages() -> list[Case]:
    group, leave_one_out = AdvantageEstimator.GROUP_MEAN_STD, AdvantageEstimator.LEAVE_ONE_OUT
    scale = {name: trl.advantages(TrlOptions(scale_rewards=name)) for name in ("group", "batch", "none")}
    rloo = trl.rloo_advantages()
    return [
        _case("advantage group_mean_std, sample", ours.advantages(group), scale["group"]),
        _case("advantage batch_std, sample", ours.advantages(AdvantageEstimator.BATCH_STD), scale["batch"]),
        _case("advantage mean_only", ours.advantages(AdvantageEstimator.MEAN_ONLY), scale["none"]),
        _case("advantage leave_one_out", ours.advantages(leave_one_out), rloo),
        _case(
            "advantage, a failed reward: the others",
            ours.advantages(group, failed_as_zero=True),
            scale["group"],
            variant=batches.failed_reward,
        ),
        _case(
            "advantage, a failed reward: itself",
            ours.advantages(group),
            scale["group"],
            variant=batches.failed_reward,
            explained="failed reward",
            proof="advantage, a failed reward: the others",
        ),
        _case(
            "leave_one_out, a failed reward: the others",
            ours.advantages(leave_one_out, failed_as_zero=True),
            rloo,
            variant=batches.failed_reward,
        ),
        _case(
            "advantage, rewards 5e-7 apart, tolerance 0",
            ours.advantages(group, tolerance=0.0),
            scale["group"],
            variant=batches.close_rewards,
        ),
        _case(
            "advantage, rewards 5e-7 apart",
            ours.advantages(group),
            scale["group"],
            variant=batches.close_rewards,
            explained="zero-variance tolerance",
            proof="advantage, rewards 5e-7 apart, tolerance 0",
        ),
        _case(
            "divergence k1 in the reward, leave_one_out",
            ours.advantages(leave_one_out, kl_coefficient=0.1),
            trl.rloo_advantages(beta=0.1),
        ),
    ]


def _objectives() -> list[Case]:
    sequence = replace(PPO, level=RatioLevel.SEQUENCE, clip_low=0.05, clip_high=0.05)
    gspo = replace(sequence, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    trl_sequence = replace(DAPO, importance_sampling_level="sequence", epsilon=0.05, epsilon_high=0.05)
    trl_gspo = replace(trl_sequence, loss_type="grpo")
    product = replace(gspo, level=RatioLevel.SEQUENCE_SUM, clip_low=0.2, clip_high=0.2)
    cispo = replace(PPO, objective=Objective.CISPO, cispo_cap=1.3)
    return [
        _case("ppo_clip 0.2/0.2", ours.loss(PPO), trl.loss(DAPO)),
        _case(
            "ppo_clip 0.2/0.28",
            ours.loss(replace(PPO, clip_high=0.28)),
            trl.loss(replace(DAPO, epsilon_high=0.28)),
            plain=PLAIN,
        ),
        _case(
            "two_sided_delta 2",
            ours.loss(replace(PPO, two_sided_delta=2.0)),
            trl.loss(replace(DAPO, delta=2.0)),
            plain=PLAIN,
        ),
        _case(
            "ppo_clip, a token 21 nats away",
            ours.loss(PPO),
            trl.loss(DAPO),
            variant=batches.far_tokens,
            explained="exponent clamp",
            proof="ppo_clip 0.2/0.2",
        ),
        _case("sequence ratio, seq_mean_token_mean (gspo)", ours.loss(gspo), trl.loss(trl_gspo), plain=PLAIN),
        _case("sequence ratio, token_mean", ours.loss(sequence), trl.loss(trl_sequence), plain=PLAIN),
        _case(
            "sequence ratio, token advantages",
            ours.loss(sequence),
            trl.loss(trl_sequence),
            variant=batches.token_advantages,
        ),
        _case("sequence_sum ratio", ours.loss(product), trl.rloo_loss(), plain=ours.loss(gspo)),
        _case(
            "cispo cap 1.3", ours.loss(cispo), trl.loss(replace(DAPO, loss_type="cispo", epsilon_high=1.3)), plain=PLAIN
        ),
    ]


def _aggregations() -> list[Case]:
    found = []
    for aggregation, loss_type in AGGREGATIONS:
        settings = replace(PPO, aggregation=aggregation, constant_length=LENGTH)
        mine, theirs = ours.loss(settings), trl.loss(replace(DAPO, loss_type=loss_type))
        by_rows = aggregation is not Aggregation.TOKEN_MEAN
        found.append(_case(f"{aggregation}", mine, theirs, plain=PLAIN if by_rows else None))
        dead = {"explained": "rows without tokens", "proof": f"{aggregation}"} if by_rows else {}
        found.append(_case(f"{aggregation}, a row without tokens", mine, theirs, variant=batches.dead_row, **dead))
    bnpo = replace(DAPO, loss_type="bnpo")
    found += [
        _case("token_mean, micro-batches of 3 rows", ours.loss(PPO, micro_rows=3), trl.loss(DAPO, micro_rows=3)),
        _case("token_mean (bnpo)", ours.loss(PPO), trl.loss(bnpo)),
        _case(
            "token_mean (bnpo), micro-batches of 3 rows",
            ours.loss(PPO, micro_rows=3),
            trl.loss(bnpo, micro_rows=3),
            explained="mean of micro-batch means",
            proof="token_mean (bnpo)",
        ),
    ]
    return found


def _divergence() -> list[Case]:
    k3 = replace(PPO, kl_coefficient=0.1, kl_estimator=KlEstimator.K3)
    with_beta = replace(DAPO, beta=0.1)
    corrected = trl.loss(replace(with_beta, use_bias_correction_kl=True))
    return [
        _case("k3 in the loss", ours.loss(k3), trl.loss(with_beta), plain=PLAIN, variant=batches.near_reference),
        _case(
            "k3 in the loss, a reference 11 nats away",
            ours.loss(k3),
            trl.loss(with_beta),
            variant=batches.far_reference,
            explained="divergence clamp",
            proof="k3 in the loss",
        ),
        _case(
            "k3 times theta/beh, the ratio not constant",
            ours.divergence_with_ratio_gradient(PPO),
            corrected,
            variant=batches.near_reference,
        ),
        _case(
            "k3 times theta/beh (kl_importance_weighted)",
            ours.loss(replace(k3, kl_importance_weighted=True)),
            corrected,
            variant=batches.near_reference,
            explained="gradient of the divergence's ratio",
            proof="k3 times theta/beh, the ratio not constant",
        ),
    ]


def _corrections() -> list[Case]:
    found = []
    for kind, mode, low, high in (
        (CorrectionKind.TOKEN_TIS, "token_truncate", None, 2.0),
        (CorrectionKind.SEQUENCE_TIS, "sequence_truncate", None, 2.0),
        (CorrectionKind.ICEPOP, "token_mask", 0.6, 3.0),
        (CorrectionKind.MIS, "sequence_mask", 0.6, 3.0),
    ):
        settings = replace(
            PPO,
            denominator=RatioDenominator.PROXIMAL,
            correction=kind,
            correction_cap=2.0,
            band_low=0.6,
            band_high=3.0,
        )
        options = replace(DAPO, vllm_importance_sampling_mode=mode, clip_min=low, clip_max=high)
        found.append(_case(f"{kind}, original", ours.loss(settings), trl.loss(options), plain=UNCORRECTED))
        mine = ours.loss(replace(settings, kl_coefficient=0.1))
        rejects = low is not None
        named = {"explained": "divergence of rejected tokens", "proof": f"{kind}, original"} if rejects else {}
        theirs = trl.loss(replace(options, beta=0.1))
        found.append(
            _case(f"{kind} and k3", mine, theirs, plain=ours.loss(settings), variant=batches.near_reference, **named)
        )
    return found


def _entropy() -> list[Case]:
    bonus = replace(PPO, entropy_coefficient=0.1)
    by_rows = replace(bonus, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    theirs = replace(DAPO, entropy_coef=0.1)
    return [
        _case("entropy bonus, token_mean", ours.loss(bonus), trl.loss(theirs), plain=PLAIN),
        _case(
            "entropy bonus, seq_mean_token_mean",
            ours.loss(by_rows),
            trl.loss(replace(theirs, loss_type="grpo")),
            explained="entropy over tokens",
            proof="entropy bonus, token_mean",
        ),
    ]
