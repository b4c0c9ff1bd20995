"""Directories that no event names are gone after their grace time, all others are there; and of two trainers that
read the log at the same moment, none takes the other's commit for damage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from consumers.garbage import kept_uris
from infra.checkpoint_files import parse_manifest_uri
from schemas.topics import TopicName
from tests.fakes.memory_log import Arrivals
from tests.sim.faults import FaultyWorld
from tests.sim.plan import Plan
from tests.sim.services import RUN, follower
from tests.sim.verdict import violations
from tests.sim.world import Process, World


def directories(world: World) -> set[str]:
    return {path.name for path in (world.directory / RUN).iterdir() if not path.name.startswith(".torn-")}


def named(world: World) -> set[str]:
    reading = follower(world.log.client("check"))
    reading.advance(1_000_000)
    return {parse_manifest_uri(uri).attempt_id for uri in kept_uris(reading.fold)}


def crashed(place: str, directory: Path) -> FaultyWorld:
    """The trainer dies at that place again and again; then there is enough time for a few garbage rounds."""
    directory.mkdir()
    plan = Plan(
        seed=1, versions=60, crash_probability=1e-4, crashable=("trainer",), die_at=place, faults_until_s=8.0, keep=4,
        state_every=2,
    )  # fmt: skip
    world = FaultyWorld(plan, directory, [])
    world.run()
    return world


@pytest.mark.parametrize("place", ["after store.write", "after store.save"])
def test_directories_that_crashes_left_are_gone_at_the_end_and_none_that_an_event_names(
    tmp_path: Path, place: str
) -> None:
    world = crashed(place, tmp_path / "run")

    assert violations(world) == []
    assert world.process("trainer").deaths.count(place) >= 3
    assert directories(world) == named(world)


def test_without_garbage_rounds_the_same_crashes_leave_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.garbage.GarbageRounds.step", lambda self, follower: False)
    world = crashed("after store.save", tmp_path / "run")

    assert len(directories(world) - named(world)) >= 3


class SlowLedger(World):
    """A world in which the second trainer gets the ledger one record at a time, and everything else at once."""

    def _arrivals(self, process: Process) -> Arrivals | None:
        if process.name != "trainer2":
            return None
        return lambda topic, partition: 1 if topic.endswith(TopicName.LEDGER) else 1_000_000


def test_a_trainer_that_a_third_one_overtakes_while_it_reads_is_fenced_and_calls_nothing_damaged(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    world = SlowLedger(Plan(seed=1, versions=12), tmp_path / "run")
    drive_until(world, lambda: newest(world) >= 3, world.processes)
    second, third = (Process(name, world._trainer) for name in ("trainer2", "trainer3"))
    world.processes += [second, third]
    world._drive(second, world.clock.monotonic_s())
    others = [process for process in world.processes if process is not second]
    reached = newest(world)
    drive_until(world, lambda: newest(world) > reached, others)
    drive_until(world, lambda: second.done, [second])
    world.run()

    assert violations(world) == []
    assert [(p.name, p.error, p.restarts) for p in world.processes if p.name.startswith("trainer")] == [
        ("trainer", "fenced", 0), ("trainer2", "fenced", 0), ("trainer3", "", 0),
    ]  # fmt: skip


def newest(world: World) -> int:
    reading = follower(world.log.client("check"))
    reading.advance(1_000_000)
    return -1 if reading.fold.newest is None else reading.fold.newest


def drive_until(world: World, holds: Callable[[], bool], processes: list[Process]) -> None:
    """A bounded number of turns of these processes alone."""
    for _ in range(20_000):
        if holds():
            return
        process = world.random.choice([p for p in processes if not p.done])
        world._drive(process, world.clock.monotonic_s())
        world.clock.advance(0.005)
    raise AssertionError("it never holds")
