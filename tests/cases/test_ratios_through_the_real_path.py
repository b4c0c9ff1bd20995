"""Families c and d: ratios, corrections, divergence, lag: from the bytes of a record to the update of the weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumers.objective.options import (
    AdvantageEstimator,
    Aggregation,
    CorrectionKind,
    KlEstimator,
    KlPlacement,
    RatioDenominator,
    RatioLevel,
    RejectionDenominator,
)
from consumers.objective.settings import GRPO, ObjectiveSettings
from schemas.errors import ConfigError, StepRefused
from schemas.trajectory import Trajectory
from tests.cases.real_path import RealPath, Trained, unlikely
from tests.fakes.policy_rows import moved_directory, tiny_directory

PLUS_MINUS_ONE = ObjectiveSettings(advantage=AdvantageEstimator.LEAVE_ONE_OUT)
"""Rewards 1 and 0 of a group of two give advantages of exactly +1 and -1."""
OVER_PROXIMAL = replace(PLUS_MINUS_ONE, denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.TOKEN_TIS)


def alone(path: RealPath, log_ratios: list[float], *, reward: float = 1.0) -> list[Trajectory]:
    """A group of which only the first member has tokens that count; its advantage is +1 (reward 1) or -1."""
    first = path.row(0, 0, unlikely(len(log_ratios)), reward, log_ratios=log_ratios)
    silent = path.row(0, 1, unlikely(2, 1), 1.0 - reward)
    nothing = np.zeros(2, dtype=np.bool_)
    return [first, replace(silent, loss_mask=nothing, logprobs=np.zeros(2, dtype=np.float32))]


def fixed(path: RealPath, ratio: float, reward: float, group: int) -> list[Trajectory]:
    """The same with one token of that ratio, in a group of its own."""
    rows = alone(path, [math.log(ratio)], reward=reward)
    named = path.row(group, 0, unlikely(1), reward), path.row(group, 1, unlikely(2, 1), 1.0 - reward)
    return [
        replace(row, group_id=like.group_id, trajectory_id=like.trajectory_id)
        for row, like in zip(rows, named, strict=True)
    ]


@pytest.mark.parametrize(
    ("reward", "dual_clip", "loss"),
    [(1.0, None, -1.28), (0.0, 3.0, 3.0), (0.0, None, math.exp(20))],
)
def test_c27_a_log_ratio_of_120_stays_finite_and_is_counted(
    reward: float, dual_clip: float | None, loss: float
) -> None:
    path = RealPath(replace(PLUS_MINUS_ONE, clip_high=0.28, dual_clip=dual_clip))

    trained = path.train(alone(path, [120.0], reward=reward))

    assert trained.metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-6)
    assert trained.metrics["actor/log_ratio_clamped_fraction"] == 1.0
    assert trained.metrics["actor/grad_norm"] == 0.0
    assert trained.is_finite()
    assert trained.largest_move() == 0.0


def test_c27_equal_rewards_make_an_overflowing_ratio_contribute_exactly_nothing() -> None:
    path = RealPath(GRPO)

    trained = path.train([path.row(0, i, unlikely(2, i), 1.0, log_ratios=[120.0, 0.0]) for i in range(2)])

    assert trained.metrics["actor/pg_loss"] == 0.0
    assert trained.largest_move() == 0.0


def test_c27_a_nan_is_not_masked_the_step_is_refused_with_the_sample_named() -> None:
    path = RealPath(GRPO)
    rows = alone(path, [0.0, 0.0])
    path.train(rows)
    with torch.no_grad():
        path.learner._loaded().policy.model.get_output_embeddings().weight[unlikely(2)[0]] = math.nan

    with pytest.raises(
        StepRefused, match=r"training on version 0: theta is not finite at row 0 \(demo/p000000/e0/a0/0\)"
    ):
        path.train(rows)


def test_c29_the_divergence_is_policy_over_reference_and_names_its_estimator(tmp_path: Path) -> None:
    reference = moved_directory(tmp_path / "reference", seed=5)
    path = RealPath(replace(GRPO, kl_coefficient=0.1), reference_directory=reference)

    trained = path.train(alone(path, [0.0, 0.0, 0.0]))

    score = trained.outcome.scores[0]
    assert score.reference is not None
    x = (score.proximal - score.reference).astype(np.float64)
    assert trained.metrics["actor/kl_ref_k1"] == pytest.approx(float(x.mean()), abs=1e-6)
    assert trained.metrics["actor/kl_ref_k2"] == pytest.approx(float((x**2 / 2).mean()), abs=1e-6)
    assert trained.metrics["actor/kl_ref_k3"] == pytest.approx(float((np.exp(-x) - 1 + x).mean()), abs=1e-6)
    assert min(trained.metrics["actor/kl_ref_k2"], trained.metrics["actor/kl_ref_k3"]) > 0


def test_c29_in_the_reward_it_is_taken_off_before_the_group_is_normalised(tmp_path: Path) -> None:
    reference = moved_directory(tmp_path / "reference", seed=5)
    objective = replace(
        PLUS_MINUS_ONE, kl_coefficient=0.1, kl_estimator=KlEstimator.K1, kl_placement=KlPlacement.REWARD
    )
    path = RealPath(objective, reference_directory=reference)
    trained = path.train([path.row(0, 0, unlikely(3), 1.0), path.row(0, 1, unlikely(4, 1), 0.0)])

    sums = [float((s.proximal - s.reference).astype(np.float64).sum()) for s in trained.outcome.scores]
    penalised = [1.0 - 0.1 * sums[0], 0.0 - 0.1 * sums[1]]
    assert trained.advantages == pytest.approx([penalised[0] - penalised[1], penalised[1] - penalised[0]], abs=1e-5)
    assert trained.advantages[0] != pytest.approx(1.0, abs=1e-3)
    assert trained.metrics["critic/kl_in_reward"] == pytest.approx(0.1 * sum(sums) / 2, abs=1e-6)
    assert [row.trajectory.reward for row in trained.prepared.batch.rows] == [1.0, 0.0]
    assert trained.metrics["critic/rewards/mean"] == 0.5


def test_c32_asymmetric_bounds_bind_on_their_own_side_and_are_counted_where_they_bind() -> None:
    path = RealPath(replace(PLUS_MINUS_ONE, clip_low=0.2, clip_high=0.28))
    cases = [(1.5, 1.0), (1.5, 0.0), (0.5, 1.0), (0.5, 0.0), (1.25, 1.0)]

    trained = path.train(*(fixed(path, ratio, reward, group) for group, (ratio, reward) in enumerate(cases)))

    assert trained.metrics["actor/pg_loss"] == pytest.approx((-1.28 + 1.5 - 0.5 + 0.8 - 1.25) / 5, abs=1e-6)
    assert trained.metrics["actor/pg_clipfrac"] == pytest.approx(0.4)
    assert trained.metrics["actor/clipfrac_high"] == pytest.approx(0.2)
    assert trained.metrics["actor/clipfrac_low"] == pytest.approx(0.2)


@pytest.mark.parametrize(("log_ratio", "weight"), [(0.7, 2.0), (-0.7, 0.496585)])
def test_c33_the_weight_is_trainer_over_generator_and_constant(log_ratio: float, weight: float) -> None:
    path, plain = RealPath(OVER_PROXIMAL), RealPath(PLUS_MINUS_ONE)

    trained, unweighted = path.train(alone(path, [log_ratio])), plain.train(alone(plain, [0.0]))

    assert trained.metrics["actor/pg_loss"] == pytest.approx(-weight, abs=1e-5)
    assert trained.metrics["mismatch/applied_mean"] == pytest.approx(weight, abs=1e-5)
    # The gradient of l = -w * r * A at r = 1 is w times that of ratio 1 without a weight: w itself carries none.
    scale = trained.metrics["actor/grad_norm"] / unweighted.metrics["actor/grad_norm"]
    assert scale == pytest.approx(weight, rel=1e-4)


def test_c33_later_minibatches_weigh_by_the_scores_of_the_start_of_the_step() -> None:
    path = RealPath(OVER_PROXIMAL, epochs=3, learning_rate=3e-2)

    trained = path.train(alone(path, [0.3, -0.3]))

    assert trained.outcome.optimizer_step == 3
    assert trained.metrics["actor/ppo_kl_last"] != pytest.approx(0.0, abs=1e-3), "theta has moved on"
    assert trained.metrics["mismatch/raw_mean"] == pytest.approx((math.exp(0.3) + math.exp(-0.3)) / 2, abs=1e-5)


def test_c35_a_sequence_ratio_is_a_mean_over_real_tokens() -> None:
    sequence = replace(PLUS_MINUS_ONE, level=RatioLevel.SEQUENCE, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    path = RealPath(sequence)
    # The other member is wider, so that the first is padded; none of its tokens counts: it leaves the mean.
    rows = alone(path, [2.0, -2.0, 0.9])
    wide = path.row(0, 1, unlikely(9, 1), 0.0)
    rows[1] = replace(wide, loss_mask=np.zeros(9, dtype=np.bool_), logprobs=np.zeros(9, dtype=np.float32))

    trained = path.train(rows)

    assert trained.metrics["actor/ratio_mean"] == pytest.approx(1.349859, abs=1e-5)
    assert trained.metrics["actor/pg_loss"] == pytest.approx(-1.2, abs=1e-6)
    assert trained.metrics["training/rows"] == 1.0
    assert trained.largest_move() == 0.0, "clipped as a whole: no gradient"


@pytest.mark.parametrize(
    ("after", "loss"), [(RejectionDenominator.KEPT, -1.108858), (RejectionDenominator.ORIGINAL, -0.665315)]
)
def test_c37_the_denominator_after_rejection_is_the_named_one(after: RejectionDenominator, loss: float) -> None:
    icepop = replace(OVER_PROXIMAL, correction=CorrectionKind.ICEPOP, denominator_after_rejection=after)
    path = RealPath(icepop)

    trained = path.train(alone(path, [0.0, 0.2, 1.5, -3.0, 0.1]))

    assert trained.metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)
    assert trained.metrics["actor/rejected_fraction"] == pytest.approx(0.4)


def test_c37_nothing_kept_makes_no_step_and_no_nan() -> None:
    path = RealPath(replace(OVER_PROXIMAL, correction=CorrectionKind.ICEPOP))

    trained = path.train(alone(path, [3.0, -3.0]))

    assert trained.outcome.skipped
    assert trained.outcome.metrics["training/optimizer_steps_masked"] == 1.0
    assert trained.largest_move() == 0.0
    assert all(math.isfinite(value) for value in trained.metrics.values())


def test_c38_raw_and_applied_weights_are_both_reported() -> None:
    path = RealPath(OVER_PROXIMAL)

    metrics = path.train(alone(path, [math.log(0.5), math.log(12), math.log(0.8)])).metrics

    assert metrics["mismatch/raw_mean"] == pytest.approx(4.433333, rel=1e-5)
    assert metrics["mismatch/applied_mean"] == pytest.approx(1.1, rel=1e-5)
    assert metrics["mismatch/outside_band_fraction"] == pytest.approx(1 / 3)
    assert metrics["mismatch/raw_ess"] * 3 == pytest.approx(1.2209, abs=1e-3)
    assert metrics["mismatch/log_p99"] > 2.4, "percentiles are raw too"


def test_c39_a_rejected_row_with_an_overflowing_weight_contributes_exactly_nothing() -> None:
    masked = replace(OVER_PROXIMAL, correction=CorrectionKind.GEOMETRIC_TOKEN_TIS, band_low=0.99, band_high=1.01)
    path, without = RealPath(masked), RealPath(masked)
    accepted = path.row(0, 0, unlikely(2), 1.0, log_ratios=[math.log(10), -math.log(10)])
    rejected = path.row(0, 1, unlikely(2, 1), 0.0, log_ratios=[200.0, 0.0])

    both = path.train([accepted, rejected])
    silent = replace(rejected, loss_mask=np.zeros(2, dtype=np.bool_), logprobs=np.zeros(2, dtype=np.float32))
    one = without.train([accepted, silent])

    assert both.is_finite()
    assert both.metrics["mismatch/applied_mean"] == pytest.approx((2.0 + 0.1) / 2, abs=1e-5)
    assert both.metrics["actor/rejected_fraction"] == 0.5
    # The same gradient, divided by four tokens in the place of two.
    assert both.metrics["actor/grad_norm"] * 2 == pytest.approx(one.metrics["actor/grad_norm"], rel=1e-5)


# ---------------------------------------------------------------- staleness and units


def test_c48_a_stale_member_keeps_its_reward_in_the_baseline_and_enters_no_update() -> None:
    path = RealPath(GRPO, base=6, group_size=4)
    versions, rewards = [5, 5, 5, 1], [1.0, 0.0, 0.0, 1.0]

    trained = path.train(
        [path.row(0, i, unlikely(3, i), r, version=v) for i, (v, r) in enumerate(zip(versions, rewards, strict=True))]
    )

    assert trained.advantages == pytest.approx([0.86588, -0.86588, -0.86588], abs=1e-5)
    assert [score.trajectory_id[-1] for score in trained.outcome.scores] == ["0", "1", "2"]
    assert trained.metrics["training/tokens"] == 9.0
    (withheld,) = [m for m in trained.prepared.groups[0].members if not m.trained]
    assert (withheld.held.trajectory.index_in_group, withheld.verdict.detail) == (3, "lag 5 > 2")


def test_c49_lag_counts_versions_and_optimizer_steps_are_counted_apart() -> None:
    path = RealPath(PLUS_MINUS_ONE, base=1, max_lag=1, minibatches=4)
    groups = [
        [path.row(g, i, unlikely(3, i + g), float(i == 0), version=0, log_ratios=0.05) for i in range(2)]
        for g in range(2)
    ]

    trained = path.train(*groups)

    assert [row.policy_lag for row in trained.prepared.batch.rows] == [1, 1, 1, 1]
    assert trained.outcome.optimizer_step == 4
    assert trained.metrics["training/optimizer_steps"] == 4.0
    assert trained.metrics["policy_lag/max"] == 1.0
    assert any("not covered by max_lag" in warning for warning in path.learner.warnings)


def test_c30_stored_log_probabilities_that_were_recomputed_are_refused() -> None:
    path = RealPath(PLUS_MINUS_ONE, base=1)
    rows: list[Any] = [path.row(0, i, unlikely(3, i), float(i == 0), version=0) for i in range(2)]
    first = path.train(rows)
    exact = {score.trajectory_id: score.proximal for score in first.outcome.scores}
    again = RealPath(PLUS_MINUS_ONE, base=1)

    with pytest.raises(StepRefused, match="old log-probabilities were recomputed from the current policy"):
        again.train([replace(row, logprobs=exact[row.trajectory_id]) for row in rows])


def test_an_objective_that_would_not_use_them_is_refused_before_anything_starts() -> None:
    ignoring = replace(PLUS_MINUS_ONE, denominator=RatioDenominator.PROXIMAL)

    with pytest.raises(ConfigError, match="stored behaviour log-probabilities unused"):
        RealPath(ignoring)


def test_the_helper_gives_the_advantages_it_says() -> None:
    path = RealPath(PLUS_MINUS_ONE)

    trained: Trained = path.train(alone(path, [0.0], reward=0.0))

    assert trained.advantages == [-1.0, 1.0]
    assert path.directory == tiny_directory()
