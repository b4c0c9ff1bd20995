"""Families a and b: log-probabilities and advantages, from the bytes of a record to the update of the weights."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumers.objective.options import AdvantageEstimator, Aggregation, RatioLevel, StdKind
from consumers.objective.settings import GRPO, ObjectiveSettings
from schemas.errors import InvalidRecord
from schemas.ledger import Reason
from schemas.trajectory import Sampling
from schemas.trajectory_codec import encode_group
from tests.cases.real_path import PROMPT, RealPath, policy, same_weights, scored, unlikely
from tests.fakes.policy_learners import learner, made_batch
from tests.fakes.policy_rows import tiny_directory

PLUS_MINUS_ONE = ObjectiveSettings(advantage=AdvantageEstimator.LEAVE_ONE_OUT)
"""Rewards 1 and 0 of a group of two give advantages of exactly +1 and -1."""


def pair(path: RealPath, group: int = 0, **changes: Any) -> list[Any]:
    return [path.row(group, 0, unlikely(3), 1.0, **changes), path.row(group, 1, unlikely(4, 1), 0.0, **changes)]


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_c01_temperature_on_both_sides_gives_ratio_one_and_on_one_side_it_shows(temperature: float) -> None:
    path = RealPath()
    both = path.train(pair(path, temperature=temperature))
    other = RealPath()
    unscaled = scored(unlikely(3))
    rows = pair(other, temperature=temperature)
    rows[0] = replace(rows[0], logprobs=unscaled)
    one_sided = other.train(rows)

    assert both.metrics["mismatch/fresh_ratio_error_max"] <= 1e-4
    expected = np.abs(np.exp(scored(unlikely(3), temperature) - unscaled) - 1).max()
    assert one_sided.metrics["mismatch/fresh_ratio_error_max"] == pytest.approx(float(expected), rel=1e-3)


def test_c01_log_probabilities_of_another_distribution_are_refused_before_any_update() -> None:
    path = RealPath()
    raw = Sampling(temperature=0.5, logprobs_mode="raw")

    selection = path.select([replace(row, sampling=raw) for row in pair(path)])

    assert selection.batch == []
    assert [doomed.reason for doomed in selection.doomed] == [Reason.SUPPORT_MISMATCH]
    assert "logprobs_mode=raw" in selection.doomed[0].detail


def test_c03_the_sampled_token_is_trained_and_not_the_likeliest() -> None:
    path = RealPath()
    with torch.no_grad():
        likeliest = int(policy().model(input_ids=torch.tensor([PROMPT])).logits[0, -1].argmax())
    trained = path.train(pair(path))
    (first, _) = trained.outcome.scores
    row = trained.prepared.batch.rows[0].trajectory

    assert row.token_ids[0] != likeliest
    assert np.abs(first.proximal - row.logprobs).max() <= 1e-6
    after = trained.says_of(row.token_ids)
    assert after[0] > first.proximal[0], "the sampled token of a rewarded row became more likely"


def test_c04_ids_are_trained_as_sampled_whatever_the_text_says() -> None:
    steps = []
    for text in (None, "something else entirely"):
        path = RealPath()
        steps.append(path.train([replace(row, text=text) for row in pair(path)]))

    assert same_weights(*steps, tolerance=0.0)
    assert steps[1].prepared.batch.rows[0].trajectory.token_ids.tolist() == list(unlikely(3))
    path = RealPath()
    short = replace(pair(path)[0], logprobs=np.float32([-0.7, -3.0]))
    with pytest.raises(InvalidRecord, match="3"):
        encode_group([short])


def test_c09_every_kind_of_broken_log_probability_has_its_reason_and_siblings_train_without_it() -> None:
    path = RealPath()
    good = pair(path)
    codes = []
    for bad in (math.nan, -math.inf, 0.3):
        broken = replace(good[0], logprobs=np.float32([-0.5, bad, -0.5]))
        with pytest.raises(InvalidRecord) as refused:
            encode_group([broken, good[1]])
        codes.append(refused.value.code)

    assert len(set(codes)) == 3
    # A group without the broken member is not complete: nothing is put in its place.
    selection = path.select([good[1]])
    assert selection.batch == []
    assert selection.waiting_for == [good[0].group_id]


def test_c10_a_long_row_of_float32_has_sequence_ratio_one_and_half_precision_is_refused() -> None:
    path = RealPath(ObjectiveSettings(level=RatioLevel.SEQUENCE_SUM))
    long = [path.row(0, 0, unlikely(40), 1.0), path.row(0, 1, unlikely(40, 1), 0.0)]

    trained = path.train(long)

    assert trained.metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=2e-4)
    for dtype in (np.float16, np.float64):
        with pytest.raises(InvalidRecord, match="logprobs must be a 1-d float32 array"):
            encode_group([replace(long[0], logprobs=long[0].logprobs.astype(dtype))])


def test_c12_equal_rewards_teach_nothing_and_stay_in_the_documented_denominator() -> None:
    path = RealPath(GRPO, group_size=4)
    equal = [path.row(0, i, unlikely(3, i), 1.0) for i in range(4)]
    mixed = [path.row(1, i, unlikely(3, i), reward) for i, reward in enumerate([1.0, 0.0, 0.0, 1.0])]
    both = path.train(equal, mixed)

    alone_path = RealPath(GRPO, group_size=4)
    mixed_alone = [replace(row, group_id=equal[0].group_id, trajectory_id=e.trajectory_id)
                   for row, e in zip(mixed, equal, strict=True)]  # fmt: skip
    alone = alone_path.train(mixed_alone)

    assert both.advantages[:4] == [0.0] * 4
    assert both.advantages[4:] == pytest.approx([0.86588, -0.86588, -0.86588, 0.86588], abs=1e-5)
    assert both.metrics["group/zero_variance"] == 0.5
    assert (both.metrics["training/tokens"], alone.metrics["training/tokens"]) == (24.0, 12.0)
    assert both.metrics["actor/pg_loss"] == pytest.approx(alone.metrics["actor/pg_loss"] / 2, abs=1e-6)
    filtering = RealPath(GRPO, group_size=4, filter_zero_variance=True)
    assert [doomed.reason for doomed in filtering.select(equal, mixed).doomed] == [Reason.ZERO_VARIANCE]


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (GRPO, [1.49970, -0.49990, -0.49990, -0.49990]),
        (replace(GRPO, std_kind=StdKind.POPULATION), [1.73165, -0.57722, -0.57722, -0.57722]),
        (replace(GRPO, advantage=AdvantageEstimator.MEAN_ONLY), [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_c14_the_kind_of_deviation_is_the_named_one(objective: ObjectiveSettings, expected: list[float]) -> None:
    path = RealPath(objective, group_size=4)

    trained = path.train([path.row(0, i, unlikely(2, i), reward) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0])])

    assert trained.advantages == pytest.approx(expected, abs=1e-5)
    assert trained.largest_move() > 0


def test_c18_uneven_groups_stay_apart_and_member_order_changes_no_bit() -> None:
    rewards = ([1.0, 1.0, 0.0], [0.0, None, 1.0])
    steps = []
    for turned in (False, True):
        path = RealPath(GRPO, group_size=3)
        groups = [[path.row(g, i, unlikely(3, i), r) for i, r in enumerate(rs)] for g, rs in enumerate(rewards)]
        steps.append(path.train(*(list(reversed(group)) if turned else group for group in groups)))

    assert steps[0].advantages == pytest.approx([0.57725, 0.57725, -1.15450, -0.70701, 0.70701], abs=1e-5)
    assert steps[0].advantages == steps[1].advantages
    assert same_weights(*steps, tolerance=0.0)


def test_c22_a_failed_reward_is_no_zero_and_poisons_nobody() -> None:
    path = RealPath(GRPO, group_size=4)
    trained = path.train([path.row(0, i, unlikely(3, i), r) for i, r in enumerate([1.0, None, 0.0, None])])
    dead = [path.row(0, i, unlikely(3, i), None) for i in range(4)]

    assert trained.advantages == pytest.approx([0.70701, -0.70701], abs=1e-5)
    assert [row.trajectory.index_in_group for row in trained.prepared.batch.rows] == [0, 2]
    assert trained.is_finite()
    assert trained.largest_move() > 0
    assert [doomed.reason for doomed in path.select(dead).doomed] == [Reason.REWARD_FAILED]
    with pytest.raises(InvalidRecord, match="reward"):
        encode_group([path.row(0, 0, unlikely(3), math.inf)])


def test_c24_a_real_end_token_that_is_also_the_padding_is_trained() -> None:
    steps = []
    for budget in (100_000, 1):  # padded together, and each row alone without padding
        path = RealPath(PLUS_MINUS_ONE, micro_batch_tokens=budget)
        steps.append(path.train([path.row(0, 0, [5, 6, 0], 1.0), path.row(0, 1, [5, 0, 6, 0], 0.0)]))

    assert policy().eos_token_id == 0
    assert [step.metrics["training/tokens"] for step in steps] == [7.0, 7.0]
    assert same_weights(*steps)
    assert steps[0].metrics["actor/pg_loss"] == pytest.approx(steps[1].metrics["actor/pg_loss"], abs=1e-6)


@pytest.mark.parametrize("aggregation", [a for a in Aggregation if a is not Aggregation.SEQ_SUM_CONSTANT])
def test_c25_the_update_does_not_depend_on_the_cut_into_micro_batches(aggregation: Aggregation) -> None:
    steps = []
    for budget in (100_000, 24, 1):
        path = RealPath(replace(PLUS_MINUS_ONE, aggregation=aggregation), micro_batch_tokens=budget)
        groups = [
            [path.row(g, 0, unlikely(2 + 3 * g), 1.0, log_ratios=0.1), path.row(g, 1, unlikely(8, 1), 0.0)]
            for g in range(3)
        ]
        steps.append(path.train(*groups))

    for step in steps[1:]:
        assert step.metrics["actor/pg_loss"] == pytest.approx(steps[0].metrics["actor/pg_loss"], rel=1e-5, abs=1e-6)
        assert step.metrics["actor/grad_norm"] == pytest.approx(steps[0].metrics["actor/grad_norm"], rel=1e-5)
        assert same_weights(steps[0], step)


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, 0.0),
        (Aggregation.TOKEN_MEAN, 0.6),
        (Aggregation.SEQ_SUM_CONSTANT, 0.3),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, 3.0),
    ],
)
def test_c26_each_length_normalisation_has_its_own_loss(aggregation: Aggregation, loss: float) -> None:
    path = RealPath(replace(PLUS_MINUS_ONE, aggregation=aggregation, constant_length=10))

    trained = path.train([path.row(0, 0, unlikely(2), 1.0), path.row(0, 1, unlikely(8, 1), 0.0)])

    assert trained.advantages == [1.0, -1.0]
    assert trained.metrics["actor/pg_loss"] == pytest.approx(loss, abs=2e-6)


def test_c30_on_the_first_step_every_ratio_is_one_although_the_model_has_dropout(tmp_path: Path) -> None:
    shutil.copytree(tiny_directory(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))

    outcome = learner(directory=tmp_path / "model").train(made_batch(directory=tmp_path / "model"))
    path = RealPath(directory=tmp_path / "model")
    own = path.train(pair(path))

    for metrics in (outcome.metrics, own.metrics):
        assert metrics["mismatch/fresh_ratio_error_max"] <= 1e-4
        assert metrics["actor/pg_clipfrac"] == 0.0
        assert abs(metrics["actor/ratio_k3"]) <= 1e-7
