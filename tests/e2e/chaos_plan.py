"""What is done to which run, drawn from a seed. Pure.

A service may die five times in ten minutes before `driftlog up` gives up, and that limit stays as users have it: the
deaths are spread over several runs. `kills` counts what a plan will do; the runs prove that it was done.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

TRAINER, COORDINATOR, PROJECTOR, BROKER = "trainer", "coordinator", "projector", "broker"
GENERATORS = ("generator-0", "generator-1")
LEASE_S = 12.0


class Phase(StrEnum):
    """Where in its checkpoint cycle the trainer stands."""

    RECOVERING = "recovering"
    """a new process that has not gone on from the committed state yet"""
    AFTER_COMMIT = "after_commit"
    """the newest version is committed, the groups of the next step are not all in the log"""
    COMPUTING = "computing"
    """the groups of the next step are all in the log, no checkpoint of it is begun"""
    SAVING = "saving"
    """a checkpoint is being written under its temporary name"""
    BETWEEN = "between_checkpoint_and_commit"
    """a checkpoint has its final name, no committed version names it"""


class What(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    STOP = "stop"
    """SIGSTOP, and SIGCONT after longer than the lease or the transaction time-out; of the broker, after less"""
    LOCK_TRACKER = "lock_tracker"
    FILL_DISK = "fill_disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    what: What
    service: str
    phase: Phase | None = None
    """of the trainer, at which it must hit; None: wherever it is"""
    wait_versions: int = 2
    """versions committed after the fault before was over"""
    overlaps: bool = False
    """the fault before need not be over"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run of the stack."""

    name: str
    versions: int
    faults: tuple[Fault, ...]
    settings: tuple[str, ...] = ()
    small_store: bool = False
    """its checkpoints lie on a small file system of their own, which can be filled"""


ON_POLICY = ("trainer.max_lag=0", 'generator.batching="group"')
BASELINE, SAME = "baseline", "same"


def plans(seed: int) -> tuple[RunPlan, ...]:
    """All runs of `make chaos`: a baseline without faults, its killed twin, two storms, and the slow faults."""
    random_ = random.Random(seed)
    others = {**dict.fromkeys(GENERATORS, 2), COORDINATOR: 2, PROJECTOR: 1, BROKER: 1}
    twin = _kills(
        random_,
        trainer=(Phase.BETWEEN, Phase.AFTER_COMMIT, Phase.BETWEEN, Phase.COMPUTING),
        others={COORDINATOR: 2},
    )
    storms = [
        _kills(random_, trainer=phases, others=others)
        for phases in (
            (Phase.BETWEEN, Phase.BETWEEN, Phase.SAVING, Phase.COMPUTING),
            (Phase.BETWEEN, Phase.BETWEEN, Phase.BETWEEN, Phase.RECOVERING),
        )
    ]
    return (
        RunPlan(name=BASELINE, versions=48, faults=(), settings=ON_POLICY),
        RunPlan(name=SAME, versions=48, faults=twin, settings=ON_POLICY),
        RunPlan(name="storm-1", versions=160, faults=storms[0]),
        RunPlan(name="storm-2", versions=160, faults=storms[1]),
        RunPlan(name="slow", versions=140, faults=_slow(random_), settings=("checkpoints.keep=8",), small_store=True),
    )


def kills(faults: Sequence[Fault]) -> Counter[str]:
    """Kills by service."""
    return Counter(fault.service for fault in faults if fault.what is What.KILL)


def shortened(plan: RunPlan, faults: int, versions: int | None) -> RunPlan:
    """The first few faults of a run, and another length."""
    return replace(plan, faults=plan.faults[:faults], versions=plan.versions if versions is None else versions)


def _kills(random_: random.Random, *, trainer: Sequence[Phase], others: dict[str, int]) -> tuple[Fault, ...]:
    """Kills in random order; one that must hit a recovery follows a kill of the trainer at once."""
    again = [phase for phase in trainer if phase is Phase.RECOVERING]
    faults = [Fault(what=What.KILL, service=TRAINER, phase=phase) for phase in trainer if phase not in again]
    faults += [Fault(what=What.KILL, service=name) for name, count in others.items() for _ in range(count)]
    random_.shuffle(faults)
    spread = [replace(fault, wait_versions=random_.randint(1, 4)) for fault in faults]
    for index, (before, fault) in enumerate(pairwise(spread), start=1):
        # What needs the log to be seen hitting, or what takes the log away, stands alone.
        alone = {TRAINER, BROKER} & {before.service, fault.service} or before.service == fault.service
        if not alone and random_.random() < 0.5:
            spread[index] = replace(fault, overlaps=True, wait_versions=0)
    for phase in again:
        index = random_.choice([i for i, fault in enumerate(spread) if fault.service == TRAINER])
        once_more = Fault(what=What.KILL, service=TRAINER, phase=phase, wait_versions=0, overlaps=True)
        spread.insert(index + 1, once_more)
    return tuple(spread)


def _slow(random_: random.Random) -> tuple[Fault, ...]:
    """Faults that last a while, and the third death of a broker."""
    faults = [
        Fault(what=What.STOP, service=random_.choice(GENERATORS)),
        Fault(what=What.STOP, service=TRAINER, phase=Phase.BETWEEN),
        Fault(what=What.STOP, service=COORDINATOR),
        Fault(what=What.STOP, service=BROKER),
        Fault(what=What.LOCK_TRACKER, service=PROJECTOR),
        Fault(what=What.FILL_DISK, service=TRAINER, phase=Phase.SAVING),
        Fault(what=What.KILL, service=BROKER),
        Fault(what=What.KILL, service=TRAINER, phase=Phase.BETWEEN),
    ]
    random_.shuffle(faults)
    return tuple(faults)
