"""Runs one seed and says everything that is wrong with it: invariants, stamps, audit, memory bounds."""

from __future__ import annotations

import logging
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.sim.audited import audit_errors
from tests.sim.evaluated import check_evaluations
from tests.sim.faults import Fault, FaultyWorld, faults_of, plan_of, simulate_faults
from tests.sim.invariants import check
from tests.sim.plan import Plan
from tests.sim.promises import check_promises
from tests.sim.stamps import check_stamps
from tests.sim.steering import check_steering
from tests.sim.world import World

_MEMORY = Path("/dev/shm")
"""checkpoints of the simulator lie there where it exists: nothing of them is worth a disk"""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What became of one seed. Plain values: it travels between processes."""

    seed: int
    problems: list[str]
    restarts: int = 0
    virtual_s: float = 0.0
    versions: int = 0
    crash_places: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    poison_deaths: int = 0
    largest: dict[str, int] = field(default_factory=dict)


def violations(world: World) -> list[str]:
    """Every violation of a run that is over, in words."""
    problems = world.bounds.problems + world.workers.problems + check(world)
    if any(problem.startswith("liveness") for problem in problems):
        return problems  # the log of a run that did not end has no end to be judged by
    problems += check_stamps(world) + check_promises(world) + check_steering(world) + check_evaluations(world)
    return problems + audit_errors(world)


def judged(plan: Plan, directory: Path, faults: Sequence[Fault] | None = None) -> tuple[FaultyWorld | None, list[str]]:
    """Run one plan with the faults of its seed, or these. Only DriftlogErrors are a service's to die of: anything else
    that comes out of a service, or out of reading what it wrote, is a violation, not a reason to stop."""
    world = None
    try:
        world = simulate_faults(plan, directory, None if faults is None else list(faults))
        return world, violations(world)
    except Exception as error:  # noqa: BLE001 - see above
        last = traceback.extract_tb(error.__traceback__)[-1]
        return world, [f"stopped: {type(error).__name__}: {error} at {Path(last.filename).name}:{last.lineno}"]


def run_seed(seed: int, directory: Path, crash: float | None = None) -> Verdict:
    """The plan and the faults of a seed."""
    plan = plan_of(seed, crash)
    world, problems = judged(plan, directory, faults_of(seed, plan))
    if world is None:
        return Verdict(seed=seed, problems=problems)
    return Verdict(
        seed=seed,
        problems=problems,
        restarts=sum(process.restarts for process in world.processes),
        virtual_s=world.clock.monotonic_s(),
        versions=plan.versions,
        crash_places=world.crash_places,
        faults=world.happened,
        poison_deaths=sum(world.poison_deaths.values()),
        largest=world.bounds.largest,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Without the services' log lines: thousands of them, and they cost a fifth of the time."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def scratch() -> str | None:
    """Where the stores of simulated runs lie."""
    return str(_MEMORY) if _MEMORY.is_dir() else None


def run_chunk(seeds: Sequence[int], crash: float | None) -> tuple[list[Verdict], float]:
    """A few seeds in this process, and the CPU seconds they took."""
    started_s = time.process_time()
    with quiet(), tempfile.TemporaryDirectory(dir=scratch()) as folder:
        verdicts = [run_seed(seed, Path(folder) / "store", crash) for seed in seeds]
    return verdicts, time.process_time() - started_s
