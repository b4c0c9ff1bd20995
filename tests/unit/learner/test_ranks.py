"""Two ranks give what one gives, for DDP and FSDP2; and none waits for a rank that is gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from consumers.trainer.learner_state import REFERENCE_NAME, read_state
from consumers.trainer.ranks import OneRank, deal, placement
from consumers.trainer.ranks_wire import Command, decode_command, encode_command
from consumers.trainer.tensors import row_data
from schemas.checkpoint import OPTIMIZER_NAME, PROBE_NAME, WEIGHTS_NAME
from schemas.errors import ConfigError
from schemas.probe_codec import decode_probe
from tests.fakes.policy_learners import made_batch
from tests.unit.learner import rank_scenarios

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow  # six processes that load torch
SAVED = ("plain", "one_row", "masked", "refused", "everything", "resumed")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Every scenario in this process alone."""
    folder = tmp_path_factory.mktemp("one")
    return rank_scenarios.run(OneRank(), "ddp", folder), folder


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Every scenario over two processes."""
    folder = tmp_path_factory.mktemp(request.param)
    for code, output in launched(folder, request.param):
        assert code == 0, output
    return json.loads((folder / "found.json").read_text()), folder


def launched(folder: Path, parallel: str, *role: str) -> list[tuple[int, str]]:
    """Exit code and output of both ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.unit.learner.rank_scenarios"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(port), parallel, str(folder), *role],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def close_to(expected: Sequence[Any], found: Sequence[Any], tolerance: float = 2e-6) -> bool:
    return len(expected) == len(found) and all(
        a == pytest.approx(b, abs=tolerance) for a, b in zip(expected, found, strict=True)
    )


def test_loss_gradient_norm_and_every_metric_are_those_of_one_rank(
    one: tuple[dict[str, Any], Path], two: tuple[dict[str, Any], Path]
) -> None:
    for name in SAVED:
        for alone, shared in zip(one[0][name], two[0][name], strict=True):
            assert alone["skipped"] == shared["skipped"]
            assert alone["metrics"].keys() == shared["metrics"].keys()
            for metric in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "training/tokens"):
                if metric in alone["metrics"]:
                    assert alone["metrics"][metric] == pytest.approx(shared["metrics"][metric], rel=1e-6, abs=1e-6)
            for metric, value in alone["metrics"].items():
                assert value == pytest.approx(shared["metrics"][metric], rel=1e-4, abs=2e-5), metric


def test_scores_of_all_rows_come_back_to_rank_0(
    one: tuple[dict[str, Any], Path], two: tuple[dict[str, Any], Path]
) -> None:
    for name in SAVED:
        for alone, shared in zip(one[0][name], two[0][name], strict=True):
            assert all(close_to(a, b) for a, b in zip(alone["scores"], shared["scores"], strict=True))
            for a, b in zip(alone["reference"], shared["reference"], strict=True):
                assert (a is None) == (b is None)
                assert a is None or close_to(a, b)


@pytest.mark.parametrize("name", SAVED)
def test_weights_moments_and_reference_after_the_steps_are_whole_and_those_of_one_rank(
    one: tuple[dict[str, Any], Path], two: tuple[dict[str, Any], Path], name: str
) -> None:
    for file in (WEIGHTS_NAME, OPTIMIZER_NAME, REFERENCE_NAME):
        if not (one[1] / name / file).exists():
            assert file == REFERENCE_NAME and not (two[1] / name / file).exists()
            continue
        expected, found = load_file(one[1] / name / file), load_file(two[1] / name / file)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            assert tensor.shape == found[key].shape
            assert float((tensor - found[key]).abs().max()) <= 1e-6, (file, key)


def test_a_masked_step_leaves_every_byte_alone_on_every_rank(two: tuple[dict[str, Any], Path]) -> None:
    made, skipped = two[0]["masked"]

    assert (made["skipped"], skipped["skipped"]) == (False, True)
    assert skipped["metrics"]["training/optimizer_steps_masked"] == 1.0
    assert read_state(two[1] / "masked").optimizer_step == 1
    # The first of the two steps of `plain` is the first of `masked`: its moments show that nothing was added.
    moments = load_file(two[1] / "masked" / OPTIMIZER_NAME)
    assert {float(tensor) for key, tensor in moments.items() if key.endswith(".step")} == {1.0}


