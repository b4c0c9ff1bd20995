"""Runs the commands as a user does, and looks at what they leave behind. Every wait has a limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftlog.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LIMIT_S = 150.0
_POLL_S = 0.05

TINY = """
[run]
name = "tiny"
versions = 6
directory = "{directory}"

[task]
group_size = 4

[trainer]
groups_per_step = 4
learning_rate = 1e-3

[generator]
workers = 1

[mlflow]
enabled = false
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A folder with a configuration, where one test's runs lie."""

    folder: Path
    config: Path

    @property
    def runs(self) -> Path:
        """Where the runs lie."""
        return self.folder / "runs"

    def run(self, name: str = "tiny") -> RunDirectory:
        """One of them."""
        return RunDirectory(self.runs, name)

    def summary(self, name: str = "tiny") -> dict[str, Any]:
        """Its summary.json."""
        found: dict[str, Any] = json.loads(self.run(name).summary.read_text())
        return found


def make_site(folder: Path) -> Site:
    """A site of its own, with the tiny configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "tiny.toml"
    config.write_text(TINY.format(directory=folder / "runs"))
    return Site(folder=folder, config=config)


def command(*arguments: str) -> list[str]:
    """The command line under test."""
    return [sys.executable, "-m", "driftlog", *arguments]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """As a user's, with this checkout on the path and no broker named."""
    kept = {name: value for name, value in os.environ.items() if name not in ("DRIFTLOG_KAFKA", "MLFLOW_TRACKING_URI")}
    return {**kept, "PYTHONPATH": str(ROOT), **(extra or {})}


def driftlog(
    *arguments: str, env: Mapping[str, str] | None = None, limit_s: float = COMMAND_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        command(*arguments), env=environment(env), capture_output=True, text=True, timeout=limit_s, check=False
    )


def up(site: Site, *settings: str, name: str = "tiny", options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`driftlog up` to its end."""
    return driftlog(*up_arguments(site, settings, name), *options)


def up_arguments(site: Site, settings: Sequence[str], name: str = "tiny") -> list[str]:
    """Arguments of `driftlog up` on a site."""
    sets = [word for setting in settings for word in ("--set", setting)]
    return ["up", "--config", str(site.config), "--run", name, *sets]


@contextmanager
def going(
    site: Site, *settings: str, name: str = "tiny", options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A `driftlog up` under way; killed with all it started when the test leaves it running."""
    words = site.folder / f"up-{name}.txt"
    with words.open("a") as stream:
        process = subprocess.Popen(
            command(*up_arguments(site, settings, name), *options),
            env=environment(), stdout=stream, stderr=stream, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        wait_until(lambda: not leftovers(site), "everything to end", 30.0)


def is_published(site: Site, version: int, name: str = "tiny") -> bool:
    """The trainer has committed that version."""
    log = site.run(name).logs / "trainer.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return any("version_published" in line and f"policy_version={version} " in line for line in lines)


def wait_for_version(site: Site, version: int, name: str = "tiny", limit_s: float = 90.0) -> None:
    """Until the trainer has committed that version."""
    wait_until(lambda: is_published(site, version, name), f"version {version}", limit_s)


def wait_until(holds: Callable[[], bool], what: str, limit_s: float) -> None:
    """Ask again until it holds; AssertionError after the limit."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"waited {limit_s:g} s for {what}"
        time.sleep(_POLL_S)


def service_pid(site: Site, service: str, name: str = "tiny") -> int:
    """Process id of a service that is going."""
    return int((site.run(name).pids / f"{service}.pid").read_text())


def kill_service(site: Site, service: str, name: str = "tiny") -> int:
    """kill -9; the id it had."""
    pid = service_pid(site, service, name)
    os.kill(pid, signal.SIGKILL)
    return pid


def leftovers(site: Site) -> list[str]:
    """Command lines of processes that still work on this site."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if str(site.folder) in line and str(os.getpid()) != path.parent.name:
            found.append(line)
    return found
