"""The service processes of one run: starts them, hands them their life line, ends them in bounded time.

Guarantees: none outlives this process (their stdin ends with it, and they end themselves); each has a pid
file and a log file; nothing here decides whether a dead one comes back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from driftlog.run_directory import RunDirectory

_PACKAGES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How one service is started."""

    name: str
    arguments: tuple[str, ...]
    """of `driftlog`"""
    threads: int = 1
    niceness: int = 0


@dataclass(slots=True)
class Child:
    """One service: its process now, and when it died before."""

    program: Program
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    """of the last process; None while one runs"""
    deaths_s: list[float] = field(default_factory=list)
    restart_at_s: float | None = None
    released: bool = False
    """it was told to begin"""

    @property
    def running(self) -> bool:
        """A process is there."""
        return self.process is not None


class Processes:
    """All services of a run, by name."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.children: dict[str, Child] = {}

    def start(self, program: Program) -> Child:
        """Start it (again); it prepares itself and waits for `release`."""
        child = self.children.setdefault(program.name, Child(program))
        self._run.logs.mkdir(parents=True, exist_ok=True)
        self._run.pids.mkdir(parents=True, exist_ok=True)
        with (self._run.logs / f"{program.name}.log").open("ab") as log:
            child.process = subprocess.Popen(
                driftlog_command(*program.arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=child_environment({"OMP_NUM_THREADS": str(program.threads)}),
                # A session of its own: Ctrl-C in the terminal reaches only us, and we say who ends in which order.
                start_new_session=True,
            )
        if program.niceness:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.process.pid, program.niceness)
        child.exit_code, child.restart_at_s, child.released = None, None, False
        self._pid_file(program.name).write_text(f"{child.process.pid}\n", encoding="ascii")
        return child

    def release(self, name: str, bootstrap: str) -> None:
        """Tell a prepared service where the broker is: it begins."""
        child = self.children[name]
        if child.process is None or child.released:
            return
        assert child.process.stdin is not None
        child.released = True
        with contextlib.suppress(BrokenPipeError):  # it died meanwhile: `ended` tells
            child.process.stdin.write(f"{bootstrap}\n".encode())
            child.process.stdin.flush()

    def ended(self) -> list[Child]:
        """Services whose process ended since the last call."""
        found = []
        for child in self.children.values():
            if child.process is not None and child.process.poll() is not None:
                self._reap(child)
                found.append(child)
        return found

    def running(self) -> list[str]:
        """Names of the services that have a process."""
        return [name for name, child in self.children.items() if child.running]

    def signal(self, names: Iterable[str], number: signal.Signals) -> None:
        """Send a signal to those that run."""
        for name in names:
            process = self.children[name].process
            if process is not None:
                process.send_signal(number)

    def wait(self, names: Iterable[str], limit_s: float, interrupted: Sequence[object] = ()) -> bool:
        """Wait until none of them runs; False after limit_s, or as soon as `interrupted` is no longer empty."""
        deadline_s = time.monotonic() + limit_s
        wanted = list(names)
        while time.monotonic() < deadline_s and not interrupted:
            self.ended()
            if not any(self.children[name].running for name in wanted):
                return True
            time.sleep(0.02)
        return not any(self.children[name].running for name in wanted)

    def kill(self) -> None:
        """End every process at once."""
        self.signal(self.running(), signal.SIGKILL)
        self.wait(self.running(), 10.0)

    def last_words(self, name: str) -> str:
        """The last message of a service for a person, or its last line of log."""
        try:
            lines = (self._run.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "it logged nothing"
        said = [line.removeprefix("driftlog: ") for line in lines[-50:] if line.startswith("driftlog: ")]
        return said[-1] if said else (lines[-1] if lines else "it logged nothing")

    def _reap(self, child: Child) -> None:
        assert child.process is not None
        child.exit_code = child.process.returncode
        if child.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.process.stdin.close()
        child.process = None
        self._pid_file(child.program.name).unlink(missing_ok=True)

    def _pid_file(self, name: str) -> Path:
        return self._run.pids / f"{name}.pid"


def driftlog_command(*arguments: str) -> list[str]:
    """This project's command line under this interpreter, whatever lies in the working directory."""
    return [sys.executable, "-P", "-m", "driftlog", *arguments]


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: our packages first, so that it runs the code that runs here."""
    path = os.pathsep.join(part for part in (str(_PACKAGES), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "PYTHONPATH": path, **extra}


def end_leftovers(run: RunDirectory, *, patience_s: float) -> list[str]:
    """End processes of a run that its pid files name and that are still its services; their names."""
    ended = []
    for path in sorted(run.pids.glob("*.pid")):
        text = path.read_text(encoding="ascii").strip()
        if text.isdecimal() and _is_service_of(int(text), run):
            _end(int(text), patience_s)
            ended.append(path.stem)
        path.unlink(missing_ok=True)
    return ended


def _is_service_of(pid: int, run: RunDirectory) -> bool:
    """A pid may have been given to another process meanwhile: never end that one."""
    words = _command_line(pid)
    return "driftlog" in words and any(word.startswith(str(run.path)) for word in words)


def _command_line(pid: int) -> list[str]:
    proc = Path(f"/proc/{pid}/cmdline")
    if proc.parent.parent.joinpath("self").exists():
        try:
            return [word for word in proc.read_bytes().decode("utf-8", "replace").split("\0") if word]
        except OSError:
            return []
    listed = subprocess.run(
        ["ps", "-o", "command=", "-p", str(pid)], check=False, capture_output=True, text=True, timeout=10
    )
    return listed.stdout.split()


def is_alive(pid: int) -> bool:
    """A process with that id is there, and is more than its exit code."""
    return bool(_command_line(pid))


def _end(pid: int, patience_s: float) -> None:
    for number, limit_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if not is_alive(pid):
                return
            time.sleep(0.05)
