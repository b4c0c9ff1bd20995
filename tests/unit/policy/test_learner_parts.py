"""Schedules, settings, packing and splitting: the pure parts of the learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumers.objective.options import CorrectionKind, Objective
from consumers.objective.settings import ObjectiveSettings
from consumers.trainer.learner_settings import LearnerSettings, learning_rate_at
from consumers.trainer.policy_forward import ForwardSettings, score_rows
from consumers.trainer.probe_selection import fixed_sequences, probe_rows
from consumers.trainer.tensors import pack, pack_sequences, row_data, row_tokens, split_by_budget, split_minibatches
from infra.model import load_policy
from infra.ports import Completion
from schemas.errors import ConfigError
from schemas.trajectory import Segment
from tests.fakes.policy_rows import batch_of, request_of, tiny_directory


def completion(tokens: list[int], index: int) -> Completion:
    return Completion(
        group_id="t/p000000/e0/a0",
        index_in_group=index,
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
        loss_mask=np.ones(len(tokens), dtype=np.bool_),
        segments=(Segment(version=0, length=len(tokens), proof=0),),
        finish_reason="stop",
        text=None,
        started_at_us=0,
        finished_at_us=0,
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_the_learning_rate_rises_and_then_follows_its_schedule(schedule: Any, expected: list[float]) -> None:
    settings = LearnerSettings(learning_rate=1.0, warmup_steps=4, schedule=schedule, total_steps=8)

    found = [learning_rate_at(settings, step) for step in range(9)]

    assert expected == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 0.0}, r"learner\.learning_rate"),
        ({"learning_rate": float("nan")}, r"learner\.learning_rate"),
        ({"epochs": 0}, r"learner\.epochs"),
        ({"warmup_steps": -1}, r"learner\.warmup_steps"),
        ({"betas": (0.9, 1.0)}, r"learner\.betas"),
        ({"schedule": "step"}, r"learner\.schedule"),
        ({"schedule": "linear"}, r"learner\.total_steps"),
        ({"dtype": "float16"}, r"learner\.dtype"),
        ({"objective": ObjectiveSettings(kl_coefficient=0.1)}, r"learner\.reference_directory"),
    ],
)
def test_settings_out_of_range_are_refused_by_key(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LearnerSettings(**settings)


def test_an_objective_that_ignores_lag_is_refused_at_start_up() -> None:
    naive = LearnerSettings(objective=ObjectiveSettings(objective=Objective.REINFORCE), max_lag=2)
    with pytest.raises(ConfigError, match="stored behaviour log-probabilities unused"):
        naive.check_objective()

    weighted = replace(naive, objective=replace(naive.objective, correction=CorrectionKind.TOKEN_TIS))
    assert weighted.check_objective() == ()


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_and_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    parts = split_by_budget(lengths, budget)

    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= budget


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 5), st.integers(0, 2))
def test_minibatches_deal_every_row_once_and_none_is_empty(count: int, parts: int, step: int, epoch: int) -> None:
    dealt = split_minibatches(count, parts, seed=1, step=step, epoch=epoch)

    assert sorted(row for part in dealt for row in part) == list(range(count))
    assert all(dealt)
    assert len(dealt) == min(parts, count)
    assert dealt == split_minibatches(count, parts, seed=1, step=step, epoch=epoch)


def test_masks_go_by_length_where_padding_and_end_token_share_an_id() -> None:
    policy = load_policy(tiny_directory())
    request = request_of(policy, "1,2=3:")
    batch = batch_of([request], [completion([5, 6, 0], 0), completion([5, 0, 6, 0], 1)])

    tensors = pack([row_data(row) for row in batch.rows], [0, 1], "cpu")

    assert tensors.mask_BT.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert policy.eos_token_id == 0


def test_scores_do_not_depend_on_how_a_row_is_padded() -> None:
    policy = load_policy(tiny_directory())
    settings = ForwardSettings(chunk_tokens=512, autocast=False)
    pairs = [([2, 3], [5, 6, 0]), ([4], [5, 0, 6, 0]), ([2, 3, 4, 5, 6], [1])]
    together, _ = score_rows(policy.model, pack_sequences(pairs, [1.0] * 3, "cpu"), settings)

    for place, (prompt, tokens) in enumerate(pairs):
        alone, _ = score_rows(policy.model, pack_sequences([(prompt, tokens)], [1.0], "cpu"), settings)
        assert torch.allclose(alone[0], together[place, : len(tokens)], atol=1e-6)
        # Padding on the left, with its own positions: the same numbers again.
        width = 9
        left = torch.zeros(1, width, dtype=torch.long)
        count = len(prompt) + len(tokens)
        left[0, width - count :] = torch.tensor(prompt + tokens)
        mask = torch.zeros(1, width, dtype=torch.long)
        mask[0, width - count :] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = policy.model(input_ids=left, attention_mask=mask, position_ids=positions).logits[0]
        expected = logits.log_softmax(-1)[torch.arange(width - len(tokens) - 1, width - 1), torch.tensor(tokens)]
        assert torch.allclose(expected, alone[0], atol=1e-5)


def test_the_probe_takes_the_rows_that_were_pushed_hardest_and_each_sequence_once() -> None:
    request = request_of(load_policy(tiny_directory()), "1,2=3:")
    completions = [completion([5, 6, 0], 0), completion([5, 6, 0], 1), completion([7, 0], 2), completion([8, 0], 3)]
    rows = batch_of([request], completions, advantage=lambda place: (0.5, 0.5, -1.0, 0.6)[place]).rows
    half = np.log(np.float32(0.5))
    proximal = [np.full(len(row.trajectory.token_ids), half, dtype=np.float32) for row in rows]

    # 0.5 x 1.5 open tokens, the same sequence again, 1.0 x 1, 0.6 x 1
    assert [row.index_in_group for row in probe_rows(rows, proximal)] == [2, 0, 3]
    # What is certain cannot move much, however large its advantage is.
    proximal[2] = np.full(2, np.log(np.float32(0.999)), dtype=np.float32)
    assert [row.index_in_group for row in probe_rows(rows, proximal)] == [0, 3, 2]


def test_tokens_that_do_not_count_push_nothing() -> None:
    request = request_of(load_policy(tiny_directory()), "1,2=3:")
    rows = list(batch_of([request], [completion([5, 6, 0], 0), completion([7, 0], 1)], advantage=lambda _: 1.0).rows)
    masked = np.array([True, False, False])
    rows[0] = replace(rows[0], trajectory=replace(rows[0].trajectory, loss_mask=masked))
    proximal = [np.array([-1.0, 0.0, 0.0], dtype=np.float32), np.array([-1.0, -1.0], dtype=np.float32)]

    assert [row.index_in_group for row in probe_rows(rows, proximal)] == [1, 0]


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (12, 8), (140, 8)])
def test_the_probe_is_bounded(count: int, expected: int) -> None:
    request = request_of(load_policy(tiny_directory()), "1,2=3:")
    rows = batch_of([request], [completion([1 + n % 19, 1 + n // 19, 0], n) for n in range(count)]).rows
    proximal = [np.full(3, -1.0, dtype=np.float32) for _ in rows]

    assert len(probe_rows(rows, proximal)) == expected
    assert all(row_tokens(row_data(row)) == 9 for row in rows)


@given(st.integers(1, 200_000))
def test_fixed_probe_sequences_fit_every_vocabulary(size: int) -> None:
    sequences = fixed_sequences(size)

    assert all(0 <= token < size for sequence in sequences for token in sequence)
    assert sequences == fixed_sequences(size)


def test_a_settings_value_names_no_file_it_does_not_need() -> None:
    assert LearnerSettings().reference_directory is None
    assert LearnerSettings(reference_directory=Path("x")).reference_directory == Path("x")
