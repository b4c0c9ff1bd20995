"""GenerationEngine on vLLM in this process: continuous batching, several groups in flight, token ids in and out.

Each member is a request of its own with its own seed. A frozen member is ended in vLLM, and goes on after the
switch as a new request behind the tokens it has: every vLLM request runs under one set of weights, so segments are
exact by construction, and what the engine recorded while it sampled must agree. The core computes by itself and
rings; `poll` only collects.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from infra.logs import event
from infra.model import Policy
from infra.model_adapter import is_adapter
from infra.ports import Clock, Completion, EngineRequest
from producers.engines.members import completions
from producers.engines.vllm_core import Answer, Ask, VllmCore, log
from producers.engines.vllm_member import Member, members_of
from producers.engines.vllm_sampling import check_sampling, greedy_arguments, scoring_arguments
from producers.engines.vllm_self_test import self_test
from producers.engines.vllm_settings import VllmEngineSettings
from producers.engines.vllm_weights import (
    Weights,
    change_is_visible,
    check_shape,
    checked_weights,
    positions_of,
    skeleton,
)
from schemas.errors import CheckpointInvalid, ConfigError, EngineLost, IllegalState


class VllmEngine:
    """See the module. vLLM is started by the first `load`."""

    def __init__(
        self,
        settings: VllmEngineSettings,
        clock: Clock,
        ring: Callable[[], None],
        open_core: Callable[[VllmEngineSettings, Callable[[], None]], VllmCore] = VllmCore,
    ) -> None:
        """`ring` is called from another thread whenever a member has finished."""
        self._settings = settings
        self._clock = clock
        self._ring = ring
        self._open_core = open_core
        self._core: VllmCore | None = None
        self._policy: Policy | None = None
        self._weights: Weights | None = None
        self._version: int | None = None
        self._proof: int | None = None
        self._touched = False
        self._paused: Literal["finish", "keep"] | None = None
        self._stopping: Future[None] | None = None
        """the freeze under way"""
        self._keys = itertools.count()
        self._loads = itertools.count()
        self._running: dict[int, Member] = {}
        self._waiting: deque[Member] = deque()
        self._held: deque[Member] = deque()
        """submitted after pause("finish"): waits for resume"""
        self._done: list[Member] = []
        """finished, and not handed out"""
        self._closed = False

    # ------------------------------------------------------------ generation

    def submit(self, request: EngineRequest) -> None:
        """Queue one group or member; ConfigError when this engine or model cannot serve it as asked."""
        prompt = request.request
        check_sampling(prompt.sampling)
        if prompt.group_size < 1 or len(prompt.prompt_token_ids) < 1:
            raise ConfigError(f"{prompt.group_id}: a group needs at least one member and one prompt token")
        members = members_of(request, self._clock.now_us())
        self._check_fits(str(prompt.group_id), members[0].prompt, request.new_tokens)
        (self._held if self._paused == "finish" else self._waiting).extend(members)
        if self._can_begin():
            self._begin_waiting()

    def poll(self) -> Sequence[Completion]:
        """Members that have finished since. Never waits, computes nothing."""
        if self._paused == "keep" or self._closed:
            return []
        if self._waiting:
            self._serving()
        self._collect()
        if self._can_begin():
            self._begin_waiting()
        done, self._done = self._done, []
        decode = self._policy.decode_all if self._settings.decode_text and self._policy is not None else None
        return completions(done, decode, self._clock.now_us())

    def computes_alone(self) -> bool:
        """True: the service may sleep until it is rung for."""
        return True

    def busy(self) -> bool:
        """Something is queued or running."""
        return bool(self._running or self._waiting or self._held or self._done)

    def running_groups(self) -> frozenset[str]:
        """Group ids queued or running."""
        return frozenset(
            member.group_id for member in (*self._running.values(), *self._waiting, *self._held, *self._done)
        )

    # ------------------------------------------------------------ switching weights

    def pause(self, mode: Literal["finish", "keep"]) -> None:
        """finish: what was submitted so far ends through `poll`, later groups wait; keep: freeze at once."""
        if self._core is not None:
            self._core.check()
        self._paused = mode
        if mode == "keep" and self._running and self._core is not None:
            self._stopping = self._core.stop_all()

    def load(self, directory: Path, version: int) -> None:
        """Replace the weights in every worker and forget every cache; `set_proof` must follow before a token is
        sampled. CheckpointInvalid leaves the old weights serving; after EngineLost `weights_touched()` tells."""
        if self._running and self._paused is None:
            raise IllegalState(f"load of version {version} while generating: pause the engine first")
        if self._core is None or self._policy is None:
            self._first_load(directory, version)
            return
        weights = checked_weights(self._policy, directory, self._settings.base_directory)
        try:
            self._freeze()
            self._stage(weights, directory)
            self._clear(version)
            self._touched = True
            self._core.swap()
        finally:
            weights.release()
        self._core.serve(str(version), self._salt(version))
        self._note_what_the_cast_swallows(weights, version)
        self._weights, self._version, self._proof, self._touched = weights, version, None, False

    def weights_touched(self) -> bool:
        """A load began to replace weights and did not end well."""
        return self._touched

    def set_proof(self, proof: int) -> None:
        """The policy offset of this worker's VersionLoaded for the loaded version."""
        if self._version is None:
            raise IllegalState("set_proof before any load: there is no version to prove")
        self._proof = proof

    def resume(self) -> None:
        """Go on after pause."""
        self._paused = None
        self._waiting.extend(self._held)
        self._held.clear()
        if self._can_begin():
            self._begin_waiting()

    def score(
        self, token_ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Sequence[npt.NDArray[np.float32]]:
        """Temperature-1 log-probability of each token after the prompt, by vLLM's forward pass over whole sequences.
        One request after another: the same weights give the same bits."""
        core = self._whole("score")
        found = []
        for place, (ids, length) in enumerate(zip(token_ids, prompt_lengths, strict=True)):
            if not 0 < length < len(ids):
                raise ValueError(f"sequence {place}: prompt length {length} must be between 1 and {len(ids) - 1}")
            self._check_fits("score", ids, 1, spare=0)
            answer = core.ask(ids, scoring_arguments())
            found.append(np.asarray(answer.prompt_logprobs[length - 1 :], dtype=np.float32))
        return found

    def prefix_block(self) -> int:
        """Tokens of a block of vLLM's prefix cache; 0 where it is off."""
        return 0 if self._core is None else self._core.block

    def generate_greedily(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        """The likeliest tokens after each prompt and their log-probabilities, as `poll`'s requests are computed."""
        core = self._whole("generation")
        found = []
        for place, prompt in enumerate(prompts):
            self._check_fits(f"greedy prompt {place}", prompt, tokens)
            answer = core.ask(prompt, greedy_arguments(tokens))
            found.append((np.asarray(answer.token_ids, np.int32), np.asarray(answer.logprobs, np.float32)))
        return found

    def identity(self) -> Mapping[str, str]:
        """The fingerprint parts."""
        if self._policy is None or self._core is None:
            raise IllegalState("identity before the first load: the tokenizer comes with the weights")
        return {
            "engine": "vllm",
            "engine_version": self._core.version,
            "dtype": self._settings.dtype,
            "tokenizer_digest": self._policy.tokenizer_digest,
        }

    def close(self) -> None:
        """End vLLM. Safe to call twice."""
        self._closed = True
        for members in (self._waiting, self._held, self._done, self._running):
            members.clear()
        core, self._core, self._policy, self._weights = self._core, None, None, None
        if core is not None:
            core.close()

    # ------------------------------------------------------------ private

    def _first_load(self, directory: Path, version: int) -> None:
        """vLLM starts on a whole model: on the directory, or on the base of the adapter that lies there."""
        base = self._settings.base_directory
        whole = base if base is not None and is_adapter(directory) else directory
        policy = skeleton(whole)
        checked_weights(policy, directory, base).release()
        weights = checked_weights(policy, whole, base)
        core = self._open_core(self._settings, self._ring)
        try:
            check_shape(policy, core.build)
            core.start(whole, str(version), positions_of(policy))
            core.stage(weights.files, weights.shapes)
            core.serve(str(version), self._salt(version))
            if self._settings.self_test:
                self_test(core, policy, lambda: self._salt(version), str(version), self._settings.dtype)
        except Exception:
            core.close()
            raise
        self._core, self._policy, self._weights = core, policy, weights
        if whole != directory:
            self.load(directory, version)
        self._version = version

    def _stage(self, weights: Weights, directory: Path) -> None:
        assert self._core is not None
        try:
            self._core.stage(weights.files, weights.shapes)
        except EngineLost as error:
            self._core.check()
            raise CheckpointInvalid(f"{directory} cannot be read by vllm's workers: {error}") from error

    def _clear(self, version: int) -> None:
        assert self._core is not None and self._version is not None
        try:
            self._core.clear()
        except EngineLost as error:
            # Nothing was replaced: what is served goes on, if vLLM still can.
            self._core.serve(str(self._version), self._salt(self._version))
            raise EngineLost(f"version {version} was not loaded: {error}") from error

    def _note_what_the_cast_swallows(self, weights: Weights, version: int) -> None:
        dtype = self._settings.dtype
        if self._weights is None or self._proof is None or not weights.narrows_to(dtype):
            return  # what was there before never served, or is served as it is published
        if not change_is_visible(self._weights.tensors, weights.tensors, dtype):
            event(log, "no_visible_change_after_cast", policy_version=version, dtype=dtype)

    def _salt(self, version: int) -> str:
        # A version may be loaded twice, the first time half way: no two loads share a salt.
        return f"{version}/{next(self._loads)}"

    def _freeze(self) -> None:
        """End what still runs in vLLM, and take back what it has sampled."""
        assert self._core is not None
        stopping = self._stopping or self._core.stop_all()
        try:
            stopping.result(self._settings.load_limit_s)
        except TimeoutError as error:
            limit_s = self._settings.load_limit_s
            raise EngineLost(f"vllm: running requests did not end within {limit_s:g} s of being stopped") from error
        self._collect()
        assert not self._running, "every request was ended"

    def _serving(self) -> tuple[int, int]:
        if self._touched:
            raise IllegalState("the weights are in doubt after a failed load: nothing is sampled until a good one")
        if self._core is None or self._version is None:
            raise IllegalState("no weights are loaded: load a version before polling")
        if self._proof is None:
            raise IllegalState(f"version {self._version} has no proof: set_proof must follow load")
        return self._version, self._proof

    def _can_begin(self) -> bool:
        if self._stopping is not None and self._stopping.done():
            self._stopping = None
        ready = self._core is not None and self._proof is not None and not self._touched and self._stopping is None
        return ready and self._paused != "keep" and not self._closed

    def _begin_waiting(self) -> None:
        version, proof = self._serving()
        assert self._core is not None
        asks = []
        for member in self._waiting:
            member.version, member.proof = version, proof
            key = next(self._keys)
            self._running[key] = member
            asks.append(Ask(key=key, token_ids=member.context(), arguments=member.arguments()))
        self._waiting.clear()
        if asks:
            self._core.begin(asks)

    def _collect(self) -> None:
        if self._core is None:
            return
        unfinished: list[Member] = []
        for answer in self._core.take():
            member = self._running.pop(answer.key)
            _check_answer(answer, member)
            member.take(answer.token_ids, answer.logprobs, member.version, member.proof)
            (self._done if member.finished() else unfinished).append(member)
        self._waiting.extendleft(reversed(unfinished))

    def _whole(self, what: str) -> VllmCore:
        if self._core is None or self._touched:
            raise IllegalState(f"{what} without whole weights: load a version first")
        return self._core

    def _check_fits(self, name: str, token_ids: Sequence[int], more: int, spare: int = 1) -> None:
        """`spare`: vLLM scores a sequence only with room for one token behind it, so the longest one leaves it."""
        if self._core is None or self._policy is None:
            return
        limit, vocabulary = self._core.max_tokens - spare, self._policy.vocabulary_size
        if len(token_ids) + more > limit:
            raise ConfigError(
                f"{name}: {len(token_ids)} tokens (prompt and earlier turns) and {more} more exceed the {limit} that "
                "vllm serves here (vllm.max_model_len, and one is kept for the probe)"
            )
        if max(token_ids) >= vocabulary or min(token_ids) < 0:
            raise ConfigError(
                f"{name}: a token of the prompt or of earlier turns is outside the vocabulary of {vocabulary}"
            )


def _check_answer(answer: Answer, member: Member) -> None:
    count = len(answer.token_ids)
    if len(answer.logprobs) != count or not all(math.isfinite(value) for value in answer.logprobs):
        raise IllegalState(
            f"{member.group_id}: the model of version {member.version} gives log-probabilities that are missing or not "
            "finite: reload it"
        )
    expected = [(str(member.version), 0, count)] if count else []
    if answer.spans != expected:
        raise IllegalState(
            f"{member.group_id}: vllm says that {answer.spans} sampled {count} tokens begun under version "
            f"{member.version}: a stamp would be wrong; restart the service"
        )
