"""The learner: same numbers as the engine, exact state on disk, and no step where none is due."""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from consumers.objective.options import CorrectionKind, RatioDenominator
from consumers.objective.settings import GRPO, ObjectiveSettings
from consumers.trainer import learner_step
from consumers.trainer.batch import TrainBatch
from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings
from schemas.errors import IllegalState, StepRefused
from tests.fakes.policy_learners import changed, learner, made_batch, saved
from tests.fakes.policy_rows import moved_directory, tiny_directory

# ---------------------------------------------------------------- agreement with the engine


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_at_lag_zero_every_ratio_is_one_also_with_dropout_in_the_config(tmp_path: Path, temperature: float) -> None:
    shutil.copytree(tiny_directory(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))

    made = learner(directory=tmp_path / "model")
    outcome = made.train(made_batch(directory=tmp_path / "model", temperature=temperature))

    assert outcome.metrics["mismatch/fresh_ratio_error_max"] <= 1e-4
    assert outcome.metrics["actor/pg_clipfrac"] == 0.0
    assert abs(outcome.metrics["actor/ratio_k3"]) <= 1e-7
    assert outcome.metrics["actor/ratio_ess"] == pytest.approx(1.0, abs=1e-6)


def test_the_worst_token_is_named_when_engine_and_trainer_disagree(caplog: pytest.LogCaptureFixture) -> None:
    batch = made_batch(temperature=0.5)
    doubled = changed(batch, lambda t: {"logprobs": t.logprobs * np.float32(0.5)})

    with caplog.at_level(logging.WARNING):
        outcome = learner().train(doubled)

    assert outcome.metrics["mismatch/fresh_ratio_error_max"] > 0.01
    (record,) = [r for r in caplog.records if "engine_and_trainer_disagree" in r.getMessage()]
    assert "t/p0000" in record.driftlog_fields["words"]  # type: ignore[attr-defined]


def test_scores_are_the_log_probabilities_at_the_start_of_the_step() -> None:
    batch = made_batch()

    outcome = learner(epochs=2, minibatches=2, learning_rate=5e-2, warmup_steps=0).train(batch)

    assert outcome.optimizer_step == 4
    for row, score in zip(batch.rows, outcome.scores, strict=True):
        assert score.trajectory_id == row.trajectory.trajectory_id
        assert np.abs(score.proximal - row.trajectory.logprobs).max() <= 1e-4


def test_a_step_makes_rewarded_answers_more_likely_and_the_others_less() -> None:
    batch = made_batch()
    made = learner(learning_rate=3e-3, warmup_steps=0)
    before = made.train(batch).scores
    after = made.train(batch).scores

    moved = [float((b.proximal - a.proximal).sum()) for a, b in zip(before, after, strict=True)]
    pushed = [row.advantage * change for row, change in zip(batch.rows, moved, strict=True)]
    assert np.mean(pushed) > 0


# ---------------------------------------------------------------- exactness


def test_two_steps_then_a_restore_then_one_are_three_steps_bit_for_bit(tmp_path: Path) -> None:
    batches = [made_batch(seed=seed) for seed in range(3)]
    straight = learner(schedule="cosine", total_steps=10)
    for batch in batches:
        expected = straight.train(batch)

    first = learner(schedule="cosine", total_steps=10)
    for batch in batches[:2]:
        first.train(batch)
    saved(first, tmp_path / "middle")
    second = HfLearner(LearnerSettings(learning_rate=1e-3, warmup_steps=2, schedule="cosine", total_steps=10))
    second.restore(tmp_path / "middle", with_state=True)
    outcome = second.train(batches[2])

    assert dict(expected.metrics) == dict(outcome.metrics)
    assert expected.rng_digest == outcome.rng_digest
    assert saved(straight, tmp_path / "straight") == saved(second, tmp_path / "restored")


def test_version_zero_restores_before_any_step_was_made(tmp_path: Path) -> None:
    straight, restored = learner(), HfLearner(LearnerSettings(learning_rate=1e-3, warmup_steps=2))
    saved(straight, tmp_path / "zero")
    restored.restore(tmp_path / "zero", with_state=True)

    straight.train(made_batch())
    restored.train(made_batch())

    assert saved(straight, tmp_path / "a") == saved(restored, tmp_path / "b")


