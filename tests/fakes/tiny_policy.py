"""A policy of 32 bytes: learner, engine, reward and prompts for the simulator, exact and fast.

Weights are a sha256; a training step hashes the batch digest into it. So equal weights mean the same updates
in the same order, and one update done twice or left out shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
_PROBE_TOKENS = (2, 3, 4, 5, 6)
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

    def __init__(
        self,
        on_call: Callable[[str, Literal["before", "after"]], None] = lambda name, phase: None,
        saved_by: str = "",
    ) -> None:
        """`saved_by`: stands in the saved state, so that two processes never save the same bytes."""
        self.weights = INITIAL_WEIGHTS
        self.steps = 0
        self._on_call = on_call
        self._saved_by = saved_by

    def restore(self, directory: Path, *, with_state: bool) -> None:
        self.weights = (directory / WEIGHTS_NAME).read_text()
        if with_state:
            self.steps = json.loads((directory / TRAINER_STATE_NAME).read_text())["steps"]

    def train(self, batch: TrainBatch) -> StepOutcome:
        self._on_call("learner.train", "before")
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
        self._on_call("learner.train", "after")
        return StepOutcome(
            metrics=metrics, scores=scores, optimizer_step=self.steps, skipped=False, rng_digest=self.weights[:8]
        )

    def reward_penalties(self, trajectories: Sequence[Any]) -> Sequence[float]:
        return [0.0] * len(trajectories)

    def save(self, directory: Path, *, with_state: bool = True) -> None:
        self.begin_save(directory, with_state=with_state)()

    def begin_save(self, directory: Path, *, with_state: bool = True) -> Callable[[], None]:
        (directory / WEIGHTS_NAME).write_text(self.weights)
        if with_state:
            (directory / TRAINER_STATE_NAME).write_text(json.dumps({"steps": self.steps, "saved_by": self._saved_by}))

        def finish() -> None:
            (directory / PROBE_NAME).write_bytes(self._probe())

        return finish

    def copy(self, *, with_state: bool = True) -> TinyCopy:
        frozen = TinyLearner(saved_by=self._saved_by)
        frozen.weights, frozen.steps = self.weights, self.steps
        return TinyCopy(frozen, with_state)

    def _probe(self) -> bytes:
        # As the trainer's: every version is recognised by other tokens.
        first = 1 + hashlib.sha256(self.weights.encode()).digest()[0] % (VOCABULARY - 1)
        tokens = np.array((first, *_PROBE_TOKENS), dtype=np.int32)
        scores = [logprob(self.weights, t, i) for i, t in enumerate(tokens[_PROBE_PROMPT:].tolist())]
        logprobs = np.array(scores, dtype=np.float32)
        return encode_probe([ProbeSequence(token_ids=tokens, prompt_length=_PROBE_PROMPT, logprobs=logprobs)])

    def manifest_fields(self) -> Mapping[str, Any]:
        return {
            "dtype": {"all": "float32"},
            "fingerprint": dict(self.fingerprint()),
            "optimizer_step": self.steps,
            "library_versions": {"torch": "1"},
            "threads": 1,
            "device_type": "cpu",
            "logprob_chunk": 1,
        }

    def fingerprint(self) -> Mapping[str, str]:
        return {"tokenizer_digest": TOKENIZER_DIGEST, "dtype": "float32"}

    def vocabulary_size(self) -> int:
        return VOCABULARY


@dataclass(frozen=True, slots=True)
class TinyCopy:
    """The LearnerCopy port."""

    learner: TinyLearner
    with_state: bool

    def begin_save(self, directory: Path) -> Callable[[], None]:
        return self.learner.begin_save(directory, with_state=self.with_state)


@dataclass(slots=True)
class _Running:
    """A group in the engine. `parts`: (weights, version, proof, tokens of each member) that are sampled already."""

    asked: EngineRequest
    polls: int
    done: int = 0
    parts: list[tuple[str, int, int, int]] = field(default_factory=list)


class TinyEngine:
    """The GenerationEngine port: a group takes `polls_per_group` polls; tokens depend on weights and request.

    A group that is loaded over half way keeps its first tokens under the old weights, as a segment of their own. With a
    prefix cache, a prompt that is met again is answered from what was cached; a load empties the cache."""

    def __init__(
        self,
        clock: Clock,
        polls_per_group: int = 2,
        tokens: int = 3,
        *,
        mixed: bool = False,
        prefix_cache: bool = False,
        text: bool = False,
    ) -> None:
        self._clock = clock
        self._text = text
        self._polls_per_group = polls_per_group
        self._tokens = tokens
        self._mixed = mixed
        self._weights: str | None = None
        self._version = -1
        self._proof = -1
        self._queue: list[_Running] = []
        self._frozen = False
        self._touched = False
        self._prefix_cache = prefix_cache
        self._cached: dict[tuple[int, ...], str] = {}
        """prompt -> weights that its keys and values were computed with"""
        self.fail_load: Literal["before", "after", "silent", "stale"] | None = None
        """silent: the load says that it went well and leaves other weights behind; stale: ... and the prefix cache"""
        self.in_background = False
        """load and score run on another thread: sampling now would race with them"""
        self.polls_of: Callable[[PromptRequest], int] = lambda request: self._polls_per_group
        """how many polls a group takes: stragglers take many"""
        self.on_sample: Callable[[PromptRequest], None] = lambda request: None
        """sees each group that is worked on; may raise Crash"""
        self.on_call: Callable[[str, Literal["before", "after"]], None] = lambda name, phase: None

    def submit(self, request: EngineRequest) -> None:
        polls = self._polls_per_group if request.context else self.polls_of(request.request)
        self._queue.append(_Running(request, max(1, polls)))

    def poll(self) -> Sequence[Completion]:
        if self._frozen or not self._queue:
            return []
        assert not self.in_background, "sampled while the weights are being loaded"
        assert not self._touched, "sampled with weights in doubt"
        finished: list[Completion] = []
        for running in list(self._queue) if self._mixed else self._first():
            self.on_sample(running.asked.request)
            running.done += 1
            if running.done >= running.polls:
                self._queue.remove(running)
                finished += [self._completion(running, index) for index in running.asked.members]
        return finished

    def _first(self) -> list[_Running]:
        """One group, or the members of one that were asked for."""
        first = self._queue[0].asked
        if first.member is None:
            return self._queue[:1]
        return [running for running in self._queue if running.asked.request.group_id == first.request.group_id]

    def _length(self, asked: EngineRequest, index: int) -> int:
        digest = hashlib.sha256(self._stream(asked, index).encode()).digest()
        return min(1 + digest[0] % self._tokens, asked.new_tokens)

    def _stream(self, asked: EngineRequest, index: int) -> str:
        turn = f"/{len(asked.context)}" if asked.context else ""
        return f"{asked.rng_seed}/{asked.request.group_id}/{index}{turn}"

    def _completion(self, running: _Running, index: int) -> Completion:
        assert self._weights is not None, "sampled without weights"
        asked = running.asked
        length = self._length(asked, index)
        tokens: list[int] = []
        logprobs: list[float] = []
        segments: list[Segment] = []
        now = self._answering(asked.request.prompt_token_ids)
        for weights, version, proof, count in (*running.parts, (now, self._version, self._proof, length)):
            count = min(count, length - len(tokens))
            if count <= 0:
                continue
            seed = hashlib.sha256(f"{self._stream(asked, index)}/{weights}".encode()).digest()
            for at in range(len(tokens), len(tokens) + count):
                tokens.append(1 + seed[at] % (VOCABULARY - 1))
                logprobs.append(logprob(weights, tokens[-1], len(asked.context) + at))
            segments.append(Segment(version=version, length=count, proof=proof))
        now_us = self._clock.now_us()
        return Completion(
            group_id=asked.request.group_id,
            index_in_group=index,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            segments=tuple(segments),
            finish_reason="stop",
            text=" ".join(map(str, tokens)) if self._text else None,
            started_at_us=now_us,
            finished_at_us=now_us,
        )

    def busy(self) -> bool:
        return bool(self._queue)

    def computes_alone(self) -> bool:
        return False

    def running_groups(self) -> frozenset[str]:
        return frozenset(running.asked.request.group_id for running in self._queue)

    def pause(self, mode: Literal["finish", "keep"]) -> None:
        self._frozen = mode == "keep"

    def load(self, directory: Path, version: int) -> None:
        self.on_call("engine.load", "before")
        if self.fail_load == "before":
            raise CheckpointInvalid("planted: a tensor is missing")
        self._keep_what_was_sampled()
        self._touched = True
        if self.fail_load == "after":
            raise CheckpointInvalid("planted: died half way")
        weights = (directory / WEIGHTS_NAME).read_text()
        self._weights = next_weights(weights, "half of the tensors") if self.fail_load == "silent" else weights
        self._version = version
        self._proof = -1
        self._touched = False
        if self.fail_load != "stale":
            self._cached.clear()
        self.on_call("engine.load", "after")

    def _keep_what_was_sampled(self) -> None:
        if self._weights is None or self._touched:
            return
        for running in self._queue:
            new = 1 if running.done > len(running.parts) else 0
            if new and self._proof >= 0:
                weights = self._answering(running.asked.request.prompt_token_ids)
                running.parts.append((weights, self._version, self._proof, new))

    def _answering(self, prompt: Sequence[int]) -> str:
        """What a prompt is answered with: the weights, or a blend that no version has, where its keys are older."""
        assert self._weights is not None, "sampled without weights"
        if not self._prefix_cache:
            return self._weights
        cached = self._cached.setdefault(tuple(int(token) for token in prompt), self._weights)
        return self._weights if cached == self._weights else next_weights(self._weights, cached)

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

    def prefix_block(self) -> int:
        return 1 if self._prefix_cache else 0

    def generate_greedily(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        ids = np.arange(1, 1 + tokens, dtype=np.int32)
        answers = [self._answering(prompt) for prompt in prompts]
        return [(ids, np.array([logprob(w, int(t), i) for i, t in enumerate(ids)], np.float32)) for w in answers]

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
