"""What every GenerationEngine promises, whatever computes underneath. Subclass it and give `make`.

The reference is a plain full forward pass over the whole sequence: no cache, no batch, no sampling code.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.model import load_policy
from infra.ports import EngineRequest, GenerationEngine
from schemas.errors import CheckpointInvalid, ConfigError, IllegalState
from schemas.trajectory import PromptRequest, Sampling
from tests.contract.engine_turns_contract import PROMPTS as PROMPTS
from tests.contract.engine_turns_contract import TOLERANCE as TOLERANCE
from tests.contract.engine_turns_contract import TurnsContract, drain, tokens_of
from tests.contract.engine_turns_contract import reference_logprobs as reference_logprobs
from tests.fakes.policy_rows import batch_of, generate, moved_directory, request_of, tiny_directory


class EngineContract(TurnsContract):
    """The suite. What an engine promises less of is said by these, and in its own test module."""

    long_tokens = 8
    """completions that are under way for a while"""
    keeps_random_stream = True
    """a frozen member that goes on under the same weights draws the numbers it would have drawn: the same bits"""

    def make(self) -> GenerationEngine:
        """An engine without weights."""
        raise NotImplementedError

    def get_under_way(self, engine: GenerationEngine, requests: Sequence[PromptRequest]) -> None:
        """Submit, and let every member have some tokens of its `long_tokens`, and none all."""
        for request in requests:
            engine.submit(EngineRequest(request=request, rng_seed=7))
        for _ in range(3):
            assert engine.poll() == []

    @pytest.fixture
    def old(self) -> Path:
        return tiny_directory()

    @pytest.fixture
    def new(self, tmp_path: Path) -> Path:
        return moved_directory(tmp_path / "new", seed=1)

    @pytest.fixture
    def engine(self, old: Path) -> GenerationEngine:
        engine = self.make()
        engine.load(old, 3)
        engine.set_proof(30)
        return engine

    # ------------------------------------------------------------ numbers

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    def test_logprobs_are_of_the_sampled_token_under_the_distribution_sampled_from(
        self, engine: GenerationEngine, old: Path, temperature: float
    ) -> None:
        policy = load_policy(old)
        sampling = Sampling(temperature=temperature, max_tokens=6, stop_token_ids=(0,))
        requests = [request_of(policy, text, number=n, sampling=sampling) for n, text in enumerate(PROMPTS)]

        for completion in generate(engine, requests):  # type: ignore[arg-type]
            prompt = requests[int(completion.group_id[3:9])].prompt_token_ids
            expected = reference_logprobs(policy, prompt, completion.token_ids, temperature)
            assert completion.logprobs.dtype == np.float32
            assert np.abs(expected - completion.logprobs).max() <= TOLERANCE

    def test_scores_are_the_logprobs_it_generated_with(self, engine: GenerationEngine, old: Path) -> None:
        policy = load_policy(old)
        requests = [request_of(policy, text, number=n) for n, text in enumerate(PROMPTS)]
        rows = batch_of(requests, generate(engine, requests)).rows  # type: ignore[arg-type]

        scores = engine.score(
            [[*row.trajectory.prompt_token_ids.tolist(), *row.trajectory.token_ids.tolist()] for row in rows],
            [len(row.trajectory.prompt_token_ids) for row in rows],
        )

        for row, score in zip(rows, scores, strict=True):
            assert np.abs(score - row.trajectory.logprobs).max() <= TOLERANCE

    def test_real_end_tokens_inside_a_sequence_are_not_taken_for_padding(
        self, engine: GenerationEngine, old: Path
    ) -> None:
        # Padding and end token share one id here: sequences of different length, with that id in the middle.
        policy = load_policy(old)
        sequences = [[2, 0, 3, 0, 4, 5], [2, 3, 0, 6], [0, 0, 7, 0, 0, 8, 9]]
        lengths = [2, 3, 1]

        scores = engine.score(sequences, lengths)

        for sequence, length, score in zip(sequences, lengths, scores, strict=True):
            tokens = np.array(sequence, dtype=np.int32)
            expected = reference_logprobs(policy, tokens[:length], tokens[length:])
            assert np.abs(expected - score).max() <= TOLERANCE

    def test_completions_are_well_formed(self, engine: GenerationEngine, old: Path) -> None:
        policy = load_policy(old)
        sampling = Sampling(max_tokens=3, stop_token_ids=(policy.eos_token_id,))
        requests = [request_of(policy, text, number=n, size=8, sampling=sampling) for n, text in enumerate(PROMPTS)]

        done = generate(engine, requests)  # type: ignore[arg-type]

        assert [(str(r.group_id), i) for r in requests for i in range(8)] == [
            (c.group_id, c.index_in_group) for c in done
        ]
        for completion in done:
            count = len(completion.token_ids)
            assert 1 <= count <= 3
            assert count == len(completion.logprobs) == len(completion.loss_mask)
            assert completion.loss_mask.all()
            assert [(3, count, 30)] == [(s.version, s.length, s.proof) for s in completion.segments]
            assert bool((completion.logprobs <= 1e-6).all())
            stopped = completion.token_ids[-1] == policy.eos_token_id
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert completion.text == policy.decode_all([[t for t in completion.token_ids.tolist() if t != 0]])[0]
        assert {"stop", "length"} == {completion.finish_reason for completion in done}

    def test_the_same_request_gives_the_same_group_and_another_seed_another(
        self, engine: GenerationEngine, old: Path
    ) -> None:
        request = request_of(load_policy(old), PROMPTS[2], size=8)

        first, again, other = (generate(engine, [request], seed) for seed in (7, 7, 8))  # type: ignore[arg-type]

        assert tokens_of(first) == tokens_of(again)
        assert tokens_of(first) != tokens_of(other)
        assert len({tuple(tokens) for tokens in tokens_of(first)}) > 1

    # ------------------------------------------------------------ pausing and switching

    def test_finish_lets_submitted_groups_end_under_the_old_version_and_holds_later_ones(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        policy = load_policy(old)
        early, late = request_of(policy, PROMPTS[0], number=0), request_of(policy, PROMPTS[0], number=1)
        engine.submit(EngineRequest(request=early, rng_seed=7))
        first = list(engine.poll())
        engine.pause("finish")
        engine.submit(EngineRequest(request=late, rng_seed=7))

        drained = first + drain(engine, until=lambda: str(early.group_id) not in engine.running_groups())

        assert {str(early.group_id)} == {completion.group_id for completion in drained}
        assert {3} == {segment.version for completion in drained for segment in completion.segments}
        assert frozenset({str(late.group_id)}) == engine.running_groups()
        engine.load(new, 4)
        engine.set_proof(40)
        engine.resume()
        after = drain(engine, until=lambda: not engine.busy())
        assert {(4, 40)} == {(s.version, s.proof) for completion in after for s in completion.segments}

    def test_keep_freezes_and_later_tokens_are_a_new_segment_computed_anew(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        before, after = load_policy(old), load_policy(new)
        sampling = Sampling(max_tokens=self.long_tokens)  # no stop token: every row runs on
        requests = [request_of(before, text, number=n, sampling=sampling) for n, text in enumerate(PROMPTS)]
        self.get_under_way(engine, requests)
        engine.pause("keep")
        assert engine.poll() == []
        engine.load(new, 4)
        engine.set_proof(40)
        engine.resume()

        done = drain(engine, until=lambda: not engine.busy())

        assert len(done) == 12
        mixed = [completion for completion in done if len(completion.segments) == 2]
        assert len(mixed) >= 4
        for completion in mixed:
            assert [segment.version for segment in completion.segments] == [3, 4]
            prompt = requests[int(completion.group_id[3:9])].prompt_token_ids
            cut = completion.segments[0].length
            under_old = reference_logprobs(before, prompt, completion.token_ids)
            under_new = reference_logprobs(after, prompt, completion.token_ids)
            assert np.abs(under_old - completion.logprobs)[:cut].max() <= TOLERANCE
            assert np.abs(under_new - completion.logprobs)[cut:].max() <= TOLERANCE
            assert np.abs(under_old - completion.logprobs)[cut:].max() > 1e-2

    def test_keep_without_a_load_changes_nothing(self, engine: GenerationEngine, old: Path) -> None:
        # At temperature 0 there is no random stream that a member could lose its place in.
        temperature = 1.0 if self.keeps_random_stream else 0.0
        sampling = Sampling(temperature=temperature, max_tokens=self.long_tokens)
        request = request_of(load_policy(old), PROMPTS[2], sampling=sampling)
        expected = generate(engine, [request])  # type: ignore[arg-type]
        self.get_under_way(engine, [request])
        engine.pause("keep")
        assert engine.poll() == []
        engine.resume()

        done = drain(engine, until=lambda: not engine.busy())

        done.sort(key=lambda completion: completion.index_in_group)
        assert tokens_of(expected) == tokens_of(done)
        assert {((3, self.long_tokens, 30),)} == {
            tuple((s.version, s.length, s.proof) for s in completion.segments) for completion in done
        }
        for a, b in zip(expected, done, strict=True):
            if self.keeps_random_stream:
                assert (a.logprobs == b.logprobs).all()
            assert np.abs(a.logprobs - b.logprobs).max() <= TOLERANCE

    def test_after_a_switch_it_answers_like_an_engine_that_only_knew_the_new_weights(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        request = request_of(load_policy(old), PROMPTS[2], sampling=Sampling(temperature=0.0, max_tokens=8))
        generate(engine, [request])  # type: ignore[arg-type]
        engine.load(new, 4)
        engine.set_proof(40)
        fresh = self.make()
        fresh.load(new, 4)
        fresh.set_proof(40)

        switched, expected = generate(engine, [request]), generate(fresh, [request])  # type: ignore[arg-type]

        assert tokens_of(expected) == tokens_of(switched)
        for a, b in zip(expected, switched, strict=True):
            assert np.abs(a.logprobs - b.logprobs).max() <= TOLERANCE

    def test_going_back_to_old_weights_gives_the_old_numbers_exactly(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        def scores() -> list[bytes]:
            return [score.tobytes() for score in engine.score([[2, 3, 4, 5], [6, 7, 8]], [1, 2])]

        first = scores()
        engine.load(new, 4)
        middle = scores()
        engine.load(old, 5)

        assert first != middle
        assert first == scores()

    def test_a_loaded_version_without_proof_samples_nothing(
        self, engine: GenerationEngine, old: Path, new: Path
    ) -> None:
        engine.load(new, 4)
        engine.submit(EngineRequest(request=request_of(load_policy(old), PROMPTS[0]), rng_seed=7))

        with pytest.raises(IllegalState, match="version 4 has no proof"):
            engine.poll()

    def test_loading_under_a_running_batch_needs_a_pause(self, engine: GenerationEngine, old: Path, new: Path) -> None:
        sampling = Sampling(max_tokens=self.long_tokens)
        self.get_under_way(engine, [request_of(load_policy(old), PROMPTS[2], sampling=sampling)])

        with pytest.raises(IllegalState, match="pause"):
            engine.load(new, 4)

    @pytest.mark.parametrize("damage", ["no weights", "cut file", "missing tensor", "other shape", "other tokenizer"])
    def test_a_bad_directory_is_refused_before_anything_is_touched(
        self, engine: GenerationEngine, old: Path, new: Path, damage: str
    ) -> None:
        request = request_of(load_policy(old), PROMPTS[2])
        expected = generate(engine, [request])  # type: ignore[arg-type]
        _damage(new, damage)

        with pytest.raises(CheckpointInvalid):
            engine.load(new, 4)

        assert not engine.weights_touched()
        again = generate(engine, [request])  # type: ignore[arg-type]
        assert tokens_of(expected) == tokens_of(again)
        assert {(3, 30)} == {(s.version, s.proof) for completion in again for s in completion.segments}

    def test_a_first_load_that_fails_leaves_an_engine_that_serves_nothing(self, new: Path) -> None:
        engine = self.make()
        _damage(new, "missing tensor")

        with pytest.raises(CheckpointInvalid):
            engine.load(new, 0)
        with pytest.raises(IllegalState):
            engine.score([[1, 2]], [1])
        with pytest.raises(IllegalState):
            engine.set_proof(1)

    # ------------------------------------------------------------ refusals

    def test_a_request_it_cannot_serve_is_refused_by_name(self, engine: GenerationEngine, old: Path) -> None:
        policy = load_policy(old)
        cases = {
            "max_tokens": Sampling(max_tokens=0),
            "temperature": Sampling(temperature=-1.0),
            "exceed": Sampling(max_tokens=10_000),
        }
        for words, sampling in cases.items():
            with pytest.raises(ConfigError, match=words):
                engine.submit(EngineRequest(request=request_of(policy, PROMPTS[0], sampling=sampling), rng_seed=7))
        assert not engine.busy()

    def test_identity_names_all_parts_of_the_fingerprint(self, engine: GenerationEngine) -> None:
        assert {"engine", "engine_version", "dtype", "tokenizer_digest"} == set(engine.identity())

    def test_closing_twice_is_safe_and_leaves_it_idle(self, engine: GenerationEngine, old: Path) -> None:
        engine.submit(EngineRequest(request=request_of(load_policy(old), PROMPTS[0]), rng_seed=7))

        engine.close()
        engine.close()

        assert not engine.busy()
        assert engine.poll() == []


def _damage(directory: Path, kind: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = directory / "model.safetensors"
    if kind == "no weights":
        weights.unlink()
    elif kind == "cut file":
        shutil.copy(weights, directory / "whole")
        weights.write_bytes((directory / "whole").read_bytes()[:-100])
    elif kind == "other tokenizer":
        path = directory / "tokenizer_config.json"
        path.write_bytes(path.read_bytes() + b"\n")
    else:
        tensors = load_file(weights)
        name = "model.norm.weight"
        tensors = {k: v.clone() for k, v in tensors.items() if kind != "missing tensor" or k != name}
        if kind == "other shape":
            tensors[name] = torch.zeros(3)
        save_file(tensors, weights)
