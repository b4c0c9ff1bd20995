"""GenerationEngine on plain transformers: samples groups on any machine, and says what it promises.

batching = "group": one group a forward batch, one group after another; a group's bytes depend only on the
weights and the request (same machine type, threads, libraries), and in later turns on which members were asked
for one right after another: they share a batch. "mixed": several groups in one batch:
faster, and the last bits of a log-probability may depend on the neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from infra.model import DTYPES, Policy, apply_weights, check_static_files, library_versions
from infra.model_adapter import load_served, serving_tensors
from infra.ports import Clock, Completion, EngineRequest
from producers.engines.hf_batching import RunningBatch, greedy_rows, score_sequences, start_rows
from producers.engines.hf_sampling import check_sampling
from producers.engines.members import completions
from schemas.errors import CheckpointInvalid, ConfigError, IllegalState, UsageError

_NO_PROOF = -1
"""stamp of tokens that are thrown away"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfEngineSettings:
    """How the engine computes."""

    batching: Literal["group", "mixed"] = "group"
    max_batch_sequences: int = 256
    """mixed: groups join a batch up to so many sequences (one group always fits)"""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    """torch threads of the process; None leaves them as they are"""
    base_directory: Path | None = None
    """the model that versions published as adapters are on; None: only whole models can be served"""
    decode_text: bool = True
    """give each completion its text (rewards usually need it)"""

    def __post_init__(self) -> None:
        if self.batching not in ("group", "mixed"):
            raise ConfigError(f"engine.batching = {self.batching!r}: use group or mixed")
        if self.max_batch_sequences < 1:
            raise ConfigError(f"engine.max_batch_sequences = {self.max_batch_sequences}: must be at least 1")
        if self.dtype not in DTYPES:
            raise ConfigError(f"engine.dtype = {self.dtype!r}: use one of {', '.join(DTYPES)}")


