"""Every option that this project and verl both have."""

from __future__ import annotations

from dataclasses import replace

from verl.trainer.ppo import core_algos

from benchmarks.parity import batches, ours
from benchmarks.parity import verl_oracle as verl
from benchmarks.parity.batches import Variant, same
from benchmarks.parity.comparison import Case, Side
from benchmarks.parity.verl_oracle import VerlOptions
from consumers.objective import (
    AdvantageEstimator,
    Aggregation,
    CorrectionKind,
    KlEstimator,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    RatioLevel,
    RejectionDenominator,
)

PPO, VANILLA = ObjectiveSettings(), VerlOptions()
LENGTH = 16
PLAIN = ours.loss(PPO)
"""What an option has to differ from, or the row says nothing about it."""
UNCORRECTED = ours.loss(replace(PPO, denominator=RatioDenominator.PROXIMAL))
AGGREGATIONS = (
    (Aggregation.TOKEN_MEAN, "token-mean"),
    (Aggregation.SEQ_MEAN_TOKEN_MEAN, "seq-mean-token-mean"),
    (Aggregation.SEQ_MEAN_TOKEN_SUM, "seq-mean-token-sum"),
    (Aggregation.SEQ_SUM_CONSTANT, "seq-mean-token-sum-norm"),
)


def cases() -> list[Case]:
    """All of them, an explained one after its proof."""
    return [
        *_advantages(),
        *_objectives(),
        *_aggregations(),
        *_divergence(),
        *_weights(),
        *_masks(),
        *_entropy(),
    ]


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
        oracle="verl",
        ours=mine,
        theirs=theirs,
        plain=plain,
        variant=variant,
        explained=explained,
        proof=proof,
    )


def _advantages() -> list[Case]:
    group, leave_one_out = AdvantageEstimator.GROUP_MEAN_STD, AdvantageEstimator.LEAVE_ONE_OUT
    grpo = core_algos.compute_grpo_outcome_advantage
    vectorized = core_algos.compute_grpo_vectorized_outcome_advantage
    rloo = core_algos.compute_rloo_outcome_advantage
    plus_plus = verl.advantages(core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage)
    fine = ours.advantages(group, epsilon=1e-6)
    mean_only = ours.advantages(AdvantageEstimator.MEAN_ONLY)
    return [
        _case("advantage group_mean_std, sample, epsilon 1e-6", fine, verl.advantages(grpo)),
        _case("advantage group_mean_std (vectorized), epsilon 1e-6", fine, verl.advantages(vectorized)),
        _case(
            "advantage group_mean_std, each its default epsilon",
            ours.advantages(group),
            verl.advantages(grpo),
            explained="epsilon of the deviation",
            proof="advantage group_mean_std, sample, epsilon 1e-6",
        ),
        _case("advantage mean_only", mean_only, verl.advantages(grpo, norm_adv_by_std_in_grpo=False)),
        _case(
            "advantage mean_only (vectorized)", mean_only, verl.advantages(vectorized, norm_adv_by_std_in_grpo=False)
        ),
        _case("advantage leave_one_out", ours.advantages(leave_one_out), verl.advantages(rloo)),
        _case(
            "advantage leave_one_out (vectorized)",
            ours.advantages(leave_one_out),
            verl.advantages(core_algos.compute_rloo_vectorized_outcome_advantage),
        ),
        _case(
            "advantage batch_std, one group, one token a row",
            ours.advantages(AdvantageEstimator.BATCH_STD, epsilon=0.0),
            plus_plus,
            variant=batches.one_group_of_one_token,
        ),
        _case(
            "advantage batch_std",
            ours.advantages(AdvantageEstimator.BATCH_STD),
            plus_plus,
            explained="whitened deviations",
            proof="advantage batch_std, one group, one token a row",
        ),
        _case(
            "advantage, a failed reward",
            fine,
            verl.advantages(grpo),
            variant=batches.failed_reward,
            explained="failed reward",
            proof="advantage group_mean_std, sample, epsilon 1e-6",
        ),
        _case(
            "advantage, rewards 5e-7 apart, tolerance 0",
            ours.advantages(group, epsilon=1e-6, tolerance=0.0),
            verl.advantages(grpo),
            variant=batches.close_rewards,
        ),
        _case(
            "advantage, rewards 5e-7 apart",
            fine,
            verl.advantages(grpo),
            variant=batches.close_rewards,
            explained="zero-variance tolerance",
            proof="advantage, rewards 5e-7 apart, tolerance 0",
        ),
        _case(
            "divergence k1 in the reward, leave_one_out",
            ours.advantages(leave_one_out, kl_coefficient=0.1),
            verl.advantages(rloo, kl_coefficient=0.1),
        ),
    ]


