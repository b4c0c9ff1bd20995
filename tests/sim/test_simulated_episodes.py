"""Runs with episodes of several turns under the same faults: every run ends, and every run ends right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import InvalidRecord
from schemas.topics import TopicName
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import TrajectoryLimits, decode_group
from tests.fakes.tiny_policy import VOCABULARY
from tests.sim.faults import faults_of, plan_of
from tests.sim.invariants import records
from tests.sim.verdict import judged, quiet
from tests.sim.world import World

SEEDS = range(12)
LIMITS = TrajectoryLimits(vocabulary_size=VOCABULARY)


def rows_of(world: World) -> Iterator[Trajectory]:
    """What workers published; the records of strangers are left out."""
    for record in records(world, TopicName.TRAJECTORIES):
        with suppress(InvalidRecord):
            for row in decode_group(record.value, record.headers, LIMITS):
                if row.trajectory is not None:
                    yield row.trajectory


def test_episodes_end_right_under_every_fault_and_switch(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        plan = replace(plan_of(seed), turns=3)
        with quiet():
            world, problems = judged(plan, tmp_path / "store", faults_of(seed, plan))
        assert [] == problems, f"seed {seed}"
        assert world is not None
        for row in rows_of(world):
            turns = 1 + int((np.diff(row.loss_mask.astype(np.int8)) == 1).sum())
            seen[f"{turns} turns"] += 1
            seen["switched within an episode"] += turns > 1 and len(row.segments) > 1
            assert row.loss_mask[-1]

    assert min(seen["1 turns"], seen["2 turns"] + seen["3 turns"], seen["switched within an episode"]) > 5, seen


@pytest.mark.parametrize("in_flight", ["finish", "keep"])
def test_a_switch_waits_for_episodes_within_the_limit_or_cuts_them_in_two(tmp_path: Path, in_flight: str) -> None:
    calm = replace(plan_of(1, 0.0), straggler_share=0.0, generators=1, drain_timeout_s=60.0)
    plan = replace(calm, turns=3, in_flight=in_flight)  # type: ignore[arg-type]
    with quiet():
        world, problems = judged(plan, tmp_path / "store", [])

    assert [] == problems
    assert world is not None
    parts = {len(row.segments) for row in rows_of(world)}
    assert (parts == {1}) == (in_flight == "finish")
