"""A policy of 32 bytes: learner, engine, reward and prompts for the simulator, exact and fast.

Weights are a sha256; a training step hashes the batch digest into it. So equal weights mean the same updates
in the same order, and one update done twice or left out shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from consumers.trainer.batch import StepOutcome, TrainBatch, TrainerScores
from infra.ports import Clock, Completion, EngineRequest, Prompt, Reward
from schemas.checkpoint import PROBE_NAME, TRAINER_STATE_NAME, WEIGHTS_NAME
from schemas.errors import CheckpointInvalid
from schemas.probe_codec import ProbeSequence, encode_probe
from schemas.trajectory import PromptRequest, Segment

VOCABULARY = 50
TOKENIZER_DIGEST = hashlib.sha256(b"tiny").hexdigest()
INITIAL_WEIGHTS = hashlib.sha256(b"initial").hexdigest()
_PROBE_TOKENS = (1, 2, 3, 4, 5, 6)
_PROBE_PROMPT = 2


def next_weights(weights: str, batch_digest: str) -> str:
    """One training step."""
    return hashlib.sha256(f"{weights}/{batch_digest}".encode()).hexdigest()


def logprob(weights: str, token: int, position: int) -> float:
    """Something that depends on weights, token and place alone, in (-4, -0.01)."""
    digest = hashlib.sha256(f"{weights}/{token}/{position}".encode()).digest()
    return -0.01 - 3.9 * int.from_bytes(digest[:4], "big") / 2**32


class TinyLearner:
    """The Learner port."""

    def __init__(self) -> None:
        self.weights = INITIAL_WEIGHTS
        self.steps = 0

    def restore(self, directory: Path, *, with_state: bool) -> None:
        self.weights = (directory / WEIGHTS_NAME).read_text()
        if with_state:
            self.steps = json.loads((directory / TRAINER_STATE_NAME).read_text())["steps"]

    def train(self, batch: TrainBatch) -> StepOutcome:
        before = self.weights
        self.weights = next_weights(self.weights, batch.digest)
        self.steps += 1
        scores = [
            TrainerScores(
                trajectory_id=row.trajectory.trajectory_id,
                proximal=np.array(
                    [logprob(before, int(t), i) for i, t in enumerate(row.trajectory.token_ids)], dtype=np.float32
                ),
            )
            for row in batch.rows
        ]
        metrics = {"actor/pg_loss": 0.5}
        return StepOutcome(
            metrics=metrics, scores=scores, optimizer_step=self.steps, skipped=False, rng_digest=self.weights[:8]
        )

    def save(self, directory: Path, *, with_state: bool = True) -> None:
        (directory / WEIGHTS_NAME).write_text(self.weights)
        if with_state:
            (directory / TRAINER_STATE_NAME).write_text(json.dumps({"steps": self.steps}))
        (directory / PROBE_NAME).write_bytes(self._probe())

    def _probe(self) -> bytes:
        tokens = np.array(_PROBE_TOKENS, dtype=np.int32)
        scores = [logprob(self.weights, t, i) for i, t in enumerate(_PROBE_TOKENS[_PROBE_PROMPT:])]
        logprobs = np.array(scores, dtype=np.float32)
        return encode_probe([ProbeSequence(token_ids=tokens, prompt_length=_PROBE_PROMPT, logprobs=logprobs)])

    def manifest_fields(self) -> Mapping[str, Any]:
        return {
            "dtype": {"all": "float32"},
            "probe_sha256": hashlib.sha256(self._probe()).hexdigest(),
            "fingerprint": dict(self.fingerprint()),
            "optimizer_step": self.steps,
            "library_versions": {},
            "threads": 1,
            "device_type": "cpu",
            "logprob_chunk": 1,
        }

    def fingerprint(self) -> Mapping[str, str]:
        return {"tokenizer_digest": TOKENIZER_DIGEST, "dtype": "float32"}

    def vocabulary_size(self) -> int:
        return VOCABULARY


class TinyEngine:
    """The GenerationEngine port: a member takes `polls_per_member` polls; tokens depend on weights and request."""

    def __init__(self, clock: Clock, polls_per_group: int = 2, tokens: int = 3) -> None:
        self._clock = clock
        self._polls_per_group = polls_per_group
        self._tokens = tokens
        self._weights: str | None = None
        self._version = -1
        self._proof = -1
        self._queue: list[tuple[EngineRequest, int]] = []
        self._frozen = False
        self._touched = False
        self.fail_load: Literal["before", "after"] | None = None

    def submit(self, request: EngineRequest) -> None:
        self._queue.append((request, 0))

    def poll(self) -> Sequence[Completion]:
        if self._frozen or not self._queue:
            return []
        request, done = self._queue[0]
        if done + 1 < self._polls_per_group:
            self._queue[0] = (request, done + 1)
            return []
        self._queue.pop(0)
        return [self._completion(request, index) for index in range(request.request.group_size)]

    def _completion(self, asked: EngineRequest, index: int) -> Completion:
        assert self._weights is not None, "sampled without weights"
        request = asked.request
        seed = hashlib.sha256(f"{asked.rng_seed}/{request.group_id}/{index}/{self._weights}".encode()).digest()
        length = 1 + seed[0] % self._tokens
        tokens = [1 + byte % (VOCABULARY - 1) for byte in seed[1 : 1 + length]]
        now_us = self._clock.now_us()
        return Completion(
            group_id=request.group_id,
            index_in_group=index,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array([logprob(self._weights, t, i) for i, t in enumerate(tokens)], dtype=np.float32),
            segments=(Segment(version=self._version, length=length, proof=self._proof),),
            finish_reason="stop",
            text=None,
            started_at_us=now_us,
            finished_at_us=now_us,
        )

    def busy(self) -> bool:
        return bool(self._queue)

    def running_groups(self) -> frozenset[str]:
        return frozenset(asked.request.group_id for asked, _ in self._queue)

    def pause(self, mode: Literal["finish", "keep"]) -> None:
        self._frozen = mode == "keep"

    def load(self, directory: Path, version: int) -> None:
        if self.fail_load == "before":
            raise CheckpointInvalid("planted: a tensor is missing")
        self._touched = True
        if self.fail_load == "after":
            raise CheckpointInvalid("planted: died half way")
        self._weights = (directory / WEIGHTS_NAME).read_text()
        self._version = version
        self._proof = -1
        self._touched = False

    def weights_touched(self) -> bool:
        return self._touched

    def set_proof(self, proof: int) -> None:
        self._proof = proof

    def resume(self) -> None:
        self._frozen = False

    def score(
        self, token_ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Sequence[npt.NDArray[np.float32]]:
        assert self._weights is not None, "scored without weights"
        return [
            np.array([logprob(self._weights, t, i) for i, t in enumerate(ids[prompt:])], dtype=np.float32)
            for ids, prompt in zip(token_ids, prompt_lengths, strict=True)
        ]

    def identity(self) -> Mapping[str, str]:
        return {"engine": "tiny", "engine_version": "1", "dtype": "float32", "tokenizer_digest": TOKENIZER_DIGEST}

    def close(self) -> None:
        self._queue = []


class ParityReward:
    """1 when the tokens add up to an even number."""

    name = "parity@1"

    def score(self, request: PromptRequest, completions: Sequence[Completion]) -> Sequence[Reward]:
        return [Reward(value=float(int(c.token_ids.sum()) % 2 == 0)) for c in completions]


class TinyPrompts:
    """The PromptSource port: prompt i has tokens (i mod 40) + 1, in order."""

    def __init__(self, size: int = 7) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def at(self, cursor: int) -> tuple[Prompt, int]:
        return self.by_index(cursor % self._size), cursor // self._size

    def by_index(self, index: int) -> Prompt:
        tokens = np.array([1 + index % 40, 2], dtype=np.int32)
        return Prompt(index=index, prompt_id=f"t{index}", task="tiny", text=None, token_ids=tokens, reference={})