def _objectives() -> list[Case]:
    sequence = replace(PPO, level=RatioLevel.SEQUENCE, clip_low=0.05, clip_high=0.05)
    gspo = replace(sequence, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    verl_sequence = replace(VANILLA, loss_mode="gspo", clip_ratio_low=0.05, clip_ratio_high=0.05)
    verl_gspo = replace(verl_sequence, loss_agg_mode="seq-mean-token-mean")
    cispo = replace(PPO, objective=Objective.CISPO, cispo_floor=0.8, cispo_cap=1.3)
    return [
        _case("ppo_clip 0.2/0.2", ours.loss(PPO), verl.loss(VANILLA)),
        _case(
            "ppo_clip 0.2/0.28",
            ours.loss(replace(PPO, clip_high=0.28)),
            verl.loss(replace(VANILLA, clip_ratio_high=0.28)),
            plain=PLAIN,
        ),
        _case(
            "dual_clip 3",
            ours.loss(replace(PPO, dual_clip=3.0)),
            verl.loss(replace(VANILLA, clip_ratio_c=3.0)),
            plain=PLAIN,
        ),
        _case(
            "ppo_clip, a token 21 nats away",
            ours.loss(PPO),
            verl.loss(replace(VANILLA, clip_ratio_c=1e12)),
            variant=batches.far_tokens,
        ),
        _case("sequence ratio, seq_mean_token_mean (gspo)", ours.loss(gspo), verl.loss(verl_gspo), plain=PLAIN),
        _case("sequence ratio, token_mean", ours.loss(sequence), verl.loss(verl_sequence), plain=PLAIN),
        _case(
            "sequence ratio, token advantages",
            ours.loss(sequence),
            verl.loss(verl_sequence),
            variant=batches.token_advantages,
            explained="token form of the sequence ratio",
            proof="sequence ratio, token_mean",
        ),
        _case(
            "sequence ratio, rows 12 nats a token away",
            ours.loss(gspo),
            verl.loss(verl_gspo),
            variant=batches.far_rows,
            explained="sequence clamp at 10",
            proof="sequence ratio, seq_mean_token_mean (gspo)",
        ),
        _case(
            "cispo floor 0.8 cap 1.3",
            ours.loss(cispo),
            verl.loss(replace(VANILLA, loss_mode="cispo", clip_ratio_high=0.3)),
            plain=PLAIN,
        ),
        _case(
            "reinforce",
            ours.loss(replace(PPO, objective=Objective.REINFORCE)),
            verl.reinforce(rollout_is=None),
            plain=PLAIN,
        ),
    ]


def _aggregations() -> list[Case]:
    found = []
    for aggregation, mode in AGGREGATIONS:
        settings = replace(PPO, aggregation=aggregation, constant_length=LENGTH)
        scale = LENGTH if aggregation is Aggregation.SEQ_SUM_CONSTANT else None
        options = replace(VANILLA, loss_agg_mode=mode, loss_scale_factor=scale)
        found += [
            _case(
                f"{aggregation}",
                ours.loss(settings),
                verl.loss(options),
                plain=None if aggregation is Aggregation.TOKEN_MEAN else PLAIN,
            ),
            _case(
                f"{aggregation}, a row without tokens",
                ours.loss(settings),
                verl.loss(options),
                variant=batches.dead_row,
            ),
            _case(
                f"{aggregation}, micro-batches of 3 rows",
                ours.loss(settings, micro_rows=3),
                verl.loss(options, micro_rows=3),
            ),
            _case(
                f"{aggregation}, 2 averaging ranks",
                ours.loss(settings, ranks=2),
                verl.loss(replace(options, dp_size=2)),
            ),
        ]
    return found


def _divergence() -> list[Case]:
    found = []
    for estimator, name in ((KlEstimator.K1, "kl"), (KlEstimator.K2, "mse"), (KlEstimator.K3, "low_var_kl")):
        mine = ours.loss(replace(PPO, kl_coefficient=0.1, kl_estimator=estimator))
        theirs = verl.loss(replace(VANILLA, kl_loss_type=name, kl_loss_coef=0.1))
        found += [
            _case(f"{estimator} in the loss", mine, theirs, plain=PLAIN, variant=batches.near_reference),
            _case(
                f"{estimator} in the loss, a reference 11 nats away",
                mine,
                theirs,
                variant=batches.far_reference,
                explained="divergence clamp",
                proof=f"{estimator} in the loss",
            ),
        ]
    return found


def _weights() -> list[Case]:
    reinforce = replace(PPO, objective=Objective.REINFORCE, correction=CorrectionKind.TOKEN_TIS)
    found = [
        _case(
            "reinforce and token_tis",
            ours.loss(reinforce),
            verl.reinforce(rollout_is="token"),
            plain=ours.loss(replace(PPO, objective=Objective.REINFORCE)),
        ),
        _case(
            "reinforce and token_tis, current policy for proximal (bypass)",
            ours.loss(reinforce, bypass=True),
            verl.reinforce(rollout_is="token", bypass=True),
            plain=ours.loss(reinforce),
        ),
    ]
    for kind, level, threshold in (
        (CorrectionKind.TOKEN_TIS, "token", 2.0),
        (CorrectionKind.SEQUENCE_TIS, "sequence", 2.0),
        (CorrectionKind.ICEPOP, "token", "0.6_3.0"),
        (CorrectionKind.MIS, "sequence", "0.6_3.0"),
    ):
        options = replace(VANILLA, decoupled=True, rollout_is=level, rollout_is_threshold=threshold)
        found.append(_case(f"{kind}, original", ours.loss(_decoupled(kind)), verl.loss(options), plain=UNCORRECTED))
    return found


def _masks() -> list[Case]:
    """verl's k1 statistics are of behaviour over proximal, so the same band is written as its reciprocal there."""
    found = []
    kept = RejectionDenominator.KEPT
    for kind, rule, weight in (
        (CorrectionKind.TOKEN_MASK, "token_k1", None),
        (CorrectionKind.SEQUENCE_MASK, "seq_sum_k1", None),
        (CorrectionKind.GEOMETRIC, "seq_mean_k1", None),
        (CorrectionKind.GEOMETRIC_TOKEN_TIS, "seq_mean_k1", "token"),
    ):
        # Row means stay close to 1: a band that rejects some of them.
        low, high = (0.9, 1.25) if rule == "seq_mean_k1" else (0.6, 3.0)
        inverse, verbatim = f"{1 / high}_{1 / low}", f"{low}_{high}"
        settings = replace(_decoupled(kind), band_low=low, band_high=high)
        options = replace(VANILLA, decoupled=True, rollout_is=weight, rollout_rs=rule, rollout_rs_threshold=inverse)
        mine = ours.loss(replace(settings, denominator_after_rejection=kept))
        found += [
            _case(f"{kind}, kept", mine, verl.loss(options), plain=UNCORRECTED),
            _case(
                f"{kind}, original", ours.loss(settings), verl.loss(replace(options, count_original=True)), plain=mine
            ),
            _case(
                f"{kind}, kept, the same numbers as band",
                mine,
                verl.loss(replace(options, rollout_rs_threshold=verbatim)),
                explained="band of the inverse ratio",
                proof=f"{kind}, kept",
            ),
        ]
    settings = replace(_decoupled(CorrectionKind.TOKEN_MASK), aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    options = replace(
        VANILLA,
        decoupled=True,
        rollout_rs="token_k1",
        rollout_rs_threshold=f"{1 / 3.0}_{1 / 0.6}",
        loss_agg_mode="seq-mean-token-mean",
    )
    name = f"{CorrectionKind.TOKEN_MASK}, seq_mean_token_mean"
    return [
        *found,
        _case(
            f"{name}, kept",
            ours.loss(replace(settings, denominator_after_rejection=kept)),
            verl.loss(options),
            plain=UNCORRECTED,
        ),
        _case(
            f"{name}, original",
            ours.loss(settings),
            verl.loss(replace(options, count_original=True)),
            explained="row length after rejection",
            proof=f"{name}, kept",
        ),
    ]


def _decoupled(kind: CorrectionKind) -> ObjectiveSettings:
    return replace(
        PPO,
        denominator=RatioDenominator.PROXIMAL,
        correction=kind,
        correction_cap=2.0,
        band_low=0.6,
        band_high=3.0,
    )


def _entropy() -> list[Case]:
    bonus = replace(PPO, entropy_coefficient=0.1)
    by_rows = replace(bonus, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    theirs = replace(VANILLA, entropy_coeff=0.1)
    return [
        _case("entropy bonus, token_mean", ours.loss(bonus), verl.loss(theirs), plain=PLAIN),
        _case(
            "entropy bonus, seq_mean_token_mean",
            ours.loss(by_rows),
            verl.loss(replace(theirs, loss_agg_mode="seq-mean-token-mean")),
        ),
    ]
