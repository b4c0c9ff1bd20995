"""Episodes trained over and over: engine with environment -> rows -> bytes -> trainer's decisions -> new weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infra.config_task import EnvironmentEntry
from infra.countdown import Problem, problems
from infra.environment import AskedAtOnce, EpisodeRewards
from infra.environment_loading import load_environment
from infra.observation_template import observation_encoder
from infra.ports import EngineRequest
from producers.assembly import ClaimedGroup, trajectories
from producers.engines.hf import HfEngine, HfEngineSettings
from producers.episodes import EpisodeEngine, EpisodeSettings
from schemas.ids import GroupId
from schemas.trajectory import Fingerprint, PromptRequest, Sampling, Trajectory
from tests.cases.real_path import RealPath, Trained, name, policy
from tests.fakes.policy_rows import tiny_directory
from tests.fakes.virtual_clock import VirtualClock


class EpisodeLoop:
    """`step` plays a few groups with the newest weights and trains on them."""

    def __init__(
        self,
        root: Path,
        entry: EnvironmentEntry,
        *,
        groups: int = 8,
        group_size: int = 8,
        max_turns: int = 3,
        max_tokens: int = 30,
        learning_rate: float = 3e-3,
    ) -> None:
        self.root = root
        self.path = RealPath(group_size=group_size, learning_rate=learning_rate, adam_epsilon=1e-8)
        environment = AskedAtOnce(load_environment(entry))
        self.rewards = EpisodeRewards(environment.name)
        self.engine = EpisodeEngine(
            HfEngine(HfEngineSettings(batching="group", threads=1), VirtualClock()),
            environment,
            observation_encoder(policy().tokenizer, ""),
            EpisodeSettings(max_turns=max_turns, in_step=True),
        )
        self.groups, self.max_tokens, self.steps = groups, max_tokens, 0
        self.problems = [problem for problem in problems() if problem.task == "pairs" and not problem.held_out]
        self._serve(tiny_directory())

    def step(self) -> tuple[list[list[Trajectory]], Trained]:
        """What was played, and what became of it."""
        rows = self.play()
        trained = self.path.train(*rows)
        self.steps += 1
        directory = self.root / f"v{self.steps}"
        directory.mkdir()
        self.path.learner.save(directory)
        self._serve(directory)
        return rows, trained

    def play(self) -> list[list[Trajectory]]:
        """The rows of every group, as a generator publishes them."""
        first = self.steps * self.groups
        chosen = [self.problems[(first + place) % len(self.problems)] for place in range(self.groups)]
        claimed = {name(place): self._claimed(place, problem) for place, problem in enumerate(chosen)}
        for group in claimed.values():
            self.engine.submit(EngineRequest(request=group.request, rng_seed=self.steps))
        while self.engine.running_groups():
            for completion in self.engine.poll():
                claimed[completion.group_id].completions[completion.index_in_group] = completion
        return [self._rows(group) for group in claimed.values()]

    def _rows(self, group: ClaimedGroup) -> list[Trajectory]:
        return trajectories(
            group,
            worker="g0",
            rewards=self.rewards.submit(group.request, group.in_order()).result(0.0),
            reward_function=self.rewards.name,
            fingerprint=Fingerprint(**self.engine.identity()),
            keep_text=True,
            now_us=0,
        )

    def _claimed(self, place: int, problem: Problem) -> ClaimedGroup:
        request = PromptRequest(
            group_id=GroupId(name(place)),
            request_position=place,
            prompt_id=problem.prompt_id,
            task=problem.task,
            epoch=0,
            attempt=0,
            group_size=self.path.group_size,
            prompt_token_ids=np.asarray(policy().encode(problem.prompt), dtype=np.int32),
            prompt_text=problem.prompt,
            reference={"numbers": ",".join(map(str, problem.numbers)), "target": str(problem.target)},
            sampling=Sampling(max_tokens=self.max_tokens, stop_token_ids=(policy().eos_token_id,)),
            intended_step=1,
            min_version=0,
            fallback_version=0,
            issued_at_us=0,
        )
        return ClaimedGroup(request=request, partition=0, offset=place, incarnation="i1", claimed_at_s=0.0)

    def _serve(self, directory: Path) -> None:
        self.engine.load(directory, self.path.base)
        self.engine.set_proof(self.path.proofs[self.path.base])
