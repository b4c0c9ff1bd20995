"""Episodes of several turns on the way to the weights: what the policy did not sample counts nowhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from consumers.objective.options import AdvantageEstimator, Aggregation, RatioLevel
from consumers.objective.settings import ObjectiveSettings
from infra.config_task import EnvironmentEntry
from schemas.row_hash import row_sha256
from schemas.trajectory import Trajectory
from tests.cases.real_path import PROMPT, RealPath, policy, unlikely
from tests.fakes.episode_loop import EpisodeLoop

PLUS_MINUS_ONE = ObjectiveSettings(advantage=AdvantageEstimator.LEAVE_ONE_OUT)
OBSERVED = [False, True, False, False, True, True]
"""loss mask of two turns (one token, then two) around observations of one and two tokens"""
LOG_RATIOS = [9.0, 0.1, 9.0, 9.0, -0.1, 0.05]


def episode(path: RealPath, index: int, reward: float, *, mask: list[bool] | None = None) -> Trajectory:
    """A row whose sampled tokens have LOG_RATIOS; the stored numbers of the others are 0."""
    sampled = np.array(OBSERVED if mask is None else mask)
    row = path.row(0, index, unlikely(6, index), reward, log_ratios=np.array(LOG_RATIOS).tolist())
    return replace(row, loss_mask=sampled, logprobs=np.where(sampled, row.logprobs, np.float32(0.0)))


@pytest.mark.parametrize(
    ("level", "ratios"),
    [
        (RatioLevel.TOKEN, [math.exp(0.1), math.exp(-0.1), math.exp(0.05)]),
        (RatioLevel.SEQUENCE, [math.exp(0.05 / 3)] * 3),
    ],
)
def test_ratios_loss_entropy_and_counts_are_those_of_the_sampled_tokens(level: RatioLevel, ratios: list[float]) -> None:
    path = RealPath(replace(PLUS_MINUS_ONE, level=level))
    rows = [episode(path, 0, 1.0), episode(path, 1, 0.0, mask=[False] * 6)]

    trained = path.train(rows)

    assert 3 == trained.metrics["training/tokens"]
    assert trained.metrics["actor/pg_loss"] == pytest.approx(-sum(ratios) / 3, rel=1e-5)
    assert trained.metrics["actor/ratio_mean"] == pytest.approx(sum(ratios) / 3, rel=1e-5)
    with torch.no_grad():
        tokens = torch.tensor([[*PROMPT, *unlikely(6, 0)]])
        logprobs = policy().model(input_ids=tokens).logits[0, len(PROMPT) - 1 : -1].double().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)[torch.tensor(OBSERVED)].mean()
    assert trained.metrics["actor/entropy"] == pytest.approx(float(entropy), rel=1e-5)


def test_a_sequence_mean_divides_by_what_was_sampled() -> None:
    path = RealPath(replace(PLUS_MINUS_ONE, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN))
    rows = [episode(path, 0, 1.0), episode(path, 1, 0.0, mask=[True] + [False] * 5)]

    trained = path.train(rows)

    # Advantages +1 and -1; the second row has one sampled token, of log ratio 9.
    first = -(math.exp(0.1) + math.exp(-0.1) + math.exp(0.05)) / 3
    assert 4 == trained.metrics["training/tokens"]
    assert trained.metrics["actor/pg_loss"] == pytest.approx((first + math.exp(9.0)) / 2, rel=1e-5)


def test_a_step_of_real_episodes_of_mixed_lengths_agrees_with_the_engine_token_for_token(tmp_path: Path) -> None:
    loop = EpisodeLoop(tmp_path, EnvironmentEntry(name="guess", arguments={"highest": 4}), groups=2, max_tokens=8)

    groups, trained = loop.step()

    rows = [row for group in groups for row in group]
    turns = {row.reward_parts["turns"] for row in rows}
    assert len(turns) > 1
    sampled = sum(int(row.loss_mask.sum()) for row in rows)
    assert sampled < sum(len(row.token_ids) for row in rows)
    assert sampled == trained.metrics["training/tokens"]
    assert trained.metrics["mismatch/fresh_ratio_error_max"] < 1e-4
    assert trained.largest_move() > 0.0
    for row in rows:
        assert row.loss_mask[-1], "an episode ends with what the policy said"
        assert not row.logprobs[~row.loss_mask].any()
        assert set(policy().decode_all([row.token_ids[~row.loss_mask].tolist()])[0]) <= {"+", "-"}
        assert row.reward_function == 'guess{"highest": 4}@1'
        assert [len(row.token_ids)] == [segment.length for segment in row.segments]


def test_the_digest_of_a_row_covers_its_observations_and_which_tokens_they_are() -> None:
    row = episode(RealPath(PLUS_MINUS_ONE), 0, 1.0)
    other_word = row.token_ids.copy()
    other_word[0] += 1
    other_mask = row.loss_mask.copy()
    other_mask[0] = True

    digests = {row_sha256(one) for one in (row, replace(row, token_ids=other_word), replace(row, loss_mask=other_mask))}

    assert 3 == len(digests)


@pytest.mark.long
def test_the_tiny_policy_learns_to_guess_the_number(tmp_path: Path) -> None:
    loop = EpisodeLoop(
        tmp_path,
        EnvironmentEntry(name="guess", arguments={"highest": 4}),
        groups=4,
        group_size=16,
        max_tokens=8,
        learning_rate=5e-3,
    )

    rewards = [np.mean([row.reward for group in loop.step()[0] for row in group]) for _ in range(25)]

    assert np.mean(rewards[:5]) < 0.1
    assert np.mean(rewards[-5:]) > 0.25
