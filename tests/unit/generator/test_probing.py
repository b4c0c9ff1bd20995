"""The probes one by one: what each measures, what makes it no proof, and what the second one remembers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from producers.probing import GENERATED_TOKENS, GeneratedProbe, ProbeResult, run_probe
from schemas.errors import CheckpointInvalid, IllegalState
from schemas.probe_codec import ProbeSequence
from tests.fakes.tiny_policy import TinyEngine
from tests.fakes.virtual_clock import VirtualClock
from tests.unit.generator.keeper_rig import Shelf, weights_of


class WatchedEngine(TinyEngine):
    """Notes the prefixes it generates behind."""

    def __init__(self, *, block: int = 1) -> None:
        super().__init__(VirtualClock(), prefix_cache=True)
        self.block = block
        self.asked: list[list[list[int]]] = []
        self.error: Exception | None = None
        self.adds = 0.0

    def prefix_block(self) -> int:
        return self.block

    def generate_greedily(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        self.asked.append([list(prompt) for prompt in prompts])
        if self.error is not None:
            raise self.error
        return [(ids, logprobs + np.float32(self.adds)) for ids, logprobs in super().generate_greedily(prompts, tokens)]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    rig = Shelf(tmp_path)
    for version in range(3):
        rig.put(version, weights_of(version))
    return tmp_path


def probed(shelf: Path, engine: TinyEngine, version: int, generated: GeneratedProbe, held: int | None = 0) -> Any:
    return run_probe(engine, shelf / f"a{version}", version, held, generated)


def sequence(*tokens: int) -> ProbeSequence:
    return ProbeSequence(
        token_ids=np.array(tokens, dtype=np.int32), prompt_length=1, logprobs=np.zeros(len(tokens) - 1, np.float32)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"diff_new": 2e-4}, "probe differs by 0.0002 > 0.0001"),
        ({"diff_new": math.inf}, "probe differs by inf"),
        ({"diff_new": math.nan}, "probe differs by nan"),
        ({"diff_generated": 2e-4}, "generated tokens come from old cached keys.* 0.0002 > 0.0001"),
        ({"diff_generated": math.nan}, "old cached keys"),
        ({"failure": "cannot be probed"}, "cannot be probed"),
    ],
)
def test_whatever_is_no_proof_says_why(changes: dict[str, Any], words: str) -> None:
    result = ProbeResult(**{"diff_new": 0.0, "diff_old": 0.5, "diff_generated": 0.0, **changes})

    with pytest.raises(ValueError, match=words):
        raise ValueError(result.problem(1e-4))


def test_differences_at_the_tolerance_are_a_proof() -> None:
    assert ProbeResult(diff_new=1e-4, diff_old=None, diff_generated=1e-4).problem(1e-4) is None
    assert ProbeResult(diff_new=0.0, diff_old=None).problem(1e-4) is None


def test_nothing_is_generated_where_no_prefix_outlives_its_request(shelf: Path) -> None:
    engine, generated = WatchedEngine(block=0), GeneratedProbe()
    first, second = probed(shelf, engine, 0, generated, None), probed(shelf, engine, 1, generated)

    assert (first.diff_generated, second.diff_generated, engine.asked) == (None, None, [])


def test_the_same_prefixes_are_asked_for_before_and_after_the_load(shelf: Path) -> None:
    engine, generated = WatchedEngine(), GeneratedProbe()
    probed(shelf, engine, 0, generated, None)
    first = list(engine.asked)
    result = probed(shelf, engine, 1, generated)
    before, after = engine.asked[1:]

    assert len(first) == 1  # nothing was there to warm
    assert before == after != first[0]
    assert result.diff_generated == 0.0


def test_a_cache_that_a_load_leaves_behind_shows_in_the_second_difference_alone(shelf: Path) -> None:
    engine, generated = WatchedEngine(), GeneratedProbe()
    probed(shelf, engine, 0, generated, None)
    engine.fail_load = "stale"
    result = probed(shelf, engine, 1, generated)

    assert result.diff_new == 0.0
    assert result.diff_generated > 0.1
    assert "old cached keys" in result.problem(1e-4)


def test_after_a_load_that_died_half_way_the_prefixes_warmed_before_it_stay_the_test(shelf: Path) -> None:
    engine, generated = WatchedEngine(), GeneratedProbe()
    probed(shelf, engine, 0, generated, None)
    engine.fail_load = "after"
    with pytest.raises(CheckpointInvalid):
        probed(shelf, engine, 1, generated)
    warm = engine.asked[-1]
    engine.fail_load = "stale"
    result = probed(shelf, engine, 2, generated, None)

    assert engine.asked[-1] == warm
    assert result.diff_generated > 0.1


def test_old_weights_that_cannot_generate_do_not_keep_new_ones_out(shelf: Path) -> None:
    engine, generated = WatchedEngine(), GeneratedProbe()
    probed(shelf, engine, 0, generated, None)
    engine.error = IllegalState("log-probabilities are not finite")
    real_load = engine.load

    def heals(directory: Path, version: int) -> None:
        real_load(directory, version)
        engine.error = None

    engine.load = heals  # type: ignore[method-assign]

    assert probed(shelf, engine, 1, generated).problem(1e-4) is None


def test_new_weights_that_cannot_generate_are_a_failed_load_of_touched_weights(shelf: Path) -> None:
    engine, generated = WatchedEngine(), GeneratedProbe()
    engine.error = IllegalState("log-probabilities are not finite")
    result = probed(shelf, engine, 0, generated, None)

    assert result.problem(1e-4) == "cannot be probed after the load: log-probabilities are not finite"


def test_a_generated_number_that_is_not_finite_is_an_infinite_difference(shelf: Path) -> None:
    engine = WatchedEngine()
    engine.adds = math.nan

    assert probed(shelf, engine, 0, GeneratedProbe(), None).diff_generated == math.inf


@pytest.mark.parametrize(
    ("tokens", "block", "prefix"),
    [
        ((7, 8, 9, 1, 2, 3, 4, 5), 2, [7, 8, 9, 1]),
        ((7, 8, 9, 1, 2, 3, 4, 5), 4, [7, 8, 9, 1, 7]),
        ((7, 8, 9, 1, 2, 3, 4, 5), 16, [7, 8, 9, 1] * 4 + [7]),
        ((7, 8), 1, [7, 7]),
    ],
)
def test_a_prefix_fills_one_block_and_leaves_room_for_what_is_generated(
    tokens: tuple[int, ...], block: int, prefix: list[int]
) -> None:
    engine = WatchedEngine(block=block)
    engine._weights = weights_of(0)
    GeneratedProbe().after_load(engine, [sequence(*tokens)])

    assert engine.asked == [[prefix]]
    assert len(prefix) > block
    assert GENERATED_TOKENS == 4


def test_a_probe_tells_the_seconds_of_its_three_parts(shelf: Path) -> None:
    ticks = iter([0.0, 1.0, 3.0, 7.0])

    result = run_probe(WatchedEngine(), shelf / "a1", 1, None, GeneratedProbe(), monotonic_s=lambda: next(ticks))

    assert result.phase_s == {"probe_old": 1.0, "engine_load": 2.0, "probe_new": 4.0}