class HfEngine:
    """See the module. Holds no weights until the first `load`."""

    def __init__(self, settings: HfEngineSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._policy: Policy | None = None
        self._version: int | None = None
        self._proof: int | None = None
        self._touched = False
        self._paused: Literal["finish", "keep"] | None = None
        self._queue: deque[EngineRequest] = deque()
        self._held: deque[EngineRequest] = deque()
        """submitted after pause("finish"): waits for resume"""
        self._batch: RunningBatch | None = None
        self._closed = False
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)

    # ------------------------------------------------------------ generation

    def submit(self, request: EngineRequest) -> None:
        """Queue one group or member; ConfigError when this engine or model cannot serve it as asked."""
        prompt = request.request
        check_sampling(prompt.sampling)
        if prompt.group_size < 1 or len(prompt.prompt_token_ids) < 1:
            raise ConfigError(f"{prompt.group_id}: a group needs at least one member and one prompt token")
        known = np.concatenate([prompt.prompt_token_ids, np.asarray(request.context, dtype=np.int32)])
        self._check_fits(prompt.group_id, known, request.new_tokens)
        (self._held if self._paused == "finish" else self._queue).append(request)

    def poll(self) -> Sequence[Completion]:
        """One decode step of the running batch; the members finished by it."""
        if self._paused == "keep" or self._closed:
            return []
        if self._batch is None and self._queue:
            self._batch = self._next_batch()
        if self._batch is None:
            return []
        policy, version, proof = self._serving()
        finished = self._batch.step(version, proof)
        if not self._batch.rows:
            self._batch = None
        decode = policy.decode_all if self._settings.decode_text else None
        return completions(finished, decode, self._clock.now_us())

    def busy(self) -> bool:
        """Something is queued or running."""
        return self._batch is not None or bool(self._queue) or bool(self._held)

    def computes_alone(self) -> bool:
        """False: every token is computed in `poll`."""
        return False

    def running_groups(self) -> frozenset[str]:
        """Group ids queued or running."""
        running = {row.group_id for row in self._batch.rows} if self._batch is not None else set()
        queued = {str(request.request.group_id) for request in (*self._queue, *self._held)}
        return frozenset(running | queued)

    # ------------------------------------------------------------ switching weights

    def pause(self, mode: Literal["finish", "keep"]) -> None:
        """finish: what was submitted so far ends through `poll`, later groups wait; keep: freeze at once."""
        self._paused = mode

    def load(self, directory: Path, version: int) -> None:
        """Replace the weights in place and forget every cache; `set_proof` must follow before a token is sampled.

        CheckpointInvalid leaves the old weights serving, unless `weights_touched()` says otherwise.
        """
        if self._batch is not None and self._paused is None:
            raise IllegalState(f"load of version {version} while generating: pause the engine first")
        if self._policy is None:
            self._policy = self._first_load(directory)
        else:
            check_static_files(self._policy, directory)
            tensors = serving_tensors(self._policy.model, directory, self._settings.base_directory)
            self._touched = True
            apply_weights(self._policy.model, tensors)
        self._version, self._proof, self._touched = version, None, False
        if self._batch is not None:
            self._batch.forget_cache()

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
        self._queue.extend(self._held)
        self._held.clear()

    def score(
        self, token_ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Sequence[npt.NDArray[np.float32]]:
        """Temperature-1 log-probability of each token after the prompt, through the forward pass that generates."""
        if self._policy is None or self._touched:
            raise IllegalState("score without whole weights: load a version first")
        return score_sequences(self._policy.model, token_ids, prompt_lengths)

    def prefix_block(self) -> int:
        """0: a cache belongs to one running batch and ends with it."""
        return 0

    def generate_greedily(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        """The likeliest tokens after each prompt and their log-probabilities, in a batch of their own as in `poll`."""
        if self._policy is None or self._touched or self._version is None:
            raise IllegalState("generation without whole weights: load a version first")
        rows = greedy_rows(prompts, tokens, self._clock.now_us())
        for row in rows:
            self._check_fits(row.group_id, np.asarray(row.prompt), tokens)
        batch = RunningBatch(self._policy.model, rows)
        while batch.rows:
            batch.step(self._version, _NO_PROOF)
        return [(np.asarray(row.tokens, dtype=np.int32), np.asarray(row.logprobs, dtype=np.float32)) for row in rows]

    def identity(self) -> Mapping[str, str]:
        """The fingerprint parts."""
        if self._policy is None:
            raise IllegalState("identity before the first load: the tokenizer comes with the weights")
        return {
            "engine": "hf",
            "engine_version": library_versions()["transformers"],
            "dtype": self._settings.dtype,
            "tokenizer_digest": self._policy.tokenizer_digest,
        }

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        self._closed = True
        self._batch = None
        self._queue.clear()
        self._held.clear()
        self._policy = None

    # ------------------------------------------------------------ private

    def _serving(self) -> tuple[Policy, int, int]:
        if self._touched:
            raise IllegalState("the weights are in doubt after a failed load: nothing is sampled until a good one")
        if self._policy is None or self._version is None:
            raise IllegalState("no weights are loaded: load a version before polling")
        if self._proof is None:
            raise IllegalState(f"version {self._version} has no proof: set_proof must follow load")
        return self._policy, self._version, self._proof

    def _next_batch(self) -> RunningBatch:
        policy, _, _ = self._serving()
        now_us = self._clock.now_us()
        first = self._queue.popleft()
        rows = start_rows(first, now_us)
        while self._queue and self._joins(first, self._queue[0], len(rows)):
            rows += start_rows(self._queue.popleft(), now_us)
        return RunningBatch(policy.model, rows)

    def _joins(self, first: EngineRequest, other: EngineRequest, rows: int) -> bool:
        if self._settings.batching == "mixed":
            return rows + len(other.members) <= self._settings.max_batch_sequences
        one_by_one = first.member is not None and other.member is not None
        return one_by_one and first.request.group_id == other.request.group_id

    def _first_load(self, directory: Path) -> Policy:
        try:
            return load_served(directory, self._settings.base_directory, self._settings.dtype, self._settings.device)
        except UsageError as error:
            raise CheckpointInvalid(f"version directory cannot be served: {error}") from error

    def _check_fits(self, group_id: str, prompt_ids: npt.NDArray[np.int32], max_tokens: int) -> None:
        if self._policy is None:
            return
        limit = int(getattr(self._policy.model.config, "max_position_embeddings", 1 << 30))
        if len(prompt_ids) + max_tokens > limit:
            raise ConfigError(
                f"{group_id}: {len(prompt_ids)} tokens (prompt and earlier turns) and {max_tokens} more exceed the "
                f"model's {limit}"
            )
        if int(max(prompt_ids)) >= self._policy.vocabulary_size or int(min(prompt_ids)) < 0:
            raise ConfigError(
                f"{group_id}: a token of the prompt or of earlier turns is outside the vocabulary of "
                f"{self._policy.vocabulary_size}"
            )
