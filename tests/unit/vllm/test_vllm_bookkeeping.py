"""What the vllm engine keeps of its members between requests, switches and failures; vLLM itself is scripted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from infra.model import load_policy
from infra.ports import EngineRequest
from infra.wakeup import Wakeup
from producers.engines.vllm import VllmEngine
from producers.engines.vllm_sampling import seed_of
from producers.engines.vllm_settings import VllmEngineSettings
from schemas.errors import CheckpointInvalid, EngineLost, IllegalState
from schemas.trajectory import Sampling
from tests.fakes.policy_rows import request_of
from tests.fakes.scripted_vllm import ScriptedVllm
from tests.fakes.virtual_clock import VirtualClock
from tests.fakes.vllm_policy import moved_from, served_directory

STOP = 0


class Rig:
    def __init__(self) -> None:
        self.bell = Wakeup()
        self.cores: list[ScriptedVllm] = []
        self.engine = VllmEngine(VllmEngineSettings(self_test=False), VirtualClock(), self.bell.ring, self._open)
        self.policy = load_policy(served_directory())
        self.engine.load(served_directory(), 3)
        self.engine.set_proof(30)

    def _open(self, settings: VllmEngineSettings, ring: Any) -> Any:
        self.cores.append(ScriptedVllm(ring))
        return self.cores[-1]

    @property
    def core(self) -> ScriptedVllm:
        return self.cores[-1]

    def submit(self, *, size: int = 1, max_tokens: int = 6, number: int = 0) -> str:
        request = request_of(
            self.policy,
            "1,2=3:",
            number=number,
            size=size,
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,)),
        )
        self.engine.submit(EngineRequest(request=request, rng_seed=7))
        return str(request.group_id)


def test_every_member_is_a_request_of_its_own_with_a_seed_of_its_own() -> None:
    rig = Rig()
    group = rig.submit(size=3)

    assert [seed_of(7, group, index, 0) for index in range(3)] == [ask.arguments["seed"] for ask in rig.core.begun]
    assert {1} == {ask.arguments["n"] for ask in rig.core.begun}


def test_polling_never_waits_and_a_finished_member_rings() -> None:
    rig = Rig()
    rig.submit(size=2)
    assert rig.engine.computes_alone()
    assert rig.engine.poll() == []
    rig.bell.wait(0.0)
    rig.core.sample(1, [4, STOP])
    rig.core.answer(1, "stop")

    assert rig.bell.wait(0.0)
    (done,) = rig.engine.poll()
    assert (1, [4, STOP], "stop") == (done.index_in_group, done.token_ids.tolist(), done.finish_reason)
    assert rig.engine.busy()


def test_a_frozen_member_goes_on_behind_its_tokens_with_the_seed_of_that_place(tmp_path: Path) -> None:
    rig = Rig()
    group = rig.submit(max_tokens=6)
    prompt = list(rig.core.begun[0].token_ids)
    rig.core.sample(0, [4, 5])
    rig.engine.pause("keep")
    assert rig.engine.poll() == []
    rig.engine.load(moved_from(served_directory(), tmp_path / "new", seed=1), 4)
    rig.engine.resume()
    assert 1 == len(rig.core.begun), "nothing goes on without a proof"
    rig.engine.set_proof(40)
    rig.engine.poll()

    second = rig.core.begun[1]
    assert [*prompt, 4, 5] == list(second.token_ids)
    assert (4, seed_of(7, group, 0, 2)) == (second.arguments["max_tokens"], second.arguments["seed"])
    rig.core.sample(second.key, [6, 7, 8, 9])
    rig.core.answer(second.key, "length")
    (done,) = rig.engine.poll()
    assert [4, 5, 6, 7, 8, 9] == done.token_ids.tolist()
    assert [(3, 2, 30), (4, 4, 40)] == [(s.version, s.length, s.proof) for s in done.segments]
    assert not rig.engine.busy()


def test_a_member_that_ended_while_it_was_being_frozen_is_handed_out_under_its_own_version(tmp_path: Path) -> None:
    rig = Rig()
    rig.submit(size=2)
    rig.core.sample(0, [STOP])
    rig.core.answer(0, "stop")
    rig.engine.pause("keep")
    rig.engine.load(moved_from(served_directory(), tmp_path / "new", seed=1), 4)
    rig.engine.set_proof(40)
    rig.engine.resume()

    (done,) = rig.engine.poll()

    assert [(3, 1, 30)] == [(s.version, s.length, s.proof) for s in done.segments]


def test_a_stamp_that_vllm_does_not_agree_with_stops_the_service() -> None:
    rig = Rig()
    rig.submit()
    rig.core.sample(0, [4, STOP])
    rig.core.answer(0, "stop", spans=[("2", 0, 1), ("3", 1, 2)])

    with pytest.raises(IllegalState, match="a stamp would be wrong"):
        rig.engine.poll()


@pytest.mark.parametrize("logprobs", [[-1.0, math.nan], [-1.0, -math.inf], [-1.0]])
def test_log_probabilities_that_are_missing_or_not_finite_are_an_error_and_not_a_sample(logprobs: list[float]) -> None:
    rig = Rig()
    rig.submit()
    rig.core.sample(0, [4, STOP])
    rig.core.answer(0, "stop", logprobs=logprobs)

    with pytest.raises(IllegalState, match="not finite"):
        rig.engine.poll()


def test_a_switch_clears_swaps_and_serves_in_that_order_under_a_salt_never_used_before(tmp_path: Path) -> None:
    rig = Rig()
    new = moved_from(served_directory(), tmp_path / "new", seed=1)
    salts = [rig.core.salt]
    rig.core.calls.clear()
    for _ in range(2):
        rig.engine.load(new, 4)
        salts.append(rig.core.salt)

    assert ["stop_all", "stage", "clear", "swap", "serve"] * 2 == rig.core.calls
    assert 3 == len(set(salts))
    assert "4" == rig.core.label


@pytest.mark.parametrize(
    ("where", "error", "touched"),
    [("stage", CheckpointInvalid, False), ("clear", EngineLost, False), ("swap", EngineLost, True)],
)
def test_a_failure_is_told_as_before_or_after_weights_were_touched(
    tmp_path: Path, where: str, error: type[Exception], touched: bool
) -> None:
    rig = Rig()
    new = moved_from(served_directory(), tmp_path / "new", seed=1)
    rig.core.fails_at = where

    with pytest.raises(error):
        rig.engine.load(new, 4)

    assert touched is rig.engine.weights_touched()
    if not touched:
        assert "3" == rig.core.label
    rig.core.fails_at = ""
    rig.engine.load(new, 4)
    assert not rig.engine.weights_touched()


def test_a_start_that_fails_leaves_nothing_open() -> None:
    cores: list[ScriptedVllm] = []

    def opened(settings: VllmEngineSettings, ring: Any) -> Any:
        cores.append(ScriptedVllm(ring))
        cores[0].fails_at = "start"
        return cores[0]

    engine = VllmEngine(VllmEngineSettings(self_test=False), VirtualClock(), lambda: None, opened)
    with pytest.raises(EngineLost):
        engine.load(served_directory(), 0)

    assert cores[0].closed
    with pytest.raises(IllegalState):
        engine.identity()


def test_the_longest_request_leaves_room_for_the_probe() -> None:
    rig = Rig()
    room = rig.core.max_tokens - 1 - len(rig.policy.encode("1,2=3:"))

    rig.submit(max_tokens=room)
    with pytest.raises(ValueError, match="one is kept for the probe"):
        rig.submit(max_tokens=room + 1)
