"""What follows from the exit of a supervised process, and the housekeeping around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from driftlog.processes import end_leftovers, is_alive
from driftlog.run_directory import RunDirectory
from driftlog.supervision import RestartRules, Verdict, after_exit

RULES = RestartRules(restarts=5, window_s=600.0, first_wait_s=0.25, longest_wait_s=5.0)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(0, Verdict.DONE), (1, Verdict.RESTART), (-9, Verdict.RESTART), (2, Verdict.USAGE), (3, Verdict.FENCED)],
)
def test_the_exit_code_decides(code: int, verdict: Verdict) -> None:
    assert after_exit(code, [], 0.0, RULES).verdict is verdict


def test_the_sixth_death_in_ten_minutes_is_the_last() -> None:
    deaths = [1.0, 2.0, 3.0, 4.0]

    assert after_exit(1, deaths, 5.0, RULES).verdict is Verdict.RESTART
    assert after_exit(1, [*deaths, 5.0], 6.0, RULES).verdict is Verdict.GIVE_UP


def test_old_deaths_do_not_count() -> None:
    assert after_exit(1, [0.0] * 5, 601.0, RULES).verdict is Verdict.RESTART


def test_the_wait_before_a_restart_doubles_up_to_its_limit() -> None:
    waits = [after_exit(1, [10.0] * deaths, 10.0, RULES).wait_s for deaths in range(5)]

    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0]


def test_leftover_services_are_ended_and_strangers_are_not(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "demo")
    run.pids.mkdir(parents=True)
    sleeper = "import threading; print(flush=True); threading.Event().wait(60)"
    words = ("driftlog", "--config", str(run.path / "config.json")), ("other",)
    ours, stranger = (
        subprocess.Popen([sys.executable, "-c", sleeper, *said], stdout=subprocess.PIPE, text=True) for said in words
    )
    try:
        for process in (ours, stranger):  # a process that was just made has no command line for a moment
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
        (run.pids / "trainer.pid").write_text(f"{ours.pid}\n")
        (run.pids / "coordinator.pid").write_text(f"{stranger.pid}\n")
        (run.pids / "generator-0.pid").write_text("no number\n")

        assert end_leftovers(run, patience_s=10.0) == ["trainer"]

        assert ours.wait(timeout=10) != 0
        assert stranger.poll() is None
        assert list(run.pids.iterdir()) == []
    finally:
        for process in (ours, stranger):
            process.kill()
            process.communicate(timeout=10)


def test_a_process_that_ended_and_was_reaped_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=30)

    assert is_alive(os.getpid())
    assert not is_alive(process.pid)