def test_a_restore_in_place_forgets_what_was_trained_since(tmp_path: Path) -> None:
    made = learner()
    made.train(made_batch(seed=1))
    at_one = saved(made, tmp_path / "one")
    made.train(made_batch(seed=2))

    made.restore(tmp_path / "one", with_state=True)

    again = saved(made, tmp_path / "again")
    assert {n: d for n, d in at_one.items() if n != "probe.arrow"} == {
        n: d for n, d in again.items() if n != "probe.arrow"
    }


def test_a_restore_without_state_starts_the_optimizer_afresh(tmp_path: Path) -> None:
    made = learner()
    made.train(made_batch())
    saved(made, tmp_path / "one")

    made.restore(tmp_path / "one", with_state=False)

    assert made.manifest_fields()["optimizer_step"] == 0
    assert "exp_avg" not in str(saved(made, tmp_path / "two")["optimizer.safetensors"])


def test_any_split_into_micro_batches_trains_the_same(tmp_path: Path) -> None:
    batch = made_batch()
    results = []
    for number, budget in enumerate((100_000, 64, 1)):
        made = learner(micro_batch_tokens=budget, warmup_steps=0)
        outcome = made.train(batch)
        results.append((outcome.metrics["actor/pg_loss"], outcome.metrics["actor/grad_norm"]))
        saved(made, tmp_path / str(number))

    assert results[0] == pytest.approx(results[1], rel=1e-5, abs=1e-6)
    assert results[0] == pytest.approx(results[2], rel=1e-5, abs=1e-6)


def test_gradient_checkpointing_changes_no_number() -> None:
    batch = made_batch()
    plain, checkpointed = (learner(gradient_checkpointing=on).train(batch).metrics for on in (False, True))

    assert plain["actor/grad_norm"] == pytest.approx(checkpointed["actor/grad_norm"], rel=1e-5)


def test_half_precision_keeps_float32_scores_and_weights(tmp_path: Path) -> None:
    made = learner(dtype="bfloat16")
    outcome = made.train(made_batch())

    assert math.isfinite(outcome.metrics["actor/grad_norm"])
    assert {np.dtype(np.float32)} == {score.proximal.dtype for score in outcome.scores}
    assert made.manifest_fields()["dtype"] == {"model": "float32"}
    assert made.fingerprint()["dtype"] == "bfloat16"


# ---------------------------------------------------------------- steps that are not made


def test_a_step_with_nothing_to_train_leaves_every_byte_and_counter_alone(tmp_path: Path) -> None:
    made = learner()
    made.train(made_batch(seed=1))
    before = saved(made, tmp_path / "before")
    masked = changed(made_batch(seed=2), lambda t: {"loss_mask": np.zeros_like(t.loss_mask)})

    outcome = made.train(masked)

    after = saved(made, tmp_path / "after")
    assert outcome.skipped
    assert outcome.optimizer_step == 1
    assert outcome.metrics["training/optimizer_steps_skipped_total"] == 1.0
    assert len(outcome.scores) == len(masked.rows)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert before[name] == after[name]


def test_an_empty_batch_is_a_skipped_step() -> None:
    outcome = learner().train(TrainBatch(rows=(), version_in=0, depth_in=0))

    assert outcome.skipped
    assert outcome.scores == []


def test_a_gradient_that_is_not_finite_makes_no_step_and_a_series_of_them_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(max_bad_steps=3)
    before = saved(made, tmp_path / "before")
    real = learner_step.gradient_norm
    monkeypatch.setattr(learner_step, "gradient_norm", lambda _: torch.tensor(math.inf))

    assert [made.train(made_batch()).skipped for _ in range(2)] == [True, True]
    after = saved(made, tmp_path / "after")
    assert before["model.safetensors"] == after["model.safetensors"]
    assert before["optimizer.safetensors"] == after["optimizer.safetensors"]

    monkeypatch.setattr(learner_step, "gradient_norm", real)
    assert not made.train(made_batch()).skipped
    monkeypatch.setattr(learner_step, "gradient_norm", lambda _: torch.tensor(math.nan))
    assert [made.train(made_batch()).skipped for _ in range(2)] == [True, True]
    with pytest.raises(IllegalState, match="3 optimizer steps in a row"):
        made.train(made_batch())


