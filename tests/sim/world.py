"""The simulator: the real services on the in-memory log, a virtual clock, and a scheduler that a seed decides.

Every port call is a place where a process may die, before or after the call took effect. A dead process is
started again a little later, as a supervisor would. `run` returns when the run has ended or time is up.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from consumers.trainer.branching import BranchWish
from infra.checkpoint_store import FsspecCheckpointStore
from infra.policy_follower import PolicyFollower
from infra.ports import CheckpointStore, Clock, Message
from schemas.errors import DriftlogError, Fenced
from schemas.headers import control_headers
from schemas.ids import parse_group_id
from schemas.policy_events import VersionPinned, encode_policy_event
from schemas.policy_state import VersionStatus
from schemas.topics import TopicName, topic
from schemas.trajectory import PromptRequest
from tests.fakes.memory_log import Arrivals, Crash, Hook, MemoryLog, Phase
from tests.fakes.memory_ports import MemoryClient
from tests.fakes.virtual_clock import VirtualClock
from tests.sim import services
from tests.sim.behind import BehindExecutor
from tests.sim.bounds import BoundsWatch
from tests.sim.plan import Plan
from tests.sim.services import RUN, Service
from tests.sim.surroundings import FaultyStore, SkewedClock, Trouble
from tests.sim.worker_watch import WorkerWatch

__all__ = ["RUN", "Plan", "Process", "World", "simulate"]

# A turn of a process takes that long. When nobody had anything to do for a while, time may pass faster.
_TURN_S = (0.001, 0.005, 0.02)
_IDLE_TURN_S = 0.06
_STRAGGLER_POLLS = 150
_SLOW_S = (0.1, 4.0)
_SLOW_PUBLICATION_S = 2.0
_EVERYTHING = 1_000_000
_STALL_SHARE = 0.01
_PERSON_LOOKS_EVERY = 10
"""turns"""


@dataclass(slots=True)
class Process:
    """A service that can die and come back."""

    name: str
    build: Callable[[MemoryClient], Service]
    service: Service | None = None
    client: MemoryClient | None = None
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
        self._idle = 0
        self._hooks: dict[str, Hook] = {}
        self._clocks: dict[str, Clock] = {}
        self.executors: dict[str, BehindExecutor] = {}
        """threads of the processes that have one"""
        self.faults_on = True
        self.log.client("setup").admin().create_topics(RUN)
        self.processes = [Process("trainer", self._trainer), Process("coordinator", self._coordinator)]
        self.processes += [Process(f"g{i}", self._generator) for i in range(plan.generators)]
        self.processes += [Process("evaluator", self._evaluator)] if plan.evaluate else []
        self.steps = 0
        self.bounds = BoundsWatch(self)
        self.workers = WorkerWatch(self, RUN, services.LEASE_S)
        self._person = None if plan.pin_version is None else services.follower(self.log.client("person"))
        """who is going to pin a version"""
        self.crash_places: Counter[str] = Counter()
        self.poison_deaths: Counter[str] = Counter()
        """group -> workers that died generating it"""

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until every process is done, or the limit is reached; a second time where the plan has another part."""
        self._run_to_end()
        if self.plan.then_branch_from is not None and all(p.done for p in self.processes):
            wish = BranchWish(from_version=self._branch_origin(), when_newest=self._newest())
            self.go_on(replace(self.plan, then_branch_from=None, branch=wish))

    def go_on(self, plan: Plan) -> None:
        """Start every process of an ended run again under another plan."""
        for process in self.processes:
            if process.error != "fenced":
                process.service, process.done = None, False
        now_s = self.clock.monotonic_s()
        self.plan = replace(plan, limit_s=now_s + plan.limit_s)
        self._run_to_end()

    def _run_to_end(self) -> None:
        while not all(p.done for p in self.processes):
            now_s = self.clock.monotonic_s()
            if now_s > self.plan.limit_s:
                return
            self.faults_on = now_s < self.plan.faults_until_s
            running = [p for p in self.processes if not p.done]
            process = self.random.choice(running)
            self._idle = 0 if self._drive(process, now_s) else self._idle + 1
            quiet = self._idle > 2 * len(running)
            self.clock.advance(_IDLE_TURN_S if quiet else self.random.choice(_TURN_S))
            self.steps += 1
            self.bounds.look(process)
            self.workers.look(process)
            if self._person is not None and self.steps % _PERSON_LOOKS_EVERY == 0:
                self._pin_if_published(self._person)

    def _pin_if_published(self, person: PolicyFollower) -> None:
        """Once; a version that was retired before somebody thought of it can not be pinned any more."""
        person.advance()
        version = self.plan.pin_version
        assert version is not None
        state = person.fold.versions.get(version)
        if state is None or not self.log.available:
            return
        self._person = None
        if state.status is not VersionStatus.RETIRED:
            pinned = VersionPinned(run=RUN, at_us=self.clock.now_us(), version=version, reason="somebody likes it")
            value = encode_policy_event(pinned)
            headers = control_headers(pinned, value, "person")
            name = topic(RUN, TopicName.POLICY)
            self.log.append(Message(topic=name, key=RUN.encode(), value=value, headers=headers))

    def process(self, name: str) -> Process:
        """By name."""
        return next(p for p in self.processes if p.name == name)

    def _drive(self, process: Process, now_s: float) -> bool:
        """One turn of one process; True when it did something."""
        try:
            if process.service is None:
                if now_s < process.restart_at_s:
                    return False
                process.service = process.build(self._client(process))
            if process.name in self.executors:
                self.executors[process.name].advance()
            worked = process.service.step()
            process.done = bool(getattr(process.service, "finished", False))
            return worked or process.done
        except Crash as crash:
            self.crash_places[f"{process.name[:1]} {crash}"] += 1
            self._die(process, str(crash), now_s)
        except Fenced:
            process.done = True
            process.error = "fenced"
        except DriftlogError as error:
            process.error = f"{type(error).__name__}: {error}"
            self._die(process, process.error, now_s)
        return True

    def _die(self, process: Process, where: str, now_s: float) -> None:
        self.log.crash(process.name)
        self.executors.pop(process.name, None)
        process.service = None
        process.restarts += 1
        process.deaths.append(where)
        process.restart_at_s = now_s + self.random.uniform(*self.plan.restart_s)

    def _client(self, process: Process) -> MemoryClient:
        self._hooks[process.name] = hook = self._hook(process)
        process.client = self.log.client(process.name, on_call=hook, arrivals=self._arrivals(process))
        return process.client

    def _arrivals(self, process: Process) -> Arrivals | None:
        """How much of what is there has reached this process: topics may lag behind each other."""
        if not self.plan.lag_share:
            return None

        stalled_until_s: dict[tuple[str, int], float] = {}

        def arrived(topic: str, partition: int) -> int:
            if not self.faults_on:
                return _EVERYTHING
            now_s = self.clock.monotonic_s()
            if now_s < stalled_until_s.get((topic, partition), 0.0):
                return 0
            if self.random.random() < _STALL_SHARE * self.plan.lag_share:
                stalled_until_s[topic, partition] = now_s + self.random.uniform(0.1, self.plan.stall_s)
            late = self.random.random() < self.plan.lag_share
            return self.random.choice((0, 0, 1, 2)) if late else _EVERYTHING

        return arrived

    def _hook(self, process: Process) -> Hook:
        may_die = process.name.startswith(self.plan.crashable)

        def on_call(name: str, phase: Phase) -> None:
            # Most calls are polls that find nothing; dying there over and over would hide the interesting places.
            share = 0.03 if name.endswith(".poll") else 1.0
            if may_die and self.faults_on and self.random.random() < share * self.plan.crash_probability:
                raise Crash(f"{phase} {name}")

        return on_call

    def new_id(self) -> str:
        """Unique in this world."""
        self._ids += 1
        return f"id{self._ids:05d}"

    # ------------------------------------------------------------------ what a process sees

    def clock_of(self, name: str) -> Clock:
        """The clocks of a process: its own for as long as the world lasts."""
        if not self.plan.skew_s:
            return self.clock
        if name not in self._clocks:
            rng, skew_s = random.Random(f"clock/{self.plan.seed}/{name}"), self.plan.skew_s
            self._clocks[name] = SkewedClock(
                self.clock,
                off_s=rng.uniform(-skew_s, skew_s),
                jump_at_s=rng.uniform(0.5, 10.0),
                jump_s=rng.choice((0.0, rng.uniform(-skew_s, skew_s))),
                origin_s=rng.uniform(0.0, 1e6),
            )
        return self._clocks[name]

    def hook_of(self, name: str) -> Hook:
        """Where a process may die; nowhere, for one that no scheduler drives."""
        return self._hooks.get(name, lambda call, phase: None)

    def store(self) -> FsspecCheckpointStore:
        """The store as it is."""
        return FsspecCheckpointStore(str(self.directory), RUN, cache_dir=None, fsync=False)

    def store_of(self, name: str) -> CheckpointStore:
        """A process's view of the store."""
        root = self.directory.resolve()
        return FaultyStore(self.store(), root, self.hook_of(name), lambda uri: self.file_trouble(name, uri), self.clock)

    def file_trouble(self, name: str, uri: str) -> Trouble | None:
        """What is wrong with these files, seen from this process, now."""
        return None

    def executor_delay_s(self) -> float:
        """How long the next call on a worker's executor takes."""
        if not self.faults_on or self.random.random() >= self.plan.slow_share:
            return 0.0
        return self.random.uniform(*_SLOW_S)

    def executor_of(self, name: str) -> BehindExecutor:
        """A thread for a process that has just begun."""
        self.executors[name] = BehindExecutor(self.clock, self.publication_delay_s)
        return self.executors[name]

    def publication_delay_s(self) -> float:
        """How long the next checkpoint takes to be written: from no time to that of several training steps."""
        return self.random.choice((0.0, self.random.uniform(0.0, 0.3), self.random.uniform(0.0, _SLOW_PUBLICATION_S)))

    def polls_of(self, name: str, request: PromptRequest) -> int:
        """How long a group takes on a worker: stragglers are the same ones for whoever asks again."""
        digest = hashlib.sha256(f"{self.plan.seed}/{name}/{request.group_id}".encode()).digest()
        slow = digest[0] < 256 * self.plan.straggler_share
        return _STRAGGLER_POLLS if slow else self.plan.polls_per_group

    def on_sample(self, name: str, request: PromptRequest) -> None:
        """Some prompts kill whoever generates them."""
        if self.plan.poison_prompt == parse_group_id(request.group_id).prompt:
            self.poison_deaths[request.group_id] += 1
            raise Crash(f"on {request.group_id}")

    # ------------------------------------------------------------------ the processes

    def _trainer(self, client: MemoryClient) -> Service:
        return services.trainer(self, client)

    def _coordinator(self, client: MemoryClient) -> Service:
        return services.coordinator(self, client)

    def _generator(self, client: MemoryClient) -> Service:
        return services.generator(self, client)

    def _evaluator(self, client: MemoryClient) -> Service:
        return services.evaluator(self, client)

    def _newest(self) -> int:
        reading = services.follower(self.log.client("check"))
        reading.advance(1_000_000)
        assert reading.fold.newest is not None
        return reading.fold.newest

    def _branch_origin(self) -> int:
        """The wished-for version, or the newest one below it that training can go on from."""
        reading = services.follower(self.log.client("check"))
        reading.advance(1_000_000)
        fold, wished = reading.fold, self.plan.then_branch_from
        usable = [v for v, s in fold.versions.items() if s.event.has_state and s.status.value != "retired"]
        return min(usable, key=lambda version: (abs(version - (wished or 0)), version))


def simulate(plan: Plan, directory: Path) -> World:
    """Run one plan in a fresh directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    world = World(plan, directory)
    world.run()
    return world