def test_a_row_the_maths_refuses_is_named_and_the_next_step_works(
    one: tuple[dict[str, Any], Path], two: tuple[dict[str, Any], Path]
) -> None:
    bad = str(made_batch().rows[-1].trajectory.trajectory_id)

    for found in (one[0], two[0]):
        assert "advantages is not finite" in found["refusal"]
        assert bad in found["refusal"]
        assert not found["refused"][0]["skipped"]


def test_the_reference_of_a_step_is_the_one_of_the_version_that_is_named(two: tuple[dict[str, Any], Path]) -> None:
    first, second = two[0]["everything"]

    assert [step["metrics"]["reference/version"] for step in (first, second, *two[0]["resumed"])] == [0.0, 1.0, 2.0]
    assert read_state(two[1] / "everything").reference_version == 2
    weights = load_file(two[1] / "everything" / WEIGHTS_NAME)
    reference = load_file(two[1] / "everything" / REFERENCE_NAME)
    assert all(tensor.equal(reference[name]) for name, tensor in weights.items())


def test_penalties_and_probes_are_those_of_one_rank(
    one: tuple[dict[str, Any], Path], two: tuple[dict[str, Any], Path]
) -> None:
    assert close_to(one[0]["penalties"], two[0]["penalties"])
    assert any(abs(value) > 1e-3 for value in two[0]["penalties"])
    expected, found = (decode_probe((folder / "plain" / PROBE_NAME).read_bytes()) for _, folder in (one, two))
    by_tokens = {probe.token_ids.tobytes(): probe.logprobs for probe in found}
    common = [probe for probe in expected if probe.token_ids.tobytes() in by_tokens]
    # Which rows moved most is a ranking: two that moved alike may change places.
    assert len(common) >= len(expected) - 1 and len(expected) == len(found)
    assert all(close_to(probe.logprobs, by_tokens[probe.token_ids.tobytes()]) for probe in common)


def test_a_checkpoint_of_two_ranks_goes_on_in_one(
    one: tuple[dict[str, Any], Path], two: tuple[dict[str, Any], Path]
) -> None:
    bench = rank_scenarios.Bench(OneRank(), "ddp", two[1] / "alone")
    (two[1] / "alone").mkdir(exist_ok=True)
    (two[1] / "alone" / "everything").symlink_to(two[1] / "everything")
    learner = bench.learner(
        objective=rank_scenarios.EVERYTHING,
        epochs=2,
        minibatches=2,
        reference_refresh_every=1,
        reference_directory=rank_scenarios.tiny_directory(),
        reference_version=0,
    )

    rank_scenarios.resumed(learner, bench)

    expected = one[0]["resumed"][0]["metrics"]
    found = bench.found["resumed"][0]["metrics"]
    assert expected["actor/pg_loss"] == pytest.approx(found["actor/pg_loss"], abs=1e-6)
    assert expected["actor/grad_norm"] == pytest.approx(found["actor/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("role", ["worker_dies", "trainer_dies"])
def test_the_death_of_one_rank_ends_the_other_within_the_limit(tmp_path: Path, role: str) -> None:
    (trainer, trainer_says), (worker, worker_says) = launched(tmp_path, "ddp", role)

    alive, says = (trainer, trainer_says) if role == "worker_dies" else (worker, worker_says)
    assert {trainer, worker} == {9, 1}
    assert alive == 1
    assert "RankLost: " in says
    assert "the run resumes from its last committed version" in says or "failed while" in says


# ---------------------------------------------------------------- pure parts


def test_rows_are_dealt_each_once_and_evenly() -> None:
    dealt = deal([5, 9, 1, 7, 7], 3)

    assert sorted(row for part in dealt for row in part) == list(range(5))
    assert [len(part) for part in dealt] == [2, 2, 1]
    assert deal([4], 2) == [[0], []]


def test_a_command_comes_back_bit_for_bit() -> None:
    rows = [row_data(row) for row in made_batch().rows[:3]]
    sent = Command(name="train", arguments={"version": 3, "depth": 2}, rows=rows)

    found = decode_command(encode_command(sent))

    assert (found.name, found.arguments) == (sent.name, sent.arguments)
    for a, b in zip(sent.rows, found.rows, strict=True):
        assert (a.row_id, a.advantage, a.weight, a.truncated) == (b.row_id, b.advantage, b.weight, b.truncated)
        for name in ("prompt", "completion", "behaviour", "loss_mask"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
            assert getattr(a, name).dtype == getattr(b, name).dtype
    assert decode_command(encode_command(Command(name="stop"))).rows == []


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "two", "RANK": "0"}],
)
def test_an_environment_that_is_not_of_torchrun_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="start with torchrun"):
        placement(environment)
