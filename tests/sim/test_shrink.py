"""A failing seed is made smaller, and what is printed runs it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sim import __main__ as command
from tests.sim import verdict
from tests.sim.faults import Fault, faults_of, plan_of
from tests.sim.plan import Plan
from tests.sim.shrink import differences, shrink


def needs_a_freeze(plan: Plan, directory: Path, faults: Sequence[Fault]) -> tuple[object, list[str]]:
    """A bug that shows wherever a worker freezes and more than one group is trained a step."""
    fails = any(fault.kind == "freeze" for fault in faults) and plan.groups_per_step > 1
    return None, ["G1: planted"] if fails else []


def test_shrinking_keeps_what_the_failure_needs_and_nothing_else(tmp_path: Path) -> None:
    plan = plan_of(4)
    faults = [Fault(kind=kind, from_s=1.0, to_s=2.0, worker="g0") for kind in ("away", "freeze", "cut")]  # type: ignore[arg-type]
    plan = Plan(seed=4, groups_per_step=3, crash_probability=0.05, mode="rolling", generators=2, versions=7)
    small = shrink(plan, faults, ["G1: planted"], tmp_path, judge=needs_a_freeze)

    assert [fault.kind for fault in small.faults] == ["freeze"]
    assert (small.plan.groups_per_step, small.plan.mode, small.plan.crash_probability) == (3, "barrier", 0.0)
    assert differences(small.plan, plan).keys() >= {"mode", "crash_probability", "generators", "versions"}


def test_another_violation_than_the_one_that_was_found_is_not_followed(tmp_path: Path) -> None:
    def other(plan: Plan, directory: Path, faults: Sequence[Fault]) -> tuple[object, list[str]]:
        return None, ["G2: something else"]

    assert shrink(plan_of(1), [], ["G1: planted"], tmp_path, judge=other).plan == plan_of(1)


def test_a_failing_seed_says_how_to_run_it_again_as_it_was_and_smaller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verdict, "violations", lambda world: ["G1: planted"] if world.plan.versions > 2 else [])

    assert command.main(["--seeds", "1", "--first", "3", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "  again:  python -m tests.sim --seed 3\n" in out
    shrunk = next(line.split("python -m tests.sim ")[1] for line in out.splitlines() if "  shrunk: " in line)
    assert "--faults none" in shrunk
    assert '"violations": 1, "failed": [3]' in out.splitlines()[-1]

    assert command.main(shlex.split(shrunk)) == 1
    assert "violation: G1: planted" in capsys.readouterr().out


def test_a_good_seed_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == 'RESULT {"seeds": 1, "violations": 0, "failed": []}'


def test_the_faults_of_a_seed_are_numbered_as_the_replay_command_counts_them() -> None:
    faults = faults_of(7, plan_of(7))

    assert command.replay_command(7, {"mode": "barrier"}, [0, 2]) == (
        """python -m tests.sim --seed 7 --set 'mode='"'"'barrier'"'"'' --faults 0,2"""
    )
    assert len(faults) == 4
