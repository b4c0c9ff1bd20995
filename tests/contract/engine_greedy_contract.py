"""What every GenerationEngine promises of `generate_greedily`, which the second probe stands on.

Mixed into the engine suite, which gives `make` and the fixtures `engine`, `old`, `new`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from infra.model import load_policy
from infra.ports import GenerationEngine
from schemas.errors import ConfigError, IllegalState
from schemas.trajectory import PromptRequest, Sampling
from tests.contract.engine_turns_contract import PROMPTS, TOLERANCE, drain, reference_logprobs
from tests.fakes.policy_rows import generate, request_of


class GreedyContract:
    """The suite."""

    long_tokens: int

    def make(self) -> GenerationEngine:
        """An engine without weights."""
        raise NotImplementedError

    def get_under_way(self, engine: GenerationEngine, requests: Sequence[PromptRequest]) -> None:
        """As in the engine suite."""
        raise NotImplementedError

    def test_greedy_tokens_are_those_of_temperature_zero_with_their_scores(
        self, engine: GenerationEngine, old: Path
    ) -> None:
        policy = load_policy(old)
        sampling = Sampling(temperature=0.0, max_tokens=5)
        requests = [request_of(policy, text, number=n, size=1, sampling=sampling) for n, text in enumerate(PROMPTS)]
        expected = generate(engine, requests)  # type: ignore[arg-type]

        answers = engine.generate_greedily([r.prompt_token_ids.tolist() for r in requests], 5)

        assert [completion.token_ids.tolist() for completion in expected] == [tokens.tolist() for tokens, _ in answers]
        for request, (tokens, logprobs) in zip(requests, answers, strict=True):
            reference = reference_logprobs(policy, request.prompt_token_ids, tokens)
            assert (tokens.dtype, logprobs.dtype) == (np.int32, np.float32)
            assert np.abs(reference - logprobs).max() <= TOLERANCE

    def test_greedy_tokens_need_no_proof_and_leave_what_runs_where_it_is(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        policy = load_policy(old)
        request = request_of(policy, PROMPTS[2], sampling=Sampling(max_tokens=self.long_tokens))
        self.get_under_way(engine, [request])
        engine.pause("keep")
        before = engine.generate_greedily([[2, 3, 4]], 3)
        engine.load(new, 4)
        after = engine.generate_greedily([[2, 3, 4]], 3)
        engine.load(old, 5)
        again = engine.generate_greedily([[2, 3, 4]], 3)
        engine.set_proof(50)
        engine.resume()

        done = drain(engine, until=lambda: not engine.busy())

        assert before[0][1].tobytes() != after[0][1].tobytes()
        assert before[0][1].tobytes() == again[0][1].tobytes()
        assert len(done) == 4
        for completion in done:
            first, second = completion.segments
            assert [(3, 30), (5, 50)] == [(s.version, s.proof) for s in completion.segments]
            assert first.length + second.length == self.long_tokens
            expected = reference_logprobs(policy, request.prompt_token_ids, completion.token_ids)
            assert np.abs(expected - completion.logprobs).max() <= TOLERANCE

    def test_greedy_tokens_behind_a_warm_prefix_are_those_of_the_new_weights(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        """C06."""
        block = max(1, engine.prefix_block())
        prompt = (np.asarray(load_policy(old).encode(PROMPTS[2])).tolist() * block)[: block + 8]
        engine.generate_greedily([prompt], 4)
        engine.load(new, 4)

        [(tokens, logprobs)] = engine.generate_greedily([prompt], 4)

        expected = reference_logprobs(load_policy(new), np.asarray(prompt, dtype=np.int32), tokens)
        assert np.abs(expected - logprobs).max() <= TOLERANCE

    def test_greedy_tokens_without_weights_or_beyond_the_context_are_refused(self, engine: GenerationEngine) -> None:
        with pytest.raises(IllegalState):
            self.make().generate_greedily([[1, 2]], 1)
        with pytest.raises(ConfigError, match="exceed"):
            engine.generate_greedily([[1, 2]], 10_000)
