"""The simulator finds bugs that are put there on purpose: each within a stated number of seeds (mutant_runs.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.mutant_runs import MUTANTS, Hunt, Mutant, hunt, verdict_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_bug_is_found_and_the_same_seeds_without_it_find_nothing(mutant: Mutant, tmp_path: Path) -> None:
    found = hunt(mutant, str(tmp_path))

    assert found.found_at is not None, f"not found within {mutant.within} seeds, the last one said: {found.problem}"
    assert found.clean == []


def test_there_are_enough_of_them_and_each_guarantee_is_broken_by_some() -> None:
    signs = {mutant.breaks for mutant in MUTANTS}

    assert len(MUTANTS) >= 25
    assert signs >= {"G1", "G2", "G3", "G4", "G5", "G7", "G8", "liveness"}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_that_is_not_found_or_a_false_alarm_fails_the_run() -> None:
    good = Hunt(name="a", breaks="G1", found_at=0, problem="G1: x", clean=[], cpu_s=0.1)
    missed = Hunt(name="b", breaks="G1", found_at=None, problem="nothing", clean=[], cpu_s=0.1)
    alarmed = Hunt(name="c", breaks="G1", found_at=0, problem="G1: x", clean=["seed 0: G1: y"], cpu_s=0.1)

    assert verdict_of([good]) == {"mutants": 1, "undetected": 0, "false_alarms": 0}
    assert verdict_of([good, missed, alarmed]) == {"mutants": 3, "undetected": 1, "false_alarms": 1}