def test_numbers_that_are_not_finite_are_refused_with_their_row() -> None:
    batch = made_batch()
    rows = (replace(batch.rows[0], advantage=math.nan), *batch.rows[1:])

    with pytest.raises(StepRefused, match=r"advantages is not finite at row \d+ \(t/p000000/e0/a0/0\)"):
        learner().train(replace(batch, rows=rows))


def test_old_log_probabilities_that_were_recomputed_are_noticed() -> None:
    batch = made_batch()
    scores = {score.trajectory_id: score.proximal for score in learner().train(batch).scores}
    recomputed = changed(batch, lambda t: {"logprobs": scores[t.trajectory_id]})
    stale = replace(recomputed, rows=tuple(replace(row, policy_lag=1) for row in recomputed.rows))

    with pytest.raises(StepRefused, match="old log-probabilities were recomputed"):
        learner().train(stale)


# ---------------------------------------------------------------- masks and objectives


def test_rows_cut_off_by_max_tokens_leave_the_loss_only_when_asked_to() -> None:
    batch = made_batch(max_tokens=2)
    lengths = {row.trajectory.finish_reason: 0 for row in batch.rows}
    for row in batch.rows:
        lengths[row.trajectory.finish_reason] += len(row.trajectory.token_ids)

    kept, masked = (learner(mask_truncated=on).train(batch).metrics.get("training/tokens") for on in (False, True))

    assert float(sum(lengths.values())) == kept
    assert float(lengths.get("stop", 0)) == masked


def test_tool_tokens_do_not_count() -> None:
    batch = made_batch()
    holed = changed(batch, lambda t: {"loss_mask": np.arange(len(t.loss_mask)) != 0})

    whole, part = (learner().train(b).metrics["training/tokens"] for b in (batch, holed))

    assert whole - len(batch.rows) == part


def test_a_correction_with_a_mask_gives_the_same_step_in_one_part_and_in_many(tmp_path: Path) -> None:
    old = moved_directory(tmp_path / "old", seed=3, scale=0.03)
    batch = made_batch(directory=old, lag=1)
    objective = ObjectiveSettings(
        denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.ICEPOP, band_low=0.8, band_high=1.25
    )
    found = [learner(objective=objective, micro_batch_tokens=budget).train(batch).metrics for budget in (100_000, 64)]

    assert 0.0 < found[0]["actor/rejected_fraction"] < 1.0
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/rejected_fraction"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4, abs=1e-6)


def test_a_reference_policy_is_measured_and_stored(tmp_path: Path) -> None:
    reference = moved_directory(tmp_path / "reference", seed=3)
    made = learner(objective=replace(GRPO, kl_coefficient=0.1), reference_directory=reference)

    outcome = made.train(made_batch())

    assert outcome.metrics["actor/kl_ref_k3"] > 0
    assert all(score.reference is not None and len(score.reference) == len(score.proximal) for score in outcome.scores)


def test_an_entropy_bonus_trains() -> None:
    outcome = learner(objective=replace(GRPO, entropy_coefficient=0.01)).train(made_batch())

    assert not outcome.skipped
    assert outcome.metrics["actor/entropy"] > 0


def test_metrics_carry_the_names_others_use() -> None:
    metrics = learner().train(made_batch()).metrics

    actor = ["pg_loss", "grad_norm", "lr", "entropy", "ppo_kl", "pg_clipfrac", "ratio_ess", "ratio_chi2"]
    assert {f"actor/{name}" for name in [*actor, "log_ratio_p50"]} <= set(metrics)
    assert {f"critic/{name}" for name in ("rewards/mean", "rewards/std", "advantages/mean")} <= set(metrics)
    assert "response_length/mean" in metrics
    assert {"mismatch/raw_mean", "mismatch/applied_mean", "mismatch/log_p99"} <= set(metrics)
    assert metrics["actor/lr"] == pytest.approx(5e-4)
    assert all(math.isfinite(value) for value in metrics.values())
