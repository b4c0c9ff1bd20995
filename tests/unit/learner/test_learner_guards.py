"""What stops a learner, what it refuses by name, and what it does about other engines and a refreshed reference."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumers.objective.settings import GRPO
from consumers.trainer import learner_step
from consumers.trainer.admission import Admission, AdmissionRules, fingerprint_difference, judge
from consumers.trainer.batch import TrainBatch
from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.learner_state import REFERENCE_NAME, read_state
from consumers.trainer.tensors import check_rows, row_data
from schemas.errors import CheckpointInvalid, IllegalState, StepFailed, StepRefused
from schemas.ledger import Reason
from schemas.trajectory import Fingerprint
from tests.fakes.log_script import G0, TOKENIZER, running, trajectory
from tests.fakes.policy_learners import changed, learner, made_batch, saved
from tests.fakes.policy_rows import tiny_directory


def masked_batch(seed: int = 2) -> TrainBatch:
    return changed(made_batch(seed=seed), lambda t: {"loss_mask": np.zeros_like(t.loss_mask)})


def test_a_series_of_masked_steps_stops_the_run_and_changes_no_byte(tmp_path: Path) -> None:
    made = learner(max_bad_steps=3)
    made.train(made_batch(seed=1))
    before = saved(made, tmp_path / "before")
    steps = [made.train(masked_batch()) for _ in range(2)]

    with pytest.raises(IllegalState, match="3 optimizer steps in a row could not be made, .*no token counted"):
        made.train(masked_batch())

    assert [step.metrics["training/skipped_in_row"] for step in steps] == [1.0, 2.0]
    after = saved(made, tmp_path / "after")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert before[name] == after[name]


def test_a_step_that_is_made_ends_the_series_and_a_restart_does_not(tmp_path: Path) -> None:
    made = learner(max_bad_steps=2)
    assert made.train(masked_batch()).skipped
    assert not made.train(made_batch()).skipped
    assert made.train(masked_batch()).skipped
    saved(made, tmp_path / "one")
    again = learner(max_bad_steps=2)
    again.restore(tmp_path / "one", with_state=True)

    with pytest.raises(IllegalState, match="2 optimizer steps in a row"):
        again.train(masked_batch())


def test_masked_and_non_finite_steps_count_in_one_series(monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner(max_bad_steps=2)
    made.train(masked_batch())
    monkeypatch.setattr(learner_step, "gradient_norm", lambda _: torch.tensor(torch.inf))

    with pytest.raises(IllegalState, match="the run has diverged"):
        made.train(made_batch())


def test_memory_that_runs_out_is_a_failed_step_that_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner()

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(learner_step, "policy_loss", exhausted)
    with pytest.raises(StepFailed, match=r"out of memory: .* lower trainer.micro_batch_tokens"):
        made.train(made_batch())

    monkeypatch.undo()
    made.restore(tiny_directory(), with_state=False)
    assert not made.train(made_batch()).skipped


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": np.float32([-1.0])}, "1 logprobs"),
        ({"loss_mask": np.zeros(0, dtype=np.bool_)}, "0 loss_mask"),
        ({"token_ids": np.int32([10_000] * 3)}, "leave the vocabulary"),
        ({"prompt_token_ids": np.int32([])}, "is empty"),
    ],
)
def test_a_row_no_pass_could_use_is_refused_by_its_name(change: dict[str, Any], words: str) -> None:
    row = made_batch().rows[0]
    three = replace(
        row.trajectory,
        token_ids=np.int32([3, 4, 5]),
        logprobs=np.float32([-1, -1, -1]),
        loss_mask=np.ones(3, dtype=np.bool_),
    )
    broken = replace(row, trajectory=replace(three, **change))

    with pytest.raises(StepRefused, match=f"t/p000000/e0/a0/0: .*{words}"):
        check_rows([row_data(broken)], 19)


def test_a_greedy_row_is_refused_by_its_name() -> None:
    greedy = changed(made_batch(), lambda t: {"sampling": replace(t.sampling, temperature=0.0)})

    with pytest.raises(StepRefused, match=r"t/p000000/e0/a0/0: temperature 0.0: greedy tokens"):
        learner().train(greedy)


# ---------------------------------------------------------------- fingerprints

OWN = {"dtype": "float32", "engine": "hf", "engine_version": "5"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"dtype": "bfloat16"}, "dtype bfloat16 is not the trainer's float32"),
        ({"engine": "vllm"}, "engine vllm is not the trainer's hf"),
        ({"engine_version": "6"}, "engine_version 6 is not the trainer's 5"),
    ],
)
def test_each_part_of_a_fingerprint_is_compared(change: dict[str, str], words: str) -> None:
    same = Fingerprint(tokenizer_digest="t", dtype="float32", engine="hf", engine_version="5")

    assert fingerprint_difference(replace(same, **change), OWN) == words


def test_other_numbers_are_admitted_only_where_the_objective_allows_for_them() -> None:
    script, proofs = running(G0)
    half = Fingerprint(tokenizer_digest=TOKENIZER, dtype="bfloat16", engine="hf", engine_version="5")
    row = trajectory(segments=[(0, 2, proofs[(G0, 0)])], fingerprint=half)
    rules = AdmissionRules(max_lag=0, barrier=True, tokenizer_digest=TOKENIZER, fingerprint=OWN)

    allowed = judge(row, script.fold, 0, rules)
    refused = judge(row, script.fold, 0, replace(rules, takes_other_numbers=False))

    assert allowed.admission is Admission.ADMIT
    assert (refused.admission, refused.reason) == (Admission.REFUSE, Reason.SUPPORT_MISMATCH)
    assert refused.detail.startswith("dtype bfloat16 is not the trainer's float32, and the objective takes stored")


def test_rows_of_another_precision_are_counted_and_raise_no_false_warning(caplog: pytest.LogCaptureFixture) -> None:
    other = changed(
        made_batch(),
        lambda t: {"fingerprint": replace(t.fingerprint, dtype="bfloat16"), "logprobs": t.logprobs * np.float32(0.9)},
    )

    with caplog.at_level(logging.WARNING):
        metrics = learner().train(other).metrics

    assert metrics["mismatch/other_fingerprint_fraction"] == 1.0
    assert metrics["mismatch/fresh_ratio_error_max"] > 1e-3
    assert "engine_and_trainer_disagree" not in caplog.text


# ---------------------------------------------------------------- the reference

WITH_REFERENCE: dict[str, Any] = {
    "objective": replace(GRPO, kl_coefficient=0.1),
    "reference_directory": tiny_directory(),
    "reference_version": 0,
}


def at(version: int) -> TrainBatch:
    return replace(made_batch(seed=version), version_in=version, depth_in=version)


def test_a_frozen_reference_stays_and_is_not_part_of_the_state(tmp_path: Path) -> None:
    made = learner(**WITH_REFERENCE)

    assert [made.train(at(version)).metrics["reference/version"] for version in range(3)] == [0.0, 0.0, 0.0]
    assert REFERENCE_NAME not in saved(made, tmp_path / "three")


def test_a_refreshed_reference_is_the_policy_of_its_version_and_survives_a_restart(tmp_path: Path) -> None:
    settings = {**WITH_REFERENCE, "reference_refresh_every": 2, "learning_rate": 1e-2, "warmup_steps": 0}
    made = learner(**settings)
    outcomes = [made.train(at(version)) for version in range(2)]
    at_two = saved(made, tmp_path / "two")
    outcomes += [made.train(at(version)) for version in (2, 3)]

    assert [outcome.metrics["reference/version"] for outcome in outcomes] == [0.0, 0.0, 2.0, 2.0]
    # At the start of the step that made version 3 the policy is the reference: no divergence.
    for score in outcomes[2].scores:
        assert score.reference is not None
        assert np.array_equal(score.proximal, score.reference)
    assert read_state(tmp_path / "two").reference_version == 2
    assert REFERENCE_NAME in at_two

    again = HfLearner(LearnerSettings(**settings))
    again.restore(tmp_path / "two", with_state=True)
    resumed = [again.train(at(version)) for version in (2, 3)]
    assert [dict(outcome.metrics) for outcome in resumed] == [dict(outcome.metrics) for outcome in outcomes[2:]]
    assert saved(again, tmp_path / "a") == saved(made, tmp_path / "b")


def test_going_back_takes_the_reference_back_too(tmp_path: Path) -> None:
    made = learner(**WITH_REFERENCE, reference_refresh_every=1)
    made.train(at(0))
    saved(made, tmp_path / "one")
    made.train(at(1))
    made.restore(tmp_path / "one", with_state=True)
    assert made.train(at(1)).metrics["reference/version"] == 1.0

    made.restore(tiny_directory(), with_state=False)
    first = made.train(at(0))

    assert first.metrics["reference/version"] == 0.0
    assert all(score.reference is not None and np.allclose(score.proximal, score.reference) for score in first.scores)


def test_a_missing_reference_file_is_a_loud_stop(tmp_path: Path) -> None:
    made = learner(**WITH_REFERENCE, reference_refresh_every=1)
    made.train(at(0))
    saved(made, tmp_path / "one")
    (tmp_path / "one" / REFERENCE_NAME).unlink()

    with pytest.raises(CheckpointInvalid, match=REFERENCE_NAME):
        made.restore(tmp_path / "one", with_state=True)


def test_a_reference_that_is_switched_on_later_is_the_one_of_its_directory(tmp_path: Path) -> None:
    without = learner()
    without.train(at(0))
    saved(without, tmp_path / "one")
    made = learner(**WITH_REFERENCE, reference_refresh_every=5)

    made.restore(tmp_path / "one", with_state=True)

    assert made.train(at(1)).metrics["reference/version"] == 0.0


def test_penalties_are_zero_when_the_divergence_is_not_in_the_reward() -> None:
    rows = [row.trajectory for row in made_batch().rows]

    assert list(learner().reward_penalties(rows)) == [0.0] * len(rows)
    assert list(learner(**WITH_REFERENCE).reward_penalties(rows)) == [0.0] * len(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_accelerator_gives_the_loss_of_the_cpu(dtype: str) -> None:
    batch = made_batch()
    cpu = learner().train(batch).metrics
    accelerated = learner(device="cuda", dtype=dtype).train(batch).metrics

    tolerance = 1e-4 if dtype == "float32" else 5e-2
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert cpu[name] == pytest.approx(accelerated[name], rel=tolerance, abs=tolerance)
