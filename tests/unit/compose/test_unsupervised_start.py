"""A service that nobody supervises: what it waits for, how long, and what it says then; its sign of life; its name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from driftlog import life_sign
from driftlog.commands.generate import worker_name
from driftlog.joining import LOOK_AGAIN_S, await_reopening, await_topics
from driftlog.life_sign import LifeSign
from driftlog.options import config_of
from driftlog.run_directory import RunDirectory
from infra.config import load_config
from infra.runner import ExitCode, run_service
from infra.wakeup import Wakeup
from schemas.errors import ConfigError, EnvironmentMissing, LogUnavailable
from schemas.policy_fold import PolicyFold
from tests.fakes.virtual_clock import VirtualClock

WANTED = ("demo.policy", "demo.prompts")


class Waiting:
    """A clock that moves while somebody waits, and a stop that may come meanwhile."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.clock = VirtualClock()
        self.waits = 0
        self._stop_after = stop_after

    def pause(self, seconds: float) -> bool:
        self.waits += 1
        self.clock.advance(seconds)
        return self.waits == self._stop_after


def answers(*each: object) -> Callable[[], frozenset[str]]:
    """One answer a look; the last for ever. An exception is raised."""
    left = list(each)

    def look() -> frozenset[str]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, tuple)
        return frozenset(answer)

    return look


def wait_for(look: Callable[[], frozenset[str]], at: Waiting, limit_s: float = 3.0) -> bool:
    return await_topics(look, WANTED, where="kafka:19092", limit_s=limit_s, clock=at.clock, pause=at.pause)


def test_topics_that_are_there_are_not_waited_for() -> None:
    at = Waiting()

    assert wait_for(answers(WANTED), at)
    assert at.waits == 0


def test_a_broker_that_comes_late_and_topics_that_come_later_are_waited_for() -> None:
    at = Waiting()

    assert wait_for(answers(LogUnavailable("no broker"), WANTED[:1], WANTED), at)
    assert at.waits == 2


def test_a_broker_that_never_comes_is_an_error_that_starting_again_may_mend() -> None:
    at = Waiting()

    with pytest.raises(LogUnavailable, match=r"no broker reachable \(waited 3 s\)"):
        wait_for(answers(LogUnavailable("no broker reachable")), at)
    assert at.waits == 3 / LOOK_AGAIN_S


def test_topics_that_nobody_makes_are_named_with_the_command_that_does() -> None:
    with pytest.raises(EnvironmentMissing, match=r"no topic demo\.prompts \(1 of 2 .*`driftlog prepare`"):
        wait_for(answers(WANTED[:1]), Waiting())


def test_a_user_who_may_not_look_is_told_at_once() -> None:
    at = Waiting()

    with pytest.raises(EnvironmentMissing, match="authentication failed"):
        wait_for(answers(EnvironmentMissing("authentication failed")), at)
    assert at.waits == 0


def test_a_service_told_to_stop_stops_waiting() -> None:
    at = Waiting(stop_after=2)

    assert not wait_for(answers(WANTED[:1]), at)
    assert at.waits == 2


class _Run:
    """A policy state as far as it is asked here."""

    def __init__(self, *, ended: bool, trained: int) -> None:
        self.ended = ended
        self.newest = trained
        self.versions = {trained: self}
        self.depth = trained


def reopening(at: Waiting, *states: object) -> bool:
    left = list(states)

    def read() -> PolicyFold | None:
        return left.pop(0) if len(left) > 1 else left[0]  # type: ignore[return-value]

    return await_reopening(read, "demo", 20, limit_s=5.0, clock=at.clock, pause=at.pause)


@pytest.mark.parametrize("state", [_Run(ended=False, trained=3), _Run(ended=True, trained=20), PolicyFold()])
def test_a_run_that_is_open_complete_or_new_is_not_waited_for(state: object) -> None:
    at = Waiting()

    assert reopening(at, state)
    assert at.waits == 0


def test_an_ended_run_that_is_to_be_longer_is_waited_for_until_it_is_open_again() -> None:
    at = Waiting()

    assert reopening(at, None, _Run(ended=True, trained=8), _Run(ended=False, trained=8))
    assert at.waits == 2


