"""The simulator: the real services on the in-memory log, a virtual clock, and a scheduler that a seed decides.

Every port call is a place where a process may die, before or after the call took effect. A dead process is
started again a little later, as a supervisor would. `run` returns when the run has ended or time is up.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from consumers.coordinator import CoordinatorPorts, CoordinatorService, CoordinatorSettings
from consumers.switching import SwitchRules
from consumers.trainer.admission import AdmissionRules
from consumers.trainer.branching import BranchWish
from consumers.trainer.pacing import PacingRules
from consumers.trainer.publication import Publication
from consumers.trainer.replay import ReplayRules
from consumers.trainer.requests import RequestRules
from consumers.trainer.selection import SelectionRules
from consumers.trainer.service import TrainerService
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.step import AgeWeights, StepMaker
from infra.checkpoint_store import FsspecCheckpointStore
from infra.policy_follower import PolicyFollower
from infra.ports import SavedCheckpoint
from producers.generator import GeneratorPorts, GeneratorService, GeneratorSettings
from producers.weights import WeightsSettings
from schemas.checkpoint import Manifest
from schemas.errors import DriftlogError, Fenced
from schemas.ids import RunId
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import Sampling
from schemas.trajectory_codec import TrajectoryLimits
from tests.fakes.inline_executor import InlineExecutor
from tests.fakes.memory_log import Crash, MemoryLog
from tests.fakes.memory_ports import MemoryClient
from tests.fakes.tiny_policy import TOKENIZER_DIGEST, VOCABULARY, ParityReward, TinyEngine, TinyLearner, TinyPrompts
from tests.fakes.virtual_clock import VirtualClock

RUN = RunId("sim")


class Service(Protocol):
    """What the scheduler drives."""

    def step(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One simulated run."""

    seed: int
    versions: int = 6
    groups_per_step: int = 2
    group_size: int = 3
    max_lag: int = 2
    run_ahead: int = 1
    generators: int = 2
    crash_probability: float = 0.0
    """of each port call, before and after, while faults are on"""
    crashable: tuple[str, ...] = ("trainer", "coordinator", "g")
    """process name prefixes that may die"""
    faults_until_s: float = 30.0
    limit_s: float = 400.0
    restart_s: tuple[float, float] = (0.2, 3.0)
    group_timeout_s: float = 12.0
    replay: ReplayRules = field(default_factory=ReplayRules)
    filter_zero_variance: bool = False
    state_every: int = 1
    branch: BranchWish | None = None


@dataclass(slots=True)
class Process:
    """A service that can die and come back."""

    name: str
    build: Callable[[MemoryClient], Service]
    service: Service | None = None
    restart_at_s: float = 0.0
    restarts: int = 0
    done: bool = False
    error: str = ""
    deaths: list[str] = field(default_factory=list)
    """where it died"""


