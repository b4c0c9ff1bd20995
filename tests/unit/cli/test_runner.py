"""The runner: waits instead of polling, obeys signals in bounded time, turns errors into exit codes."""

from __future__ import annotations

import faulthandler
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra import runner
from infra.runner import ExitCode, RingingExecutor, StopSignals, run_service
from infra.wakeup import Wakeup
from schemas.errors import ConfigError, DriftlogError, EnvironmentMissing, Fenced, IllegalState
from tests.fakes.virtual_clock import VirtualClock

ROOT = Path(__file__).resolve().parents[3]


class RecordingWakeup(Wakeup):
    """Notes the limits it was asked to wait for, and never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[float] = []

    def wait(self, limit_s: float) -> bool:
        self.limits.append(limit_s)
        return False


class Scripted:
    """Works, idles or raises as told; finished when the script is over."""

    def __init__(self, *script: bool | Exception, on_step: Callable[[], None] = lambda: None) -> None:
        self.script = list(script)
        self.steps = 0
        self.closed = 0
        self.on_step = on_step

    @property
    def finished(self) -> bool:
        return not self.script

    def step(self) -> bool:
        self.steps += 1
        self.on_step()
        outcome = self.script.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        self.closed += 1


class Draining(Scripted):
    """Needs `left` more steps once it is asked to stop."""

    def __init__(self, left: int, on_step: Callable[[], None] = lambda: None) -> None:
        super().__init__(*([False] * 1000), on_step=on_step)
        self.left = left
        self.reason = ""

    def request_stop(self, reason: str) -> None:
        self.reason = reason
        self.script = [False] * self.left


def _run(service: Scripted, wakeup: Wakeup | None = None, **changes: object) -> ExitCode:
    settings: dict[str, object] = {
        "wakeup": wakeup or RecordingWakeup(),
        "stop": threading.Event(),
        "idle_wait_s": 0.05,
        "clock": VirtualClock(),
        "say": lambda _: None,
        **changes,
    }
    return run_service(service, **settings)  # type: ignore[arg-type]


def test_a_service_that_finds_nothing_to_do_waits_and_one_that_works_does_not() -> None:
    wakeup = RecordingWakeup()

    code = _run(Scripted(True, False, True, False), wakeup)

    assert code is ExitCode.OK
    assert wakeup.limits == [0.05, 0.05]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), ExitCode.USAGE),
        (EnvironmentMissing("no right to do that"), ExitCode.USAGE),
        (Fenced("a newer one"), ExitCode.FENCED),
        (IllegalState("contradiction"), ExitCode.FAILED),
        (DriftlogError("anything else"), ExitCode.FAILED),
    ],
)
def test_each_error_has_its_exit_code_and_is_said_in_one_line(error: DriftlogError, code: ExitCode) -> None:
    said: list[str] = []
    service = Scripted(error)

    assert _run(service, say=said.append) is code

    assert said == [str(error)]
    assert service.closed == 1


def test_a_defect_passes_through_with_its_traceback_and_the_service_is_closed() -> None:
    service = Scripted(ZeroDivisionError("defect"))

    with pytest.raises(ZeroDivisionError):
        _run(service)

    assert service.closed == 1


def test_a_plain_service_stops_after_its_step() -> None:
    stop = threading.Event()
    service = Scripted(*([True] * 10), on_step=stop.set)

    assert _run(service, stop=stop) is ExitCode.OK

    assert (service.steps, service.closed) == (1, 1)


def test_a_service_that_can_drain_finishes_its_work_first() -> None:
    stop = threading.Event()
    stop.set()
    service = Draining(left=3)

    assert _run(service, stop=stop) is ExitCode.OK

    assert (service.reason, service.steps) == ("stopped by a signal", 3)


def test_draining_ends_at_its_limit() -> None:
    clock, stop = VirtualClock(), threading.Event()
    stop.set()
    service = Draining(left=100, on_step=lambda: clock.advance(1.0))

    said: list[str] = []

    assert _run(service, stop=stop, clock=clock, drain_limit_s=5.0, say=said.append) is ExitCode.FAILED
    assert said == ["stopped before its work was finished; what is not in the log will be done again"]

    assert service.steps == 5


def test_the_second_signal_ends_draining_at_once() -> None:
    signals = StopSignals(RecordingWakeup())
    signals.request()
    service = Draining(left=100, on_step=signals.request)

    assert _run(service, stop=signals.stop, halt=signals.halt) is ExitCode.FAILED

    assert service.steps == 1


def test_signals_reach_the_stop_events() -> None:
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signals = StopSignals(Wakeup())
    try:
        signals.install()
        signal.raise_signal(signal.SIGTERM)
        assert (signals.stop.is_set(), signals.halt.is_set()) == (True, False)
        signal.raise_signal(signal.SIGINT)
        assert signals.halt.is_set()
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        for number, handler in former.items():
            signal.signal(number, handler)


def test_a_signal_asks_a_service_where_it_stands() -> None:
    script = (
        "import signal\nfrom infra.runner import StopSignals\nfrom infra.wakeup import Wakeup\n"
        "def in_the_middle():\n    signal.raise_signal(signal.SIGUSR1)\n"
        "StopSignals(Wakeup()).install()\nin_the_middle()\nprint('goes on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )

    assert "in in_the_middle" in done.stderr
    assert done.stdout == "goes on\n"


def test_a_finished_piece_of_work_rings_the_bell() -> None:
    wakeup = Wakeup()
    with RingingExecutor(1, wakeup) as executor:
        assert executor.submit(lambda: 7).result(timeout=10) == 7
    assert wakeup.wait(10.0)


def test_the_first_line_of_the_life_line_is_what_the_supervisor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "threading", _NoThreads())
    monkeypatch.setattr(sys, "stdin", io.StringIO("127.0.0.1:9092\n"))

    assert runner.watch_parent(StopSignals(Wakeup())) == "127.0.0.1:9092"


def test_a_process_whose_supervisor_is_gone_ends_itself() -> None:
    script = (
        "from infra.runner import StopSignals, watch_parent; from infra.wakeup import Wakeup\n"
        "import threading\n"
        "print(watch_parent(StopSignals(Wakeup()), grace_s=0.0), flush=True)\n"
        "threading.Event().wait(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write("begin\n")
        process.stdin.flush()
        assert process.stdout.readline() == "begin\n"

        process.stdin.close()

        assert process.wait(timeout=30) == ExitCode.FAILED


class _NoThreads:
    """`threading` without threads: the watcher is tested in a process of its own."""

    class Thread:
        def __init__(self, **_: object) -> None: ...
        def start(self) -> None: ...
