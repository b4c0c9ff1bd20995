"""The way of a trajectory from the bytes of a record to the weights, with nothing left out and no log.

encode_group -> decode_group -> Assembler -> select -> StepMaker -> HfLearner.train on a tiny model. Rows are made with
stored log-probabilities that are the model's own, shifted by stated log ratios.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consumers.objective.settings import ObjectiveSettings
from consumers.trainer.admission import AdmissionRules
from consumers.trainer.batch import StepOutcome
from consumers.trainer.grouping import Assembler
from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.policy_forward import ForwardSettings, score_rows
from consumers.trainer.selection import Selection, SelectionRules, select
from consumers.trainer.step import AgeWeights, PreparedStep, StepMaker
from consumers.trainer.step_metrics import batch_metrics
from consumers.trainer.tensors import pack_sequences
from driftlog.learning_settings import advantages_of
from infra.model import Policy, apply_weights, load_policy, unique_tensors
from schemas.ledger import OpenGroup
from schemas.policy_fold import PolicyFold
from schemas.trajectory import Fingerprint, Sampling, Trajectory
from schemas.trajectory_codec import TrajectoryLimits, decode_group, encode_group, group_message_headers
from tests.fakes.log_script import G0, running, trajectory
from tests.fakes.policy_rows import tiny_directory
from tests.fakes.virtual_clock import VirtualClock

PROMPT = (2, 17, 3, 18)
FORWARD = ForwardSettings(chunk_tokens=512, autocast=False)


@functools.cache
def policy() -> Policy:
    """The tiny policy; never changed."""
    return load_policy(tiny_directory())


def scored(
    completion: Sequence[int], temperature: float = 1.0, directory: Path | None = None, prompt: Sequence[int] = PROMPT
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the policy says of these tokens after the prompt."""
    model = (policy() if directory is None else load_policy(directory)).model
    tensors = pack_sequences([(list(prompt), list(completion))], [temperature], "cpu")
    found: np.ndarray[Any, np.dtype[np.float32]] = score_rows(model, tensors, FORWARD)[0][0].numpy()
    return found


@functools.cache
def unlikely(length: int, which: int = 0) -> tuple[int, ...]:
    """A completion of unlikely tokens, so that stored log-probabilities may be moved both ways and stay below 0."""
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(length):
            logits = policy().model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            tokens.append(int(logits.argsort()[which]))
    return tuple(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What became of one step."""

    prepared: PreparedStep
    outcome: StepOutcome
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    batch: dict[str, float]
    """metrics of the batch"""

    @property
    def metrics(self) -> dict[str, float]:
        return {**self.outcome.metrics, **self.batch}

    @property
    def advantages(self) -> list[float]:
        return [row.advantage for row in self.prepared.batch.rows]

    def largest_move(self) -> float:
        """Of any weight."""
        return max(float((self.after[name] - tensor).abs().max()) for name, tensor in self.before.items())

    def says_of(self, completion: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Log-probabilities under the weights after the step."""
        moved = load_policy(tiny_directory())
        apply_weights(moved.model, self.after)
        tensors = pack_sequences([(list(PROMPT), [int(token) for token in completion])], [1.0], "cpu")
        found: np.ndarray[Any, np.dtype[np.float32]] = score_rows(moved.model, tensors, FORWARD)[0][0].numpy()
        return found

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.after.values())