class World:
    """Everything of one simulated run."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        self.directory = directory
        self._ids = 0
        self.faults_on = True
        self.log.client("setup").admin().create_topics(RUN)
        self.processes = [Process("trainer", self._trainer), Process("coordinator", self._coordinator)]
        self.processes += [Process(f"g{i}", self._generator_builder(f"g{i}")) for i in range(plan.generators)]
        self.steps = 0

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until every process is done, or the limit is reached."""
        while not all(p.done for p in self.processes):
            now_s = self.clock.monotonic_s()
            if now_s > self.plan.limit_s:
                return
            self.faults_on = now_s < self.plan.faults_until_s
            process = self.random.choice([p for p in self.processes if not p.done])
            self._drive(process, now_s)
            self.clock.advance(self.random.choice((0.001, 0.005, 0.02)))
            self.steps += 1

    def process(self, name: str) -> Process:
        """By name."""
        return next(p for p in self.processes if p.name == name)

    def _drive(self, process: Process, now_s: float) -> None:
        try:
            if process.service is None:
                if now_s < process.restart_at_s:
                    return
                process.service = process.build(self._client(process))
            process.service.step()
            process.done = bool(getattr(process.service, "finished", False))
        except Crash as crash:
            self._die(process, str(crash), now_s)
        except Fenced:
            process.done = True
            process.error = "fenced"
        except DriftlogError as error:
            process.error = f"{type(error).__name__}: {error}"
            self._die(process, process.error, now_s)

    def _die(self, process: Process, where: str, now_s: float) -> None:
        self.log.crash(process.name)
        process.service = None
        process.restarts += 1
        process.deaths.append(where)
        process.restart_at_s = now_s + self.random.uniform(*self.plan.restart_s)

    def _client(self, process: Process) -> MemoryClient:
        return self.log.client(process.name, on_call=self._hook(process))

    def _hook(self, process: Process) -> Callable[[str, str], None]:
        may_die = process.name.startswith(self.plan.crashable)

        def on_call(name: str, phase: str) -> None:
            # Most calls are polls that find nothing; dying there over and over would hide the interesting places.
            share = 0.03 if name.endswith(".poll") else 1.0
            if may_die and self.faults_on and self.random.random() < share * self.plan.crash_probability:
                raise Crash(f"{phase} {name}")

        return on_call

    def new_id(self) -> str:
        """Unique in this world."""
        self._ids += 1
        return f"id{self._ids:05d}"

    # ------------------------------------------------------------------ the processes

    def store(self, process: Process | None = None) -> FsspecCheckpointStore:
        """A process's view of the store."""
        store = FsspecCheckpointStore(str(self.directory), RUN, cache_dir=None, fsync=False)
        return store if process is None else _HookedStore(store, self._hook(process))  # type: ignore[return-value]

    def _follower(self, client: MemoryClient) -> PolicyFollower:
        name = topic(RUN, TopicName.POLICY)
        return PolicyFollower(client.reader({name: 1}, "beginning"), name)

    def _trainer(self, client: MemoryClient) -> Service:
        plan = self.plan
        learner = TinyLearner()
        trajectories = topic(RUN, TopicName.TRAJECTORIES)
        ledger = topic(RUN, TopicName.LEDGER)
        settings = TrainerSettings(
            run=RUN,
            requests=RequestRules(
                run=RUN,
                group_size=plan.group_size,
                max_lag=plan.max_lag,
                max_attempts=3,
                sampling=Sampling(max_tokens=4),
                pacing=PacingRules(
                    groups_per_step=plan.groups_per_step, run_ahead=plan.run_ahead, last_step=plan.versions
                ),
            ),
            selection=SelectionRules(
                groups_per_step=plan.groups_per_step,
                order="issue",
                min_group=2,
                filter_zero_variance=plan.filter_zero_variance,
                admission=AdmissionRules(max_lag=plan.max_lag, barrier=True, tokenizer_digest=TOKENIZER_DIGEST),
            ),
            limits=TrajectoryLimits(vocabulary_size=VOCABULARY),
            config_digest="config",
            code_revision="sim",
            group_timeout_s=plan.group_timeout_s,
            replay=plan.replay,
            state_every=plan.state_every,
            branch=plan.branch,
        )
        ports = TrainerPorts(
            writer=client.transactional_writer(f"{RUN}-trainer"),
            open_policy=lambda: self._follower(client),
            open_ledger=lambda: client.reader({ledger: 1}, "beginning"),
            trajectories=client.reader({trajectories: TOPICS[TopicName.TRAJECTORIES].partitions}, "beginning"),
            deadletters=client.reader({topic(RUN, TopicName.DEADLETTERS): 1}, "beginning"),
            learner=learner,
            publication=Publication(
                run=RUN,
                store=self.store(self.process("trainer")),
                learner=learner,
                clock=self.clock,
                new_attempt_id=self.new_id,
                config_digest="config",
                code_revision="sim",
            ),
            step_maker=StepMaker(clock=self.clock, advantages=mean_only, age_weights=AgeWeights(max_lag=plan.max_lag)),
            prompts=TinyPrompts(),
            clock=self.clock,
        )
        return TrainerService(settings, ports)

    def _coordinator(self, client: MemoryClient) -> Service:
        workers = topic(RUN, TopicName.WORKERS)
        settings = CoordinatorSettings(
            run=RUN,
            rules=SwitchRules(run=RUN, mode="barrier", switch_deadline_s=8.0, keep="all"),
            lease_s=6.0,
            failed_switches_in_row=50,
        )
        ports = CoordinatorPorts(
            writer=client.transactional_writer(f"{RUN}-coordinator"),
            open_policy=lambda: self._follower(client),
            open_workers=lambda: client.reader({workers: 1}, "beginning"),
            store=self.store(self.process("coordinator")),
            clock=self.clock,
            new_id=self.new_id,
        )
        return CoordinatorService(settings, ports)

    def _generator_builder(self, name: str) -> Callable[[MemoryClient], Service]:
        def build(client: MemoryClient) -> Service:
            settings = GeneratorSettings(
                run=RUN,
                worker=name,
                seed=self.plan.seed,
                weights=WeightsSettings(
                    run=RUN,
                    drain_timeout_s=2.0,
                    fetch_timeout_s=5.0,
                    load_tries=2,
                    retry_wait_s=0.2,
                    probe_tolerance=1e-4,
                ),
                max_groups_in_flight=4,
                heartbeat_s=0.5,
                lease_s=6.0,
                park_timeout_s=0.5,
                keep_text=False,
            )
            ports = GeneratorPorts(
                follower=self._follower(client),
                workers=client.reader({topic(RUN, TopicName.WORKERS): 1}, "beginning"),
                prompts=client.group_reader(f"{RUN}-generators", topic(RUN, TopicName.PROMPTS)),
                writer=client.writer(),
                engine=TinyEngine(self.clock),
                store=self.store(self.process(name)),
                reward=ParityReward(),
                executor=InlineExecutor(),
                clock=self.clock,
                new_id=self.new_id,
            )
            return GeneratorService(settings, ports)

        return build


def mean_only(groups: list[list[float]]) -> list[list[float]]:
    """Advantages of the simulator: r - mean."""
    return [[r - sum(rewards) / len(rewards) for r in rewards] for rewards in groups]


class _HookedStore:
    """The store with places to die before and after each call."""

    def __init__(self, store: FsspecCheckpointStore, hook: Callable[[str, str], None]) -> None:
        self._store = store
        self._hook = hook

    def save(self, attempt_id: str, write: Callable[[Path], None], manifest: Manifest) -> SavedCheckpoint:
        self._hook("store.save", "before")
        saved = self._store.save(attempt_id, write, manifest)
        self._hook("store.save", "after")
        return saved

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Manifest]:
        self._hook("store.fetch", "before")
        fetched = self._store.fetch(manifest_uri, manifest_sha256)
        self._hook("store.fetch", "after")
        return fetched

    def delete(self, manifest_uri: str) -> None:
        self._hook("store.delete", "before")
        self._store.delete(manifest_uri)
        self._hook("store.delete", "after")

    def attempts(self) -> list[str]:
        return list(self._store.attempts())


def simulate(plan: Plan, directory: Path) -> World:
    """Run one plan in a fresh directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    world = World(plan, directory)
    world.run()
    return world
