"""Replays a simulated run with the simulator's own learner; the test says what is different here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from consumers.offline.replay import Retrainer, replay
from consumers.offline.replay.plan import NEWEST, plan_replay
from consumers.offline.replay.report import Environment, ReplayedStep
from consumers.offline.wholeness import read_policy
from consumers.trainer.batch import StepOutcome, TrainBatch
from consumers.trainer.step import Advantages, AgeWeights
from infra.ports import CheckpointStore
from schemas.checkpoint import TRAINER_STATE_NAME
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_policy import TinyLearner
from tests.fakes.virtual_clock import VirtualClock
from tests.sim.services import mean_only

HERE = Environment(
    library_versions={"torch": "1"}, threads=1, ranks=1, device_type="cpu", logprob_chunk=1, code_revision="sim"
)  # fmt: skip


class ReplayLearner(TinyLearner):
    """Signs what it saves as the process did that trained the version then; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.signed_by: dict[int, str] = {}
        """version -> who saved its state"""
        self.restored: list[Path] = []
        self.batches: list[TrainBatch] = []

    def restore(self, directory: Path, *, with_state: bool) -> None:
        super().restore(directory, with_state=with_state)
        self.restored.append(directory)

    def train(self, batch: TrainBatch) -> StepOutcome:
        self.batches.append(batch)
        self._saved_by = self.signed_by.get(batch.version_in + 1, "")
        return super().train(batch)


@dataclass(kw_only=True)
class Rig:
    """One replay."""

    run: SimulatedRun
    learner: ReplayLearner = field(default_factory=ReplayLearner)
    environment: Environment = HERE
    advantages: Advantages = mean_only
    store: CheckpointStore | None = None
    opened: list[tuple[str, int | None]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def make(self, first: int = 1, last: int | None = NEWEST) -> list[ReplayedStep]:
        """The reports."""
        log = self.run.run_log()
        policy = read_policy(log)
        fold = policy.fold
        plan = plan_replay(fold, first, last, policy.retired)
        self.learner.signed_by = {
            number: json.loads((self.run.directory(number) / TRAINER_STATE_NAME).read_text())["saved_by"]
            for number, state in fold.versions.items()
            if state.event.has_state and self.run.is_stored(number)
        }
        steps = replay(
            log, fold, self.store or self.run.world.store(), self._open, plan, clock=VirtualClock(),
            tell=self.words.append,
        )  # fmt: skip
        return [step for step, _ in steps]

    def _open(self, config_digest: str, threads: int | None) -> Retrainer:
        self.opened.append((config_digest, threads))
        return Retrainer(
            learner=self.learner,
            advantages=self.advantages,
            age_weights=AgeWeights(max_lag=self.run.world.plan.max_lag),
            kl_in_reward=False,
            environment=self.environment,
        )


def elsewhere(**changes: object) -> Environment:
    """Another environment."""
    return replace(HERE, **changes)  # type: ignore[arg-type]


def parts_of(steps: Sequence[ReplayedStep]) -> dict[int, tuple[str, ...]]:
    """version -> parts that differ, of those where any does."""
    return {step.version: step.parts for step in steps if not step.equal}
