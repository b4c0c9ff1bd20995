"""Faults beyond crashes, decided by the seed: lost acknowledgements, a broker that is away, second trainers and
coordinators, workers that pause longer than their lease, loads that tear."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from consumers.trainer.replay import ReplayRules
from tests.sim.world import Plan, Process, World

Kind = Literal["away", "deferred", "freeze", "torn_before", "torn_after", "second_trainer", "second_coordinator"]
KINDS: tuple[Kind, ...] = (
    "away", "deferred", "freeze", "torn_before", "torn_after", "second_trainer", "second_coordinator",
)  # fmt: skip
# Longer than the lease of 6 s: the worker is expired while it lives.
_FREEZE_S = (8.0, 14.0)
_OTHERS_S = (0.5, 5.0)
_SPARED_CALLS = (0, 50, 100, 200, 400)
_TRIES = {"transaction.commit": 2, "transaction.end": 3, "store.save": 3, "store.fetch": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a plan."""

    kind: Kind
    from_s: float
    to_s: float
    worker: str
    """which generator, where it is about one"""

    def is_on(self, now_s: float) -> bool:
        """It happens now."""
        return self.from_s <= now_s < self.to_s


def faults_of(seed: int, plan: Plan, kinds: tuple[Kind, ...] = KINDS) -> list[Fault]:
    """Three faults at random times of the fault window, over by its end."""
    rng = random.Random(f"faults/{seed}")
    found = []
    for _ in range(3):
        kind = rng.choice(kinds)
        from_s = rng.uniform(0.5, plan.faults_until_s * 0.3)
        length_s = rng.uniform(*(_FREEZE_S if kind == "freeze" else _OTHERS_S))
        worker = f"g{rng.randrange(plan.generators)}"
        found.append(Fault(kind=kind, from_s=from_s, to_s=from_s + length_s, worker=worker))
    return found


class FaultyWorld(World):
    """A world in which the faults of a list happen, and acknowledgements are lost now and then."""

    def __init__(
        self, plan: Plan, directory: Path, faults: list[Fault] | None = None, *, lost_acks: float = 0.002
    ) -> None:
        super().__init__(plan, directory)
        self.faults = faults_of(plan.seed, plan) if faults is None else faults
        self.lost_acks = lost_acks
        self._begun: set[int] = set()

    def _hook(self, process: Process) -> Callable[[str, str], None]:
        """As World._hook, but each life is spared for a while: otherwise most die while they read back their state."""
        die = super()._hook(process)
        spared, calls = self.random.choice(_SPARED_CALLS), 0

        def on_call(name: str, phase: str) -> None:
            nonlocal calls
            calls += 1
            if calls > spared:
                # A call in the middle of a commit or a checkpoint is rare, and the best place to die.
                for _ in range(_TRIES.get(name, 1)):
                    die(name, phase)

        return on_call

    def run(self) -> None:
        """As World.run; whoever looks at the log afterwards finds it there."""
        super().run()
        self.log.available, self.log.deferred = True, False

    def _drive(self, process: Process, now_s: float) -> None:
        on = [fault for fault in self.faults if fault.is_on(now_s)]
        self.log.available = not any(fault.kind == "away" for fault in on)
        self.log.deferred = any(fault.kind == "deferred" for fault in on)
        if self.faults_on and self.random.random() < self.lost_acks:
            self.log.next_send = self.random.choice(("lost", "lost_ack"))
        if self.faults_on and self.random.random() < self.lost_acks:
            self.log.next_commit = self.random.choice(("aborted", "committed"))
        for number, fault in enumerate(self.faults):
            if fault.is_on(now_s) and number not in self._begun:
                self._begun.add(number)
                self._begin(fault, number)
        if any(fault.kind == "freeze" and fault.worker == process.name for fault in on):
            return
        self._tear(process, on)
        super()._drive(process, now_s)

    def _begin(self, fault: Fault, number: int) -> None:
        if fault.kind == "second_trainer":
            self.processes.append(Process(f"trainer{number + 2}", self._trainer))
        if fault.kind == "second_coordinator":
            self.processes.append(Process(f"coordinator{number + 2}", self._coordinator))

    def _tear(self, process: Process, on: list[Fault]) -> None:
        """The engine of the worker fails to load while such a fault is on."""
        if process.service is None or not process.name.startswith("g"):
            return
        torn = [f.kind for f in on if f.worker == process.name and f.kind in ("torn_before", "torn_after")]
        engine = process.service._p.engine  # type: ignore[attr-defined]
        engine.fail_load = None if not torn else "before" if torn[0] == "torn_before" else "after"


def simulate_faults(plan: Plan, directory: Path, faults: list[Fault] | None = None) -> FaultyWorld:
    """Run one plan in a fresh directory, with the faults of its seed or with the given ones."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    world = FaultyWorld(plan, directory, faults)
    world.run()
    return world


def plan_of(seed: int, crash_probability: float | None = None) -> Plan:
    """The plan the test suite runs for a seed: crash probabilities between 0.02 and 0.08, and a mix of settings."""
    rng = random.Random(f"plan/{seed}")
    max_lag, run_ahead = rng.choice(((0, 0), (1, 1), (2, 1), (2, 1), (3, 2)))
    everybody = ("trainer", "coordinator", "g")
    crashable = rng.choice((everybody, everybody, ("trainer",), ("coordinator",), ("g",)))
    return Plan(
        seed=seed,
        # Where only some processes die the run is faster: longer, so that the other faults meet it under way.
        versions=6 if crashable == everybody else 12,
        crash_probability=0.02 + 0.01 * (seed % 7) if crash_probability is None else crash_probability,
        crashable=crashable,
        faults_until_s=20.0,
        max_lag=max_lag,
        run_ahead=run_ahead,
        groups_per_step=rng.choice((1, 2, 3)),
        generators=rng.choice((1, 2, 2, 3)),
        replay=rng.choice((ReplayRules(), ReplayRules(steps=2, groups_per_step=1))),
        filter_zero_variance=rng.random() < 0.3,
    )
