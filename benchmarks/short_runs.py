"""Real runs for measurements: one broker, `driftlog up` as a process of its own, and what the log says afterwards.

Services, Kafka and processes are the real ones; MLflow is off unless a run asks for it, and the initial policy is made
once, outside what is timed. Every wait has a limit, and nothing that was started is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_switching import quantile
from consumers.offline.run_log import RunLog
from driftlog.run_directory import RunDirectory
from driftlog.run_reading import opened
from infra import local_broker
from infra.model_presets import warm_start
from schemas import policy_events as ev
from schemas.ledger import StepCompleted

RUN_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the runs of one measurement lie, and their broker ("" when each starts its own)."""

    folder: Path
    bootstrap: str

    @property
    def warm(self) -> Path:
        """The demo's initial policy."""
        return self.folder / "warm"

    def command(self, name: str, sets: Sequence[str]) -> list[str]:
        """`driftlog up` of the demo with these settings."""
        common = (f'run.directory="{self.folder / "runs"}"', "mlflow.enabled=false")
        words = [word for setting in (*common, *sets) for word in ("--set", setting)]
        return [sys.executable, "-m", "driftlog", "up", "--config", "configs/countdown.toml", "--run", name, *words]

    def environment(self) -> dict[str, str]:
        """Of every process."""
        named = {"DRIFTLOG_KAFKA": self.bootstrap} if self.bootstrap else {}
        return {**os.environ, "OMP_NUM_THREADS": "1", **named}

    def directory(self, name: str) -> RunDirectory:
        """Of a run."""
        return RunDirectory(self.folder / "runs", name)

    def log(self, name: str) -> RunLog:
        """Of a run of the shared broker, as it stands now."""
        run = self.directory(name)
        config = run.stored_config()
        assert config is not None, "up stores it before anything else"
        return opened(config, run, self.bootstrap).log()

    def run(self, name: str, sets: Sequence[str], limit_s: float = RUN_LIMIT_S) -> float:
        """A whole run; the seconds it took."""
        begun_s = time.monotonic()
        with self.started(name, sets) as up:
            self.end(up, name, limit_s)
        return time.monotonic() - begun_s

    @contextmanager
    def started(self, name: str, sets: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """A run that goes on meanwhile, and is stopped at the end."""
        with (self.folder / f"{name}.log").open("wb") as told:
            up = subprocess.Popen(self.command(name, sets), env=self.environment(), stdout=told, stderr=told)
        try:
            yield up
        finally:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
                if up.poll() is None:
                    up.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        up.wait(STOP_LIMIT_S / 2)

    def end(self, up: subprocess.Popen[bytes], name: str, limit_s: float) -> None:
        """Wait for a good end."""
        try:
            code: int | str = up.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"no end within {limit_s:.0f} s"
        if code != 0:
            told = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"run {name} ended with {code}:\n{told[-3000:]}")

    def until_live(self, up: subprocess.Popen[bytes], name: str, version: int, limit_s: float) -> None:
        """Wait until a version of a run that goes on is live."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if up.poll() is not None:
                self.end(up, name, 1.0)
                return
            if self.directory(name).stored_config() is not None and self._is_live(name, version):
                return
            time.sleep(_POLL_S)
        raise SystemExit(f"version {version} of run {name} was not live within {limit_s:.0f} s")

    def _is_live(self, name: str, version: int) -> bool:
        from schemas.errors import DriftlogError

        try:
            events = policy_of(self.log(name))
        except DriftlogError:
            return False  # the topics are not there yet
        return any(isinstance(event, ev.VersionActivated) and event.version >= version for event in events)


@contextmanager
def stage(prefix: str, *, broker: bool = True) -> Iterator[Stage]:
    """A folder, the demo's initial policy, and a broker unless each run is to start its own."""
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        warm_start("countdown-tiny", 0, folder / "warm")
        if not broker:
            yield Stage(folder=folder, bootstrap="")
            return
        jars = local_broker.ensure_jars(local_broker.default_cache_dir())
        handle = local_broker.start(folder / "broker", jars=jars, die_with_parent=True)
        try:
            yield Stage(folder=folder, bootstrap=handle.bootstrap_servers)
        finally:
            local_broker.stop(folder / "broker")


def policy_of(log: RunLog) -> list[ev.AnyPolicyEvent]:
    """The legal events, in order."""
    return [entry.event for entry in log.policy() if entry.is_legal and entry.event is not None]


def steps_of(log: RunLog) -> list[StepCompleted]:
    """The training steps, in order."""
    return [one.control for one in log.transactions() if isinstance(one.control, StepCompleted)]


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95 % of them, in milliseconds."""
    return {"p50_ms": round(1e3 * quantile(seconds, 0.5), 2), "p95_ms": round(1e3 * quantile(seconds, 0.95), 2)}


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Field by field, over rounds; a field that some lack is over those that have it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: round(statistics.median(row[name] for row in rows if name in row), 3) for name in names}


def tell(result: dict[str, Any]) -> None:
    """The last line."""
    print("RESULT " + json.dumps(result))
