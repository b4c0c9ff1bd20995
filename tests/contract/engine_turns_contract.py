"""The engine contract for one member alone and for later turns, and what all of the contract's parts share.

Expected numbers come from one plain forward pass over the whole sequence: no cache, no batch, no sampling code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infra.model import Policy, load_policy
from infra.ports import Completion, EngineRequest, GenerationEngine
from schemas.errors import ConfigError
from schemas.trajectory import Sampling
from tests.fakes.policy_rows import generate, request_of

TOLERANCE = 1e-4
PROMPTS = ("1,2=3:", "3,4=12:", "1,2,3,4=24:")


def reference_logprobs(
    policy: Policy, prompt: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], temperature: float = 1.0
) -> npt.NDArray[np.float64]:
    """log softmax(logits / T) of each completion token, one sequence, whole context at once."""
    sequence = torch.tensor([[*prompt.tolist(), *tokens.tolist()]])
    with torch.no_grad():
        logits = policy.model(input_ids=sequence, use_cache=False).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[torch.arange(sequence.shape[1] - 1), sequence[0, 1:]]
    found: npt.NDArray[np.float64] = logprobs[len(prompt) - 1 :].numpy()
    return found


class TurnsContract:
    """Part of EngineContract, which brings the fixtures."""

    def test_a_member_of_a_group_alone_samples_what_it_samples_among_all(
        self, engine: GenerationEngine, old: Path
    ) -> None:
        request = request_of(load_policy(old), PROMPTS[2], size=6)
        together = generate(engine, [request])  # type: ignore[arg-type]
        for member in (4, 1):
            engine.submit(EngineRequest(request=request, rng_seed=7, member=member))

        alone = drain(engine, until=lambda: not engine.busy())

        assert {1, 4} == {completion.index_in_group for completion in alone}
        for completion in alone:
            other = together[completion.index_in_group]
            assert other.token_ids.tolist() == completion.token_ids.tolist()
            assert np.abs(other.logprobs - completion.logprobs).max() <= TOLERANCE

    def test_a_later_turn_holds_the_new_tokens_only_conditioned_on_prompt_and_context(
        self, engine: GenerationEngine, old: Path
    ) -> None:
        policy = load_policy(old)
        sampling = Sampling(max_tokens=9)  # no stop token: the length alone ends a turn
        request = request_of(policy, PROMPTS[0], size=3, sampling=sampling)
        contexts = {0: (5, 0, 7, 8), 2: (9,)}
        for member, context in contexts.items():
            engine.submit(EngineRequest(request=request, rng_seed=7, member=member, context=context))

        done = drain(engine, until=lambda: not engine.busy())

        assert {0, 2} == {completion.index_in_group for completion in done}
        for completion in done:
            context = contexts[completion.index_in_group]
            assert 9 - len(context) == len(completion.token_ids)
            assert [(3, 9 - len(context), 30)] == [(s.version, s.length, s.proof) for s in completion.segments]
            known = np.array([*request.prompt_token_ids.tolist(), *context], dtype=np.int32)
            expected = reference_logprobs(policy, known, completion.token_ids)
            assert np.abs(expected - completion.logprobs).max() <= TOLERANCE

    def test_two_turns_of_one_member_draw_different_numbers(self, engine: GenerationEngine, old: Path) -> None:
        # Same known tokens, cut between prompt and context in two ways: only the random stream differs.
        policy = load_policy(old)
        whole = request_of(policy, "1,2=3:1+2,3=", size=1, sampling=Sampling(max_tokens=24))
        ids = whole.prompt_token_ids
        cut = replace(whole, prompt_token_ids=ids[:6], sampling=Sampling(max_tokens=24 + len(ids) - 6))
        engine.submit(EngineRequest(request=whole, rng_seed=7))
        first = drain(engine, until=lambda: not engine.busy())
        context = tuple(ids[6:].tolist())
        engine.submit(EngineRequest(request=cut, rng_seed=7, member=0, context=context))
        second = drain(engine, until=lambda: not engine.busy())

        assert len(first[0].token_ids) == len(second[0].token_ids) == 24
        assert tokens_of(first) != tokens_of(second)

    def test_a_later_turn_submitted_while_frozen_is_sampled_under_the_new_weights(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        request = request_of(load_policy(old), PROMPTS[0])
        engine.pause("keep")
        engine.submit(EngineRequest(request=request, rng_seed=7, member=1, context=(5, 0, 7)))
        assert engine.poll() == []
        assert frozenset({str(request.group_id)}) == engine.running_groups()
        engine.load(new, 4)
        engine.set_proof(40)
        engine.resume()

        (done,) = drain(engine, until=lambda: not engine.busy())

        assert {(4, 40)} == {(segment.version, segment.proof) for segment in done.segments}

    def test_a_turn_that_no_group_can_have_is_refused_by_name(self, engine: GenerationEngine, old: Path) -> None:
        policy = load_policy(old)
        request = request_of(policy, PROMPTS[0], size=2)
        for words, wrong in {
            "member 2 of a group of 2": {"member": 2},
            "name it": {"context": (5,)},
            "leaves none": {"member": 0, "context": (5,) * 8},
            "vocabulary": {"member": 0, "context": (10_000,)},
        }.items():
            with pytest.raises(ConfigError, match=words):
                engine.submit(EngineRequest(request=request, rng_seed=7, **wrong))  # type: ignore[arg-type]
        assert not engine.busy()


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def drain(engine: GenerationEngine, until: Callable[[], bool]) -> list[Completion]:
    done: list[Completion] = []
    for _ in range(200):
        if until():
            return done
        done.extend(engine.poll())
    raise AssertionError("the engine did not get there in 200 steps")
