"""The transformers engine under the engine contract, and what it promises beyond it."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.model import load_policy, unique_tensors
from infra.ports import EngineRequest
from producers.engines import hf
from producers.engines.hf import HfEngine, HfEngineSettings
from producers.engines.hf_batching import score_sequences
from producers.engines.hf_sampling import draw, uniforms
from schemas.errors import ConfigError, IllegalState
from schemas.trajectory import Sampling
from tests.contract.engine_contract import PROMPTS, TOLERANCE, EngineContract
from tests.contract.engine_greedy_contract import GreedyContract
from tests.fakes.policy_rows import generate, moved_directory, request_of, tiny_directory
from tests.fakes.virtual_clock import VirtualClock

pytestmark = pytest.mark.contract


def make(batching: Any = "group", **settings: Any) -> HfEngine:
    return HfEngine(HfEngineSettings(batching=batching, threads=1, **settings), VirtualClock())


def serving(batching: Any = "group", **settings: Any) -> HfEngine:
    engine = make(batching, **settings)
    engine.load(tiny_directory(), 0)
    engine.set_proof(1)
    return engine


class TestGroupBatching(EngineContract, GreedyContract):
    def make(self) -> HfEngine:
        return make("group")


class TestMixedBatching(EngineContract, GreedyContract):
    def make(self) -> HfEngine:
        return make("mixed")


def test_in_group_batching_the_bytes_of_a_group_do_not_depend_on_its_neighbours() -> None:
    policy = load_policy(tiny_directory())
    requests = [request_of(policy, text, number=n, size=8) for n, text in enumerate(PROMPTS)]
    together = {c.group_id + str(c.index_in_group): c for c in generate(serving(), requests)}

    for request in reversed(requests):
        for alone in generate(serving(), [request]):
            other = together[alone.group_id + str(alone.index_in_group)]
            assert alone.token_ids.tobytes() == other.token_ids.tobytes()
            assert alone.logprobs.tobytes() == other.logprobs.tobytes()


def test_mixed_batching_samples_the_same_tokens_up_to_rounding() -> None:
    policy = load_policy(tiny_directory())
    requests = [request_of(policy, text, number=n, size=8) for n, text in enumerate(PROMPTS)]

    for a, b in zip(generate(serving("group"), requests), generate(serving("mixed"), requests), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.abs(a.logprobs - b.logprobs).max() <= TOLERANCE


def test_mixed_batching_keeps_to_its_sequence_limit_and_takes_a_larger_group_alone() -> None:
    policy = load_policy(tiny_directory())
    engine = serving("mixed", max_batch_sequences=6)
    for number, size in enumerate((4, 2, 1, 9)):
        request = request_of(policy, PROMPTS[0], number=number, size=size, sampling=Sampling(max_tokens=1))
        engine.submit(EngineRequest(request=request, rng_seed=0))

    assert [len(engine.poll()) for _ in range(3)] == [6, 1, 9]
    assert not engine.busy()


def test_members_asked_for_one_after_another_share_a_batch_and_other_groups_do_not_join_it() -> None:
    policy = load_policy(tiny_directory())
    engine = serving()
    one, two = (request_of(policy, PROMPTS[0], number=n, sampling=Sampling(max_tokens=2)) for n in range(2))
    for member in (2, 0):
        engine.submit(EngineRequest(request=one, rng_seed=0, member=member, context=(3,)))
    engine.submit(EngineRequest(request=two, rng_seed=0, member=1, context=(3,)))

    assert [[(c.group_id, c.index_in_group) for c in engine.poll()] for _ in range(2)] == [
        [(str(one.group_id), 2), (str(one.group_id), 0)],
        [(str(two.group_id), 1)],
    ]


def test_one_poll_is_one_decode_step() -> None:
    policy = load_policy(tiny_directory())
    engine = serving()
    engine.submit(EngineRequest(request=request_of(policy, PROMPTS[0], sampling=Sampling(max_tokens=5)), rng_seed=0))

    assert [len(engine.poll()) for _ in range(5)] == [0, 0, 0, 0, 4]


def test_a_load_that_fails_half_way_stops_the_engine_until_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = moved_directory(tmp_path / "new", seed=1)
    engine = serving()
    request = request_of(load_policy(new), PROMPTS[0])
    real = hf.apply_weights

    def half(model: Any, tensors: Any) -> None:
        real(model, dict(list(tensors.items())[:5]))
        raise OSError("input/output error")

    monkeypatch.setattr(hf, "apply_weights", half)
    with pytest.raises(OSError, match="input/output"):
        engine.load(new, 1)
    monkeypatch.setattr(hf, "apply_weights", real)

    assert engine.weights_touched()
    engine.submit(EngineRequest(request=request, rng_seed=7))
    with pytest.raises(IllegalState, match="in doubt"):
        engine.poll()
    with pytest.raises(IllegalState, match="whole weights"):
        engine.score([[1, 2]], [1])
    engine.load(new, 1)
    engine.set_proof(2)
    assert not engine.weights_touched()
    while engine.busy():
        engine.poll()


def test_twenty_switches_leave_no_tensors_behind(tmp_path: Path) -> None:
    new = moved_directory(tmp_path / "new", seed=1)
    engine = serving()
    request = request_of(load_policy(new), PROMPTS[2])

    def switch(times: int) -> int:
        for number in range(times):
            engine.load(new if number % 2 else tiny_directory(), number)
            engine.set_proof(number)
            generate(engine, [request])
        gc.collect()
        return sum(item.numel() for item in gc.get_objects() if isinstance(item, torch.Tensor))

    before = switch(2)

    assert before == switch(20)


def test_weights_that_give_no_finite_numbers_are_an_error_and_not_a_sample() -> None:
    engine = serving()
    policy = load_policy(tiny_directory())
    assert engine._policy is not None
    with torch.no_grad():
        unique_tensors(engine._policy.model)["model.norm.weight"].fill_(math.nan)
    engine.submit(EngineRequest(request=request_of(policy, PROMPTS[0]), rng_seed=0))

    with pytest.raises(IllegalState, match="not finite"):
        engine.poll()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.9),
        Sampling(top_k=5),
        Sampling(min_p=0.1),
        Sampling(presence_penalty=1.0),
        Sampling(frequency_penalty=1.0),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias=((1, 2.0),)),
        Sampling(min_tokens=2),
        Sampling(logprobs_mode="raw"),
    ],
)
def test_a_transform_it_does_not_do_is_refused_and_never_dropped(sampling: Sampling) -> None:
    request = request_of(load_policy(tiny_directory()), PROMPTS[0], sampling=sampling)

    with pytest.raises(ConfigError, match="engine hf samples from the whole distribution"):
        serving().submit(EngineRequest(request=request, rng_seed=0))


def test_generation_defaults_of_a_model_directory_change_nothing(tmp_path: Path) -> None:
    plain = moved_directory(tmp_path / "plain", seed=1)
    loud = moved_directory(tmp_path / "loud", seed=1)
    (loud / "generation_config.json").write_text('{"temperature": 0.01, "top_k": 1, "max_new_tokens": 1}')
    request = request_of(load_policy(plain), PROMPTS[2])
    answers = []
    for directory in (plain, loud):
        engine = make()
        engine.load(directory, 0)
        engine.set_proof(0)
        answers.append([completion.token_ids.tolist() for completion in generate(engine, [request])])

    assert answers[0] == answers[1]


def test_a_stored_logprob_is_that_of_scaled_logits() -> None:
    # Sampled token 1 of logits [2, 1, 0] at T = 0.5: ln softmax([4, 2, 0])[1]
    logits = torch.tensor([[2.0, 1.0, 0.0]])

    token, logprob = draw(logits, torch.tensor([0.5]), torch.tensor([0.9], dtype=torch.float64))

    assert token.tolist() == [1]
    assert float(logprob[0]) == pytest.approx(-2.142932, abs=1e-6)


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, -30.0, 2.0]])
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    rows = len(grid)

    tokens, _ = draw(logits.expand(rows, -1), torch.ones(rows), grid)

    shares = torch.bincount(tokens, minlength=5) / rows
    assert torch.allclose(shares, logits[0].softmax(-1), atol=2e-4)
    assert [int(draw(logits, torch.ones(1), torch.tensor([u], dtype=torch.float64))[0]) for u in (0.0, 1 - 2**-53)] == [
        0,
        4,
    ]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    token, logprob = draw(torch.tensor([[0.0, 3.0, 1.0]]), torch.zeros(1), torch.tensor([0.99], dtype=torch.float64))

    assert token.tolist() == [1]
    assert float(logprob[0]) == pytest.approx(float(torch.tensor([0.0, 3.0, 1.0]).log_softmax(0)[1]))


def test_a_members_random_numbers_depend_on_seed_group_and_index_only() -> None:
    numbers = uniforms(7, "t/p000000/e0/a0", 3, 1000)

    assert numbers[:10].tolist() == uniforms(7, "t/p000000/e0/a0", 3, 10).tolist()
    for other in (
        uniforms(8, "t/p000000/e0/a0", 3, 10),
        uniforms(7, "t/p000000/e0/a1", 3, 10),
        uniforms(7, "t/p000000/e0/a0", 4, 10),
    ):
        assert numbers[:10].tolist() != other.tolist()
    assert uniforms(7, "t/p000000/e0/a0", 3, 10, context_tokens=4).tolist() != numbers[:10].tolist()
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.05
    # The first numbers are part of the record of a run: a change here would break every replay.
    assert uniforms(0, "demo/p000000/e0/a0", 0, 2).tolist() == [0.20738729394439037, 0.64914452179918]


def test_scoring_needs_a_prompt_and_a_completion() -> None:
    model = load_policy(tiny_directory()).model

    assert score_sequences(model, [], []) == []
    for length in (0, 3):
        with pytest.raises(ValueError, match="prompt length"):
            score_sequences(model, [[1, 2, 3]], [length])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batching": "both"}, "batching"),
        ({"max_batch_sequences": 0}, "max_batch_sequences"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HfEngineSettings(**settings)
