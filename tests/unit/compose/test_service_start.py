"""`serve` without a supervisor: exit codes for restart policies, the sign of life, and a stop before the beginning."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from driftlog import services
from driftlog.services import add_service_options, drain_limit_s, longest_stop_s, serve
from infra.config import load_config
from infra.runner import Assembly, ExitCode, StopSignals
from infra.wakeup import Wakeup
from schemas.errors import Fenced, LogUnavailable


class _OneStep:
    """A service whose only step is the given one."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.finished = False
        self._step = step

    def step(self) -> bool:
        self._step()
        self.finished = True
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Serve one step with these options; process-wide set-up is left out."""
    monkeypatch.setenv("DRIFTLOG_KAFKA", "127.0.0.1:1")
    monkeypatch.setattr(StopSignals, "install", lambda self: None)
    monkeypatch.setattr(services.logs, "configure", lambda *_, **__: None)
    monkeypatch.setattr(services, "join", lambda *_, **__: True)

    def serve_once(step: Callable[[], None], *words: str) -> int:
        parser = argparse.ArgumentParser()
        add_service_options(parser)
        options = parser.parse_args(["--set", f'run.directory="{tmp_path}"', *words])
        assembly = Assembly(service=_OneStep(step), wakeup=Wakeup(), resources=ExitStack())
        return serve(
            options, "trainer", threads=lambda _: 1, prepare=lambda config, at: None, build=lambda at: assembly
        )

    return serve_once


def raises(error: Exception) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step


def test_a_service_that_is_done_ends_with_0(start: Callable[..., int]) -> None:
    assert start(lambda: None) == 0


def test_a_fenced_service_ends_with_3_or_as_its_restart_policy_needs_it(start: Callable[..., int]) -> None:
    assert start(raises(Fenced("a newer one"))) == 3
    assert start(raises(Fenced("a newer one")), "--fenced-exit", "0") == 0


def test_a_failure_is_not_taken_for_being_fenced(start: Callable[..., int]) -> None:
    assert start(raises(LogUnavailable("away")), "--fenced-exit", "0") == 1


def test_a_service_gives_its_sign_of_life_before_its_first_step(start: Callable[..., int], tmp_path: Path) -> None:
    sign = tmp_path / "alive"
    seen: list[bool] = []

    start(lambda: seen.append(sign.exists()), "--life-sign", str(sign))

    assert seen == [True]


def test_a_service_told_to_stop_while_it_waits_ends_with_0_and_builds_nothing(
    start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "join", lambda *_, **__: False)

    assert start(raises(AssertionError("built"))) == ExitCode.OK


def test_the_trainer_alone_does_not_wait_for_an_ended_run_to_open(
    start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(services, "join", lambda *_, reopened, **__: bool(asked.append(reopened)) or True)

    start(lambda: None)

    assert asked == [False]


def test_the_time_to_stop_grows_with_the_drain_of_the_settings() -> None:
    config = load_config(None, ["generator.drain_timeout_s=100", "coordinator.switch_deadline_s=200"])

    assert 100 < drain_limit_s(config) < longest_stop_s(config)