def test_a_run_that_no_trainer_opens_again_is_named_at_the_limit() -> None:
    with pytest.raises(LogUnavailable, match="demo ended with 8 versions and is to have 20, but no trainer"):
        reopening(Waiting(), _Run(ended=True, trained=8))
    with pytest.raises(LogUnavailable, match="was not read to its end within 5 s"):
        reopening(Waiting(), None)


def test_a_service_told_to_stop_does_not_wait_for_a_run_to_open() -> None:
    assert not reopening(Waiting(stop_after=1), _Run(ended=True, trained=8))


# ---------------------------------------------------------------------- the sign of life


class _Turns:
    """A service that is done after so many steps."""

    def __init__(self, clock: VirtualClock, steps: int) -> None:
        self._clock = clock
        self._left = steps

    @property
    def finished(self) -> bool:
        return self._left == 0

    def step(self) -> bool:
        self._left -= 1
        self._clock.advance(0.4)
        return True

    def close(self) -> None:
        pass


def test_the_loop_beats_before_every_step() -> None:
    clock = VirtualClock()
    beats: list[float] = []

    code = run_service(
        _Turns(clock, 3), wakeup=Wakeup(), stop=threading.Event(), idle_wait_s=0.0, clock=clock, beat=beats.append
    )

    assert code is ExitCode.OK
    assert beats == pytest.approx([0.0, 0.4, 0.8])


def test_the_file_is_touched_at_most_once_a_second(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    sign = LifeSign(path)
    touched = []
    for now_s in (5.0, 5.9, 6.0):
        sign.beat(now_s)
        touched.append(path.exists())
        path.unlink(missing_ok=True)

    assert touched == [True, False, True]


def test_a_sign_that_an_earlier_process_left_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "alive").touch()

    LifeSign(tmp_path / "alive")

    assert not (tmp_path / "alive").exists()


def test_without_a_path_nothing_is_touched() -> None:
    LifeSign(None).beat(1.0)


@pytest.mark.parametrize(
    ("age", "code", "words"), [(5, 0, ""), (11, 1, "last touched 11 s ago, at most 10"), (None, 1, "not there")]
)
def test_a_health_check_passes_while_the_sign_is_young(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], age: int | None, code: int, words: str
) -> None:
    path = tmp_path / "alive"
    if age is not None:
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))

    assert life_sign.main([str(path), "10"], 1000.0) == code
    assert words in capsys.readouterr().err


def test_a_health_check_that_is_written_wrong_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert life_sign.main(["alive"], 0.0) == 2
    assert "usage" in capsys.readouterr().err


# ---------------------------------------------------------------------- names and configurations


@pytest.mark.parametrize(
    ("asked", "host", "expected"),
    [("g1", "box", "g1"), ("@host", "3f2a9c", "3f2a9c"), ("@host", "GPU_Box.example", "gpu-box-example")],
)
def test_a_worker_is_called_as_asked_or_like_its_host(asked: str, host: str, expected: str) -> None:
    assert worker_name(asked, {"HOSTNAME": host}) == expected


def test_the_folder_of_a_run_stands_for_its_configuration_in_force(tmp_path: Path) -> None:
    from driftlog.__main__ import _parser

    config = load_config(None, ['run.name="demo"', f'run.directory="{tmp_path}"', "run.versions=3"])
    RunDirectory(tmp_path, "demo").adopt(config, accept_changes=False)
    parser, _ = _parser()

    found, at = config_of(parser.parse_args(["train", "--config", str(tmp_path / "demo")]))

    assert (found.run.versions, at.path) == (3, tmp_path / "demo")


def test_a_folder_without_a_configuration_names_the_command_that_puts_it_there(tmp_path: Path) -> None:
    from driftlog.__main__ import _parser

    parser, _ = _parser()

    with pytest.raises(ConfigError, match="`driftlog prepare` puts it there"):
        config_of(parser.parse_args(["train", "--config", str(tmp_path)]))
