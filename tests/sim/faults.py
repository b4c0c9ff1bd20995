"""Faults beyond crashes, decided by the seed, and deaths at the places where they hurt most.

A fault has a kind, a worker it is about, and a window; all are over by the end of the plan's fault window.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schemas.topics import TopicName
from tests.fakes.memory_log import Crash, Hook, Phase
from tests.sim import strangers
from tests.sim.plan import Plan, plan_of
from tests.sim.services import RUN
from tests.sim.surroundings import Trouble
from tests.sim.world import Process, World

__all__ = ["KINDS", "Fault", "FaultyWorld", "Kind", "faults_of", "plan_of", "simulate_faults"]

Kind = Literal[
    "away", "deferred", "freeze", "cut", "cut_service", "torn_before", "torn_after", "wrong_weights", "late_files",
    "torn_files", "second_trainer", "second_coordinator", "poison_records", "echo", "hostile_rows", "compaction",
    "stale_prefixes",
]  # fmt: skip
KINDS: tuple[Kind, ...] = (
    "away", "deferred", "freeze", "cut", "cut_service", "torn_before", "torn_after", "wrong_weights", "late_files",
    "torn_files", "second_trainer", "second_coordinator", "poison_records", "echo", "hostile_rows", "compaction",
    "stale_prefixes",
)  # fmt: skip
FAULTS_A_RUN = 4
# Longer than the lease of 6 s: the worker is expired while it lives.
_LONG_S = (8.0, 14.0)
_LONG = ("freeze", "cut")
_OTHERS_S = (0.5, 5.0)
_ENGINE: dict[str, Literal["before", "after", "silent", "stale"]] = {
    "torn_before": "before", "torn_after": "after", "wrong_weights": "silent", "stale_prefixes": "stale",
}  # fmt: skip
_FILES: dict[str, Trouble] = {"late_files": "late", "torn_files": "torn"}
_ONCE: dict[str, Callable[[World, random.Random], None]] = {
    "poison_records": strangers.write_poison, "echo": strangers.write_again, "hostile_rows": strangers.write_hostile,
    "compaction": strangers.compact,
}  # fmt: skip

_TARGETS: dict[str, tuple[tuple[str, Phase, str], ...]] = {
    # (port call, before or after its effect, topic it is about; "" for any)
    "trainer": (
        ("transaction.init", "after", ""), ("transaction.commit", "before", ""), ("transaction.end", "before", ""),
        ("transaction.end", "after", ""), ("transaction.commit", "after", ""), ("store.save", "before", ""),
        ("store.write", "after", ""), ("store.save", "after", ""), ("store.fetch", "before", ""),
        ("store.fetch", "after", ""), ("learner.train", "before", ""), ("learner.train", "after", ""),
        ("reader.poll", "after", TopicName.TRAJECTORIES), ("reader.end_offsets", "after", ""),
    ),
    "coordinator": (
        ("transaction.init", "after", ""), ("transaction.commit", "before", ""), ("transaction.end", "before", ""),
        ("transaction.end", "after", ""), ("transaction.commit", "after", ""), ("store.delete", "before", ""),
        ("store.delete", "after", ""), ("reader.poll", "after", TopicName.WORKERS),
    ),
    "g": (
        ("writer.send", "before", TopicName.POLICY), ("writer.send", "after", TopicName.POLICY),
        ("writer.send", "before", TopicName.TRAJECTORIES), ("writer.send", "after", TopicName.TRAJECTORIES),
        ("writer.send", "after", TopicName.WORKERS), ("writer.send", "after", TopicName.DEADLETTERS),
        ("store.fetch", "before", ""), ("store.fetch", "after", ""), ("engine.load", "before", ""),
        ("engine.load", "after", ""), ("group.commit", "before", ""), ("group.commit", "after", ""),
        ("group.leave", "after", ""), ("group.rejoin", "after", ""), ("group.poll", "after", ""),
    ),
    "evaluator": (
        ("writer.send", "before", TopicName.EVALUATIONS), ("writer.send", "after", TopicName.EVALUATIONS),
        ("store.fetch", "before", ""), ("store.fetch", "after", ""), ("engine.load", "after", ""),
        ("reader.poll", "after", TopicName.EVALUATIONS), ("reader.end_offsets", "after", ""),
    ),
}  # fmt: skip
_SPLIT = ("writer.send", "before", TopicName.TRAJECTORIES)
_OCCURRENCES = (1, 1, 1, 2, 2, 3, 5, 8)
_ECHO_SHARE = 0.02
"""of the turns while a sender repeats itself"""
_TARGETED_SHARE = 0.8
"""of the lives of a process that may die end at a chosen place, if they come by it"""


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
    """A few faults at random times, begun in the first third of the fault window."""
    rng = random.Random(f"faults/{seed}")
    found = []
    for _ in range(FAULTS_A_RUN if kinds else 0):
        kind = rng.choice(kinds)
        from_s = rng.uniform(0.1, plan.faults_until_s * 0.3)
        length_s = rng.uniform(*(_LONG_S if kind in _LONG else _OTHERS_S))
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
        self.happened: Counter[str] = Counter()
        self.strangers: Counter[str] = Counter()
        """records that no service of ours wrote, by topic"""
        self._begun: set[int] = set()
        self._silent: set[str] = set()
        self._over_at_s = max((fault.to_s for fault in self.faults), default=0.0)
        self._on: list[Fault] = []

    def _hook(self, process: Process) -> Hook:
        """As World._hook, and most lives have a place where they are to end."""
        die = super()._hook(process)
        kind = next(k for k in _TARGETS if process.name.startswith(k))
        targeted = self.plan.crash_probability > 0 and self.random.random() < _TARGETED_SHARE
        if not targeted or not process.name.startswith(self.plan.crashable):
            return die
        targets = [t for t in _TARGETS[kind] if self.plan.die_at in f"{t[1]} {t[0]} {t[2]}"]
        if not targets:
            return die
        name_at, phase_at, about = self.random.choice(targets)
        left = self.random.choice(_OCCURRENCES)
        # A group that is too large for one record is sent in parts: the first one may stay alone.
        halves = (name_at, phase_at, about) == _SPLIT and self.random.random() < 0.7

        def on_call(name: str, phase: Phase) -> None:
            nonlocal left
            die(name, phase)
            if name != name_at or phase != phase_at or not self.faults_on:
                return
            subject = "" if process.client is None else process.client.subject
            if about and subject != f"{RUN}.{about}":
                return
            left -= 1
            if left == 0:
                if halves and process.client is not None and process.client.sending is not None:
                    strangers.write_half(self, process.client.sending, members=1)
                raise Crash(f"{phase} {name}" + (f" {about}" if about else ""))

        return on_call

    def run(self) -> None:
        """As World.run; whoever looks at the log afterwards finds it there."""
        super().run()
        self.log.available, self.log.deferred = True, False
        self.log.cut.clear()

    def file_trouble(self, name: str, uri: str) -> Trouble | None:
        """Files are late or torn for the worker of a fault."""
        return next((_FILES[f.kind] for f in self._on if f.kind in _FILES and f.worker == name), None)

    def _drive(self, process: Process, now_s: float) -> bool:
        if now_s <= self._over_at_s or self._on:
            self._look_at_faults(now_s)
        if self.random.random() < _ECHO_SHARE and any(fault.kind == "echo" for fault in self._on):
            strangers.write_again(self, self.random)
        if self.faults_on and self.random.random() < self.lost_acks:
            self.log.next_send = self.random.choice(("lost", "lost_ack"))
        if self.faults_on and self.random.random() < self.lost_acks:
            self.log.next_commit = self.random.choice(("aborted", "committed"))
        if any(fault.kind == "freeze" and fault.worker == process.name for fault in self._on):
            return False
        self._set_engine(process)
        return super()._drive(process, now_s)

    def _look_at_faults(self, now_s: float) -> None:
        on = self._on = [fault for fault in self.faults if fault.is_on(now_s)]
        self.log.available = not any(fault.kind == "away" for fault in on)
        self.log.deferred = any(fault.kind == "deferred" for fault in on)
        self.log.cut = {self._cut_off(fault) for fault in on if fault.kind in ("cut", "cut_service")}
        silent = self.log.cut | {fault.worker for fault in on if fault.kind == "freeze"}
        for name in silent:
            self.log.silence(name)
        for name in self._silent - silent:
            if self.process(name).service is not None:
                self.log.speak(name)
        self._silent = silent
        for number, fault in enumerate(self.faults):
            if fault.is_on(now_s) and number not in self._begun:
                self._begun.add(number)
                self.happened[fault.kind] += 1
                self._begin(fault, number)

    def _cut_off(self, fault: Fault) -> str:
        """Who does not reach the broker."""
        if fault.kind == "cut":
            return fault.worker
        return "trainer" if round(fault.from_s * 1000) % 2 else "coordinator"

    def _begin(self, fault: Fault, number: int) -> None:
        if fault.kind in _ONCE:
            _ONCE[fault.kind](self, random.Random(f"strangers/{self.plan.seed}/{number}"))
        if fault.kind == "second_trainer":
            self.processes.append(Process(f"trainer{number + 2}", self._trainer))
        if fault.kind == "second_coordinator":
            self.processes.append(Process(f"coordinator{number + 2}", self._coordinator))

    def _set_engine(self, process: Process) -> None:
        """The engine of the worker fails to load while such a fault is on."""
        if process.service is None or not process.name.startswith("g"):
            return
        bad = [_ENGINE[f.kind] for f in self._on if f.worker == process.name and f.kind in _ENGINE]
        process.service._p.engine.fail_load = bad[0] if bad else None  # type: ignore[attr-defined]


def simulate_faults(plan: Plan, directory: Path, faults: list[Fault] | None = None) -> FaultyWorld:
    """Run one plan in a fresh directory, with the faults of its seed or with the given ones."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    world = FaultyWorld(plan, directory, faults)
    world.run()
    return world
