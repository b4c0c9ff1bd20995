"""One run of the stack under way: its processes, its log, its store. Freezes, kills, and tells where it stood.

Every wait has a limit and fails when the run ends before it should.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from driftlog.broker_access import kafka_settings
from infra import local_broker
from schemas.errors import LogUnavailable
from schemas.ids import RunId
from tests.e2e.chaos_hits import Hit, incarnations, recovered_at_s, worker_of
from tests.e2e.chaos_plan import BROKER, COORDINATOR, GENERATORS, PROJECTOR, TRAINER, Fault, Phase
from tests.e2e.chaos_watch import LogWatch, Standing, StoreView
from tests.e2e.driving import Site, service_pid, wait_until

TURN_S = 0.01
BEGIN_LIMIT_S = 300.0
RECOVERY_LIMIT_S = 180.0
Say = Callable[[str], None]


class Stage:
    """Made when `driftlog up` was just started; usable after `begin`."""

    def __init__(self, site: Site, name: str, process: subprocess.Popen[str], say: Say) -> None:
        self.site = site
        self.run = site.run(name)
        self.hits: list[Hit] = []
        self.say = say
        self._process = process
        self._trainer_pid = 0
        self._trainer_mark = 0
        self.watch: LogWatch
        self.store: StoreView

    def begin(self) -> None:
        """Wait until the trainer has opened the run."""
        self._until(lambda: "run_started" in self.words(TRAINER), "the run to begin", BEGIN_LIMIT_S)
        config, handle = self.run.stored_config(), local_broker.status(self.run.broker)
        assert config is not None and handle is not None
        self.watch = LogWatch(kafka_settings(config, handle.bootstrap_servers), RunId(self.run.name))
        self.store = StoreView(Path(self.run.checkpoints(config)) / self.run.name)
        self._trainer_pid = self.pid(TRAINER) or 0

    def close(self) -> None:
        """Stop reading."""
        if hasattr(self, "watch"):
            self.watch.close()

    # ------------------------------------------------------------ waiting

    def turn(self) -> None:
        """Read what is there, note what has recovered."""
        assert self._process.poll() is None, f"the run ended (exit {self._process.returncode}) before its faults did"
        self.watch.pump()
        pid = self.pid(TRAINER)
        if pid is not None and pid != self._trainer_pid:
            self._trainer_pid, self._trainer_mark = pid, len(self.words(TRAINER))
        for hit in self.hits:
            if hit.recovered_s is None:
                self._note_recovery(hit)

    def until(self, holds: Callable[[], bool], what: str, limit_s: float) -> None:
        """Turn until it holds; AssertionError after limit_s."""

        def turned() -> bool:
            self.turn()
            return holds()

        self._until(turned, what, limit_s)

    def for_versions(self, count: int, limit_s: float = 120.0) -> None:
        """Until that many more versions are committed."""
        wanted = self.watch.view.version + count
        self.until(lambda: self.watch.view.version >= wanted, f"version {wanted}", limit_s)

    def all_recovered(self) -> None:
        """Until every service that was hit is at its normal work again."""
        self.until(lambda: all(hit.recovered_s is not None for hit in self.hits), "recovery", RECOVERY_LIMIT_S)

    def _until(self, holds: Callable[[], bool], what: str, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not holds():
            assert self._process.poll() is None, f"the run ended (exit {self._process.returncode}) instead of {what}"
            assert time.monotonic() < deadline_s, f"waited {limit_s:g} s for {what}"
            time.sleep(TURN_S)

    def _note_recovery(self, hit: Hit) -> None:
        service = hit.fault.service

        def new_words() -> str:
            return self.words(service)[hit.log_mark :]

        hit.recovered_s = recovered_at_s(hit, self.watch.view, new_words, time.monotonic())
        if hit.recovered_s is not None:
            self.say(f"  {service} at its normal work again after {hit.recovered_s - hit.at_s:.1f} s")

    # ------------------------------------------------------------ processes

    def words(self, service: str) -> str:
        """A service's log."""
        path = self.run.logs / f"{service}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def pid(self, service: str) -> int | None:
        """Of the process that is there now."""
        if service == BROKER:
            handle = local_broker.status(self.run.broker)
            return None if handle is None else handle.pid
        try:
            return service_pid(self.site, service, self.run.name)
        except (FileNotFoundError, ValueError):
            return None

    def tell_stacks(self) -> None:
        """Let every service of ours that is there write its stacks into its log."""
        for service in (TRAINER, *GENERATORS, COORDINATOR, PROJECTOR):
            if (pid := self.pid(service)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)

    def kill(self, service: str) -> None:
        """kill -9, and wait until it is gone."""
        pid = self.pid(service)
        assert pid is not None, f"{service} is not there to be killed"
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _state(pid) in ("", "Z"), f"{service} to die", 5.0)

    def stop(self, service: str) -> int:
        """SIGSTOP, and wait until every thread of it stands still; the process id."""
        pid = self.pid(service)
        assert pid is not None, f"{service} is not there to be stopped"
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: _state(pid) == "T", f"{service} to stand still", 5.0)
        return pid

    @contextmanager
    def frozen_trainer(self) -> Iterator[Phase]:
        """Stand it still for a moment, to read where it is; a trainer that is not there is recovering."""
        if self.pid(TRAINER) is None:
            yield Phase.RECOVERING
            return
        try:
            pid = self.stop(TRAINER)
        except (AssertionError, ProcessLookupError):
            yield Phase.RECOVERING
            return
        try:
            yield self.standing().phase
        finally:
            os.kill(pid, signal.SIGCONT)

    def standing(self) -> Standing:
        """Where a trainer that stands still is, by log and store."""
        try:
            self.watch.catch_up()
        except LogUnavailable as error:
            raise AssertionError(f"the log cannot be read: {error}") from error
        self.turn()
        view = self.watch.view
        new_words = self.words(TRAINER)[self._trainer_mark :]
        made_us = -1 if view.newest is None else view.newest.at_us
        return Standing(
            has_begun=" resumed " in new_words or " run_started " in new_words,
            is_saving=bool(self.store.staging()),
            has_unnamed_checkpoint=bool(self.store.unnamed(view.attempts, made_us)),
            next_batch_is_in=view.next_batch_is_in(),
        )

    # ------------------------------------------------------------ noting a hit

    def hit(self, fault: Fault, phase: Phase, evidence: str) -> Hit:
        """Note that a fault has hit just now, and what the log held at that instant."""
        view, service = self.watch.view, fault.service
        worker = worker_of(service)
        made_us = -1 if view.newest is None else view.newest.at_us
        found = Hit(
            fault=fault,
            at_s=time.monotonic(),
            at_us=time.time_ns() // 1_000,
            phase=phase,
            version=view.version,
            evidence=evidence,
            log_mark=len(self.words(service)),
            attempts=frozenset(self.store.unnamed(view.attempts, made_us)),
            groups_in_log=frozenset(view.groups),
            records_in_log=len(view.records),
            incarnations=incarnations(view, worker) if service in GENERATORS else frozenset(),
        )
        self.hits.append(found)
        self.say(f"  {fault.what} {service} at version {found.version}, trainer {phase}: {evidence}")
        return found


def _state(pid: int) -> str:
    """One letter of /proc, "" when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]