class RealPath:
    """One trainer's decisions and its learner, at version `base` of a run whose versions all went live."""

    def __init__(
        self,
        objective: ObjectiveSettings | None = None,
        *,
        base: int = 0,
        max_lag: int = 2,
        group_size: int = 2,
        filter_zero_variance: bool = False,
        directory: Path | None = None,
        **learner: Any,
    ) -> None:
        settings = {"learning_rate": 1e-3, "warmup_steps": 0, "adam_epsilon": 1e-3, "max_lag": max_lag, **learner}
        if objective is not None:
            settings["objective"] = objective
        self.learner = HfLearner(LearnerSettings(**settings))
        self.directory = directory or tiny_directory()
        self.learner.restore(self.directory, with_state=False)
        self.base, self.group_size = base, group_size
        script, proofs = running(G0, versions=base + 1)
        self.fold: PolicyFold = script.fold
        self.proofs = {version: offset for (_, version), offset in proofs.items()}
        self.clock = VirtualClock()
        used = self.learner._settings.objective
        self.maker = StepMaker(
            clock=self.clock,
            advantages=advantages_of(used),
            age_weights=AgeWeights(max_lag=max_lag),
            penalties=self.learner.reward_penalties if self.learner._settings.kl_in_reward else None,
        )
        self.rules = SelectionRules(
            groups_per_step=8,
            order="issue",
            min_group=2,
            filter_zero_variance=filter_zero_variance,
            admission=AdmissionRules(
                max_lag=max_lag, barrier=True, tokenizer_digest=self.learner.fingerprint()["tokenizer_digest"]
            ),
        )

    # ------------------------------------------------------------ the generator's side

    def row(
        self,
        group: int,
        index: int,
        completion: Sequence[int],
        reward: float | None,
        *,
        log_ratios: Sequence[float] | float = 0.0,
        version: int | None = None,
        temperature: float = 1.0,
        **changes: Any,
    ) -> Trajectory:
        """A row whose stored log-probabilities are the policy's own minus `log_ratios`."""
        version = self.base if version is None else version
        behaviour = scored(completion, temperature, self.directory).astype(np.float64) - np.asarray(log_ratios)
        values: dict[str, Any] = {
            "prompt_token_ids": np.array(PROMPT, dtype=np.int32),
            "token_ids": np.array(completion, dtype=np.int32),
            "logprobs": behaviour.astype(np.float32),
            "sampling": Sampling(temperature=temperature),
            "fingerprint": Fingerprint(
                tokenizer_digest=policy().tokenizer_digest, dtype="float32", engine="hf", engine_version=""
            ),
        } | changes
        return trajectory(
            name(group),
            index,
            reward=reward,
            group_size=self.group_size,
            segments=[(version, len(completion), self.proofs[version])],
            **values,
        )

    # ------------------------------------------------------------ the trainer's side

    def select(self, *groups: Sequence[Trajectory]) -> Selection:
        """From rows to the groups of a batch, through the bytes of records."""
        assembler = Assembler(
            [
                OpenGroup(group_id=name(i), request_position=i, issued_at_us=0, attempt=0, intended_step=0)
                for i in range(len(groups))
            ],
            self.group_size,
        )
        limits = TrajectoryLimits(vocabulary_size=self.learner.vocabulary_size())
        for number, rows in enumerate(groups):
            value = encode_group(rows)
            assembler.add((0, number), decode_group(value, group_message_headers(rows, value, "test"), limits))
        return select(assembler.buffers(), self.fold, self.base, self.rules, group_size=self.group_size)

    def train(self, *groups: Sequence[Trajectory]) -> Trained:
        """The whole way."""
        selection = self.select(*groups)
        assert selection.batch, (selection.doomed, selection.waiting_for)
        depth = self.fold.versions[self.base].depth
        prepared = self.maker.prepare(selection.batch, version_in=self.base, depth_in=depth)
        before = self.weights()
        outcome = self.maker.train(self.learner, prepared)
        batch = batch_metrics(
            prepared.batch.rows, prepared.groups, prepared.penalties,
            version_in=self.base, depth_in=depth, now_us=self.clock.now_us(),
        )  # fmt: skip
        return Trained(prepared=prepared, outcome=outcome, before=before, after=self.weights(), batch=batch)

    def weights(self) -> dict[str, torch.Tensor]:
        model = self.learner._loaded().policy.model
        return {key: tensor.detach().clone() for key, tensor in unique_tensors(model).items()}


def name(number: int) -> str:
    """Id of a group."""
    return f"demo/p{number:06d}/e0/a0"


def same_weights(a: Trained, b: Trained, tolerance: float = 1e-6) -> bool:
    """Both steps moved the weights alike."""
    return all(float((tensor - b.after[key]).abs().max()) <= tolerance for key, tensor in a.after.items())
