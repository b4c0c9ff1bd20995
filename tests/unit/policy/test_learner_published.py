"""What the learner publishes: probe, manifest fields, state files, and refusals of damaged ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings, LoraSettings
from consumers.trainer.policy_forward import check_head
from consumers.trainer.ranks import OneRank
from consumers.trainer.twin import may_have_a_twin
from infra.model import load_policy, unique_tensors
from schemas.checkpoint import Manifest
from schemas.errors import CheckpointInvalid, ConfigError, IllegalState
from schemas.probe_codec import decode_probe
from tests.fakes.policy_learners import engine_of, learner, made_batch, saved
from tests.fakes.policy_rows import tiny_directory


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_the_probe_tells_the_new_weights_from_the_old_and_an_engine_reproduces_it(tmp_path: Path) -> None:
    made = learner(warmup_steps=0, learning_rate=3e-3)
    saved(made, tmp_path / "v0")
    batch = made_batch()
    made.train(batch)
    files = saved(made, tmp_path / "v1")
    trained = {(*r.trajectory.prompt_token_ids.tolist(), *r.trajectory.token_ids.tolist()) for r in batch.rows}

    probe = decode_probe(files["probe.arrow"])
    differences = []
    for directory in (tmp_path / "v0", tmp_path / "v1"):
        scores = engine_of(directory).score([s.token_ids.tolist() for s in probe], [s.prompt_length for s in probe])
        differences.append(max(float(np.abs(a - s.logprobs).max()) for a, s in zip(scores, probe, strict=True)))

    assert 1 <= len(probe) <= 8
    assert {tuple(s.token_ids.tolist()) for s in probe} <= trained
    assert differences[1] <= 1e-4
    assert differences[0] > 1e-2


def test_before_the_first_step_the_probe_is_fixed(tmp_path: Path) -> None:
    one, two = (decode_probe(saved(learner(), tmp_path / name)["probe.arrow"]) for name in ("a", "b"))

    assert len(one) == 4
    assert [s.token_ids.tolist() for s in one] == [s.token_ids.tolist() for s in two]


def test_manifest_fields_agree_with_the_files_whichever_comes_first(tmp_path: Path) -> None:
    made = learner()
    made.train(made_batch())
    before = dict(made.manifest_fields())
    files = saved(made, tmp_path / "one")

    assert before == dict(made.manifest_fields())
    manifest = Manifest(
        run="t", attempt_id="a", parent=0, has_state=True, code_revision="r", config_digest="c", **before
    )
    assert (manifest.optimizer_step, manifest.threads) == (1, 1)
    assert (manifest.device_type, manifest.logprob_chunk) == ("cpu", 512)
    assert manifest.fingerprint["dtype"] == "float32"
    assert "probe.arrow" in files


def test_a_save_in_two_parts_leaves_the_probe_for_the_second(tmp_path: Path) -> None:
    made = learner(directory=None)
    made.train(made_batch())
    expected = saved(made, tmp_path / "whole")
    tmp_path.joinpath("parts").mkdir()

    finish = made.begin_save(tmp_path / "parts")
    first = bytes_of(tmp_path / "parts")
    finish()

    assert set(expected) - set(first) == {"probe.arrow"}
    assert bytes_of(tmp_path / "parts") == expected


def test_a_copy_is_what_a_save_would_have_written_whatever_is_trained_since(tmp_path: Path) -> None:
    made = learner(directory=None)
    made.train(made_batch())
    expected = saved(made, tmp_path / "at_once")
    copy = made.copy()
    made.train(made_batch(seed=8))
    tmp_path.joinpath("later").mkdir()
    copy.save(tmp_path / "later")

    assert bytes_of(tmp_path / "later") == expected
    assert saved(made, tmp_path / "since")["model.safetensors"] != expected["model.safetensors"]


def test_a_copy_that_is_saved_on_another_thread_while_training_goes_on_has_the_bytes_of_a_save(tmp_path: Path) -> None:
    made = learner(directory=None)
    expected = []
    with ThreadPoolExecutor(1) as publication:
        for version in range(3):
            made.train(made_batch())
            expected.append(saved(made, tmp_path / f"at_once{version}"))
            (tmp_path / f"behind{version}").mkdir()
            writing = publication.submit(made.copy().save, tmp_path / f"behind{version}")
            made.train(made_batch())
            writing.result(60)
    for version, files in enumerate(expected):
        assert bytes_of(tmp_path / f"behind{version}") == files


def test_a_copy_that_was_superseded_while_it_was_saved_is_refused(tmp_path: Path) -> None:
    made = learner(directory=None)
    made.train(made_batch())
    first = made.copy()
    made.train(made_batch())
    second = made.copy()
    (tmp_path / "first").mkdir()
    with pytest.raises(IllegalState, match="superseded"):
        first.save(tmp_path / "first")
    (tmp_path / "second").mkdir()
    second.save(tmp_path / "second")
    assert bytes_of(tmp_path / "second") == saved(made, tmp_path / "at_once")


def test_a_version_that_is_saved_at_once_needs_no_second_model(tmp_path: Path) -> None:
    made = learner(directory=None)
    saved(made, tmp_path / "at_once")
    assert made._twin is None
    made.copy()
    assert made._twin is not None


def test_a_twin_is_made_of_whole_weights_in_one_process_on_a_cpu_only() -> None:
    made = learner(directory=None)
    settings, adapters = made._settings, LoraSettings(rank=4, alpha=8.0, base_directory=tiny_directory())
    assert may_have_a_twin(settings, OneRank())
    assert not may_have_a_twin(replace(settings, device="cuda"), OneRank())
    assert not may_have_a_twin(replace(settings, lora=adapters), OneRank())

    class TwoRanks(OneRank):
        count = 2

    assert not may_have_a_twin(settings, TwoRanks())


def test_training_on_after_a_copy_gives_the_bits_of_a_restore_from_it(tmp_path: Path) -> None:
    """Version v+2 trained while v+1 is written is the one that a restart from v+1 trains."""
    ahead, restarted = learner(), learner()
    ahead.train(made_batch())
    copy = ahead.copy()
    ahead.train(made_batch(seed=8))
    tmp_path.joinpath("committed").mkdir()
    copy.save(tmp_path / "committed")
    restarted.restore(tmp_path / "committed", with_state=True)
    restarted.train(made_batch(seed=8))

    assert saved(ahead, tmp_path / "ahead") == saved(restarted, tmp_path / "restarted")


def test_weights_alone_are_saved_when_state_is_not_due(tmp_path: Path) -> None:
    made = learner()
    tmp_path.joinpath("one").mkdir()
    made.save(tmp_path / "one", with_state=False)

    assert not (tmp_path / "one" / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointInvalid, match="resume from a version that has state"):
        made.restore(tmp_path / "one", with_state=True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("trainer_state.json", b"{}", "Field required"),
        ("trainer_state.json", None, "cannot be read"),
        ("optimizer.safetensors", b"\x00" * 20, "cannot be read"),
        ("optimizer.safetensors", None, "cannot be read"),
        ("model.safetensors", b"\x00" * 20, "not a complete safetensors file"),
    ],
)
def test_damaged_state_is_refused_by_file(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    made = learner()
    made.train(made_batch())
    saved(made, tmp_path / "one")
    path = tmp_path / "one" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CheckpointInvalid, match=words):
        made.restore(tmp_path / "one", with_state=True)


def test_nothing_works_before_the_first_restore() -> None:
    empty = HfLearner(LearnerSettings())

    for call in (empty.vocabulary_size, empty.fingerprint, empty.manifest_fields):
        with pytest.raises(IllegalState, match="restore a checkpoint first"):
            call()


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    policy = load_policy(tiny_directory())
    check_head(policy.model)
    policy.model.lm_head.register_forward_hook(lambda _module, _inputs, output: output * 0.5)

    with pytest.raises(ConfigError, match="changes its logits"):
        check_head(policy.model)
    assert len(unique_tensors(policy.model)) > 1
