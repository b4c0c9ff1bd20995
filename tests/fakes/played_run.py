"""A small run of the real trainer service and learner, whose worker the test plays: which version answers what.

The engine samples with the weights of a published version, so ratios, lags and drops are those of a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consumers.offline.reanalyse import Segment
from consumers.offline.reanalyse.judge import ReanalysisRules
from consumers.offline.run_log import RunLog
from consumers.trainer.learner import HfLearner
from consumers.trainer.publication import Publication
from consumers.trainer.service import TrainerService
from consumers.trainer.step import StepMaker
from driftlog.learning_settings import learner_settings
from driftlog.reanalysis_rules import changed_config, rules_of
from infra.config import Config, load_config
from infra.model import load_policy
from infra.ports import EventReader
from infra.prompt_sources import countdown_source
from schemas.ids import ClaimId, Incarnation, WorkerId
from schemas.trajectory import Fingerprint, PromptRequest, Sampling, Trajectory
from schemas.trajectory_codec import TrajectoryLimits
from tests.cases.trainer_rig import TrainerRig
from tests.fakes.log_script import G0
from tests.fakes.policy_learners import engine_of
from tests.fakes.policy_rows import generate, tiny_directory, trajectory_of
from tests.sim.services import RUN

SIZE = 4


class PlayedRun(TrainerRig):
    """Groups of four, two groups a step. `overrides`: settings of the run, as --set takes them."""

    def __init__(self, directory: Path, *overrides: str, versions: int = 3) -> None:
        self.config: Config = load_config(
            None,
            [
                f'run.name="{RUN}"', f"run.versions={versions}", f"task.group_size={SIZE}", "trainer.groups_per_step=2",
                "trainer.learning_rate=0.01", "trainer.micro_batch_tokens=64", *overrides,
            ],
        )  # fmt: skip
        self.learner = HfLearner(learner_settings(self.config, str(tiny_directory())))
        self.learner.restore(tiny_directory(), with_state=False)
        self.policy = load_policy(tiny_directory())
        trainer = self.config.trainer
        super().__init__(
            directory, versions=versions, group_size=SIZE, max_lag=trainer.max_lag,
            run_ahead=trainer.effective_run_ahead,
        )  # fmt: skip
        self.begin()

    def build(self, process: str = "trainer") -> TrainerService:
        """The trainer as `driftlog train` wires it."""
        service = super().build(process)
        ports, rules = service._p, self.rules()
        ports.learner = self.learner
        ports.publication = Publication(
            run=RUN, store=self.world.store_of(process), learner=self.learner, clock=self.clock,
            new_attempt_id=self.world.new_id, config_digest=self.config.digest(), code_revision="played",
        )  # fmt: skip
        ports.prompts = countdown_source(self.policy.encode, 0)
        ports.step_maker = StepMaker(
            clock=self.clock,
            advantages=rules.advantages,
            age_weights=rules.age_weights,
            penalties=self.learner.reward_penalties if rules.learner.kl_in_reward else None,
        )
        sampling = Sampling(max_tokens=6, stop_token_ids=(self.policy.eos_token_id,))
        settings = replace(
            service._s,
            requests=replace(service._s.requests, sampling=sampling),
            selection=replace(rules.selection, run_ahead=self.config.trainer.effective_run_ahead),
            limits=TrajectoryLimits(vocabulary_size=self.learner.vocabulary_size()),
            config_digest=self.config.digest(),
            code_revision="played",
        )
        return TrainerService(settings, ports)

    # ------------------------------------------------------------------ the worker

    def sample(
        self, position: int, *, version: int, rewards: Sequence[float | None] | None = None, **changes: Any
    ) -> list[Trajectory]:
        """The group of that request, sampled with the weights of a version; reward: parity of the length."""
        request = next(r for r in self.requests() if r.request_position == position)
        rows = [self._row(request, completion, version) for completion in self._completions(request, version)]
        if rewards is not None:
            rows = [replace(row, reward=reward) for row, reward in zip(rows, rewards, strict=True)]
        return [replace(row, **changes) for row in rows]

    def play(self, *positions: int, version: int, rewards: Sequence[float | None] | None = None) -> None:
        """Answer these requests with weights of that version, and let the trainer work."""
        for position in positions:
            self.send(self.sample(position, version=version, rewards=rewards))
        self.step(8)

    def _completions(self, request: PromptRequest, version: int) -> Sequence[Any]:
        event = self.fold().versions[version].event
        return generate(engine_of(self.world.directory / Path(event.manifest_uri).parent), [request])

    def _row(self, request: PromptRequest, completion: Any, version: int) -> Trajectory:
        row = trajectory_of(request, completion, reward=float(len(completion.token_ids) % 3))
        worker, incarnation = G0
        return replace(
            row,
            claim_id=ClaimId(f"{worker}/{incarnation}/{request.request_position}"),
            worker_id=WorkerId(worker),
            incarnation=Incarnation(incarnation),
            segments=tuple(replace(s, version=version, proof=self.proofs[version]) for s in row.segments),
            fingerprint=Fingerprint(
                tokenizer_digest=self.policy.tokenizer_digest, dtype="float32", engine="hf", engine_version=""
            ),
        )

    # ------------------------------------------------------------------ afterwards

    def rules(self, *overrides: str) -> ReanalysisRules:
        """What the run decides by, or what it would with these changes."""
        config = changed_config(self.config, overrides) if overrides else self.config
        return rules_of(config, self.learner.fingerprint(), 1)

    def segments(self, *overrides: str) -> dict[str, Segment]:
        """One segment; without overrides its own settings on both sides."""
        own = self.rules()
        return {self.config.digest(): Segment(own=own, other=self.rules(*overrides) if overrides else own)}

    def run_log(self) -> RunLog:
        """A fresh reading."""
        return RunLog(RUN, self._open, clock=self.clock, pause=self.clock.advance)

    def _open(self, topics: Sequence[str]) -> EventReader:
        return self.log.client("reader").reader({name: self.log.topics[name] for name in topics}, "beginning")
