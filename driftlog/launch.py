"""`driftlog up`: one run on this machine from its start to its summary.

Order: check everything that can be wrong, start broker and processes, make topics, let the services begin,
keep them alive, wait until the run has ended, evaluate, audit, sum up. Nothing is left running after any exit.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from driftlog.branches import branch_arguments, plan_branch
from driftlog.broker_access import external_bootstrap, kafka_settings
from driftlog.finish import report, sum_up
from driftlog.log_tail import LogTail
from driftlog.observing import metrics_address
from driftlog.policies import check_initial_policy, check_learning
from driftlog.processes import Child, Processes, Program, is_alive
from driftlog.programs import BESIDE, EVALUATOR, PROJECTOR, TRAINER, metrics_words, programs
from driftlog.run_directory import RunDirectory
from driftlog.supervision import RestartRules, Verdict, after_exit
from driftlog.task_wiring import with_checked_task
from driftlog.view import View
from driftlog.view_state import RunState
from infra import logs
from infra.config import Config
from infra.logs import event
from infra.runner import ExitCode
from schemas.errors import DriftlogError, EnvironmentMissing, LogUnavailable, UsageError
from schemas.ids import RunId

if TYPE_CHECKING:
    from consumers.trainer.branching import BranchWish
    from infra.local_broker import BrokerHandle

log = logging.getLogger(__name__)

TICK_S = 0.1
ENDING_S = 15.0
"""services read RunEnded and leave within milliseconds; the tracker may be slow"""
PROJECTOR_S = 60.0
TOLD_TO_STOP_S = 10.0
BROKER_CHECK_S = 1.0
UNSEEN_END_S = 10.0
"""a trainer that is done without RunEnded in the log was stopped by somebody"""


class RunFailed(DriftlogError):
    """The run cannot go on; exit 1."""


class RunFailedForGood(EnvironmentMissing):
    """A service says that its configuration or environment is wrong; exit 2."""


@dataclass(slots=True)
class Interrupts:
    """SIGINT, SIGTERM and SIGHUP, in order of arrival."""

    seen: list[int] = field(default_factory=list)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Note signals instead of dying from them."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        former = {number: signal.signal(number, lambda number, _: self.seen.append(number)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def launch(
    config: Config, run: RunDirectory, *, accept_changes: bool, as_json: bool, from_version: int | None = None
) -> int:
    """Run it and sum it up; the exit code of `driftlog up`. `from_version`: go on from there, as another branch."""
    if from_version is not None and run.stored_config() is None:
        raise UsageError(f"--from-version {from_version}: there is no run {run.name!r} in {run.path.parent} yet")
    check_initial_policy(config)
    check_learning(config)
    config = with_checked_task(config)
    external = external_bootstrap(config)
    interrupts = Interrupts()
    with ExitStack() as stack:
        stack.enter_context(run.held())
        stack.enter_context(interrupts.caught())
        resuming = run.stored_config() is not None
        changes = run.adopt(config, accept_changes=accept_changes)
        run.logs.mkdir(parents=True, exist_ok=True)
        stream = stack.enter_context((run.logs / "up.log").open("a", encoding="utf-8"))
        logs.configure(stream=stream, service="up", run=run.name)
        for change in changes:
            event(log, "setting_changed", change=change)
        view = stack.enter_context(View(run.name, config.run.versions, config.view.refresh_s, alarms=config.alarms))
        processes = Processes(run)
        stack.callback(processes.kill)
        launched = _Launch(
            config, run, processes, view, interrupts, external, resuming=resuming, from_version=from_version
        )
        stack.callback(launched.close)
        if not resuming:
            stack.callback(launched.forget_unbegun)
        if launched.carry_out():
            summary = sum_up(config, run, launched.bootstrap, view.say, interrupts.seen)
            launched.await_projector()
            return report(summary, run, view.say, as_json=as_json)
        if not resuming and launched.forget_unbegun():
            view.say("stopped before the run began")
        else:
            view.say(f"stopped; resume it with: driftlog up --config {run.config_files()[-1]}")
        return ExitCode.OK if len(interrupts.seen) < 2 else ExitCode.FAILED


class _Launch:
    """One launch, step by step."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        processes: Processes,
        view: View,
        interrupts: Interrupts,
        external: str | None,
        *,
        resuming: bool,
        from_version: int | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._processes = processes
        self._view = view
        self._interrupts = interrupts
        self._external = external
        self._resuming = resuming
        self._from_version = from_version
        self._branch: BranchWish | None = None
        self._tail: LogTail | None = None
        self._trainer_done_at_s: float | None = None
        self._extending = False
        self._broker: BrokerHandle | None = None
        self._broker_checked_s = 0.0
        self._broker_deaths_s: list[float] = []
        self.state = RunState(RunId(run.name))
        self.bootstrap = ""

    def carry_out(self) -> bool:
        """True when the run has ended; False when it was interrupted. RunFailed and UsageError otherwise."""
        if not self._resuming:
            self._start_processes()  # they load their libraries while the broker starts
        self._start_broker()
        self._make_topics()
        self._tail = LogTail(kafka_settings(self._config, self.bootstrap), RunId(self._run.name))
        self._tail.read_to_end(self.state)
        if self._from_version is not None:
            # Asked for once, here: a trainer that is started again gets the same wish, and finds it granted.
            self._branch, words = plan_branch(self.state.fold, self._from_version, self._config.run.versions)
            self._view.say(words)
        if self._branch is None and self._is_complete():
            self._view.say(f"run {self._run.name} has its {self._config.run.versions} versions already")
            return True
        self._extending = self.state.fold.ended
        if self._resuming:
            self._start_processes()
        while not self._interrupts.seen:
            self._keep_broker()
            self._release()
            self._tail.read(self.state)
            self._attend()
            self._view.update(self.state, time.monotonic(), self._doing())
            if self._has_ended():
                self._wind_down()
                return True
            time.sleep(TICK_S)
        self._stop()
        return False

    def forget_unbegun(self) -> bool:
        """A launch that ended before anything was committed leaves no run behind that a second try would resume."""
        self._processes.kill()
        try:
            if self._tail is not None:
                self._tail.read_to_end(self.state, limit_s=5.0)
        except LogUnavailable:
            return False  # nobody knows: keep what is stored
        unbegun = self.state.fold.segment is None
        for path in self._run.config_files() if unbegun else ():
            path.unlink()
        return unbegun

    def close(self) -> None:
        """Release the reader, end the broker. Processes are ended by their owner before."""
        self._processes.kill()
        if self._tail is not None:
            self._tail.close()
        if self._broker is not None:
            from infra import local_broker

            local_broker.stop(self._run.broker)

    # ------------------------------------------------------------ start

    def _start_processes(self) -> None:
        for program in self._programs():
            self._processes.start(program)

    def _is_complete(self) -> bool:
        fold = self.state.fold
        if not fold.ended or fold.newest is None:
            return False
        return fold.versions[fold.newest].depth >= self._config.run.versions

    def _programs(self) -> list[Program]:
        branch = () if self._branch is None else branch_arguments(self._branch)
        host, port = metrics_address(self._config)
        found = programs(self._config, str(self._run.config_files()[-1]), branch, metrics_port=port)
        if port:
            self._view.say(metrics_words(found, host))
        return found

    def _start_broker(self) -> None:
        if self._external is not None:
            self.bootstrap = self._external
            return
        from infra import local_broker

        found = local_broker.status(self._run.broker)
        if found is not None:  # `driftlog broker start` began it: it is not ours to stop
            self.bootstrap = found.bootstrap_servers
            return
        self._view.say("starting the broker ...")
        self._broker = self._new_broker(self._config.kafka.port)
        self.bootstrap = self._broker.bootstrap_servers

    def _new_broker(self, port: int | None) -> BrokerHandle:
        from infra import local_broker

        jars = local_broker.ensure_jars(local_broker.default_cache_dir())
        handle = local_broker.start(self._run.broker, jars=jars, port=port, die_with_parent=True)
        event(log, "broker_started", bootstrap=handle.bootstrap_servers, pid=handle.pid)
        return handle

    def _keep_broker(self) -> None:
        """Start the embedded broker again when its process is gone, at the address the services know."""
        now_s = time.monotonic()
        if self._broker is None or now_s - self._broker_checked_s < BROKER_CHECK_S:
            return
        self._broker_checked_s = now_s
        if is_alive(self._broker.pid):
            return
        recent = [death_s for death_s in self._broker_deaths_s if death_s > now_s - RestartRules().window_s]
        if len(recent) >= RestartRules().restarts:
            raise RunFailed(f"the broker died {len(recent)} times in a while: see {self._run.broker / 'server.log'}")
        self._broker_deaths_s.append(now_s)
        self._view.say("the broker died: starting it again ...")
        self._broker = self._new_broker(self._broker.port)

    def _make_topics(self) -> None:
        from infra.kafka_admin import KafkaLogAdmin

        try:
            admin = KafkaLogAdmin(kafka_settings(self._config, self.bootstrap))
            try:
                admin.create_topics(self._run.name)
            finally:
                admin.close()
        except LogUnavailable as error:
            raise EnvironmentMissing(str(error)) from error  # nothing has begun: the user's to put right

    def _release(self) -> None:
        """Let prepared services begin. When a run is extended the others wait until the trainer has opened it again:
        they would read the old RunEnded and leave."""
        for name in self._processes.running():
            if name == TRAINER or not (self._extending and self.state.fold.ended):
                self._processes.release(name, self.bootstrap)

    # ------------------------------------------------------------ while it runs

    def _attend(self) -> None:
        """Judge processes that ended, start again those whose time has come."""
        now_s = time.monotonic()
        for child in self._processes.ended():
            self._judge(child, now_s)
        for child in self._processes.children.values():
            if child.restart_at_s is not None and child.restart_at_s <= now_s:
                event(log, "restart", service=child.program.name, deaths=len(child.deaths_s))
                self._processes.start(child.program)

    def _judge(self, child: Child, now_s: float) -> None:
        name, code = child.program.name, child.exit_code
        assert code is not None
        decision = after_exit(code, child.deaths_s, now_s, RestartRules())
        event(log, "service_ended", service=name, code=code, verdict=decision.verdict)
        if name == TRAINER and decision.verdict is Verdict.DONE:
            self._trainer_done_at_s = now_s
            return
        if decision.verdict is Verdict.DONE:
            return
        if decision.verdict is Verdict.USAGE and name != EVALUATOR:
            raise RunFailedForGood(self._processes.last_words(name))
        if decision.verdict is Verdict.FENCED and name != EVALUATOR:
            raise RunFailed(f"another {name} took over this run: {self._processes.last_words(name)}")
        if self.state.fold.ended and self._trainer_done_at_s is not None:
            return  # it had nothing more to do
        child.deaths_s.append(now_s)
        if decision.verdict is Verdict.RESTART:
            self._view.say(f"{name} ended (code {code}): starting it again. {self._processes.last_words(name)}")
            child.restart_at_s = now_s + decision.wait_s
        elif name in BESIDE:
            self._view.say(f"{name} gave up; training goes on. {self._processes.last_words(name)}")
        else:
            raise RunFailed(
                f"{name} died {len(child.deaths_s)} times in 10 minutes: {self._processes.last_words(name)} "
                f"(see {self._run.logs / name}.log)"
            )

    def _has_ended(self) -> bool:
        if self._trainer_done_at_s is None:
            return False
        if self.state.fold.ended and self.state.ledger_ended:
            return True
        if time.monotonic() - self._trainer_done_at_s > UNSEEN_END_S:
            raise RunFailed(f"the trainer ended without RunEnded in the log (see {self._run.logs / 'trainer.log'})")
        return False

    def _doing(self) -> dict[str, str]:
        words = {}
        for name, child in self._processes.children.items():
            restarts = f" ({len(child.deaths_s)} restarts)" if child.deaths_s else ""
            words[name] = ("up" if child.released else "starting") if child.running else "ended"
            words[name] += restarts
        return words

    # ------------------------------------------------------------ ends

    def _wind_down(self) -> None:
        """RunEnded is in the log: everybody leaves by himself, or is made to."""
        self._view.update(self.state, time.monotonic(), self._doing(), force=True)
        for child in self._processes.children.values():
            child.restart_at_s = None
        waiting = [name for name in self._processes.running() if name not in BESIDE]
        self._processes.wait(waiting, ENDING_S, self._interrupts.seen)
        self._end(waiting)
        self._linger(EVALUATOR, "waiting for the evaluator ...", self._config.evaluation.end_limit_s + ENDING_S)

    def _stop(self) -> None:
        """Interrupted: generators drain, the trainer ends after its transaction. A second signal: at once."""
        self._view.say("stopping: generators drain, the trainer finishes its step (Ctrl-C again: at once)")
        event(log, "interrupted")
        del self._interrupts.seen[1:]
        first = self._interrupts.seen.pop()
        generators = [name for name in self._processes.running() if name.startswith("generator")]
        others = [name for name in self._processes.running() if name not in generators]
        for name in list(self._processes.running()):
            if not self._processes.children[name].released:
                self._processes.signal([name], signal.SIGKILL)  # it has not begun: nothing to put in order
        self._processes.signal([*generators, TRAINER], signal.SIGTERM)
        self._processes.wait(
            [*generators, TRAINER], self._config.generator.drain_timeout_s + TOLD_TO_STOP_S, self._interrupts.seen
        )
        self._processes.signal([name for name in others if name != TRAINER], signal.SIGTERM)
        self._processes.wait(others, TOLD_TO_STOP_S, self._interrupts.seen)
        self._interrupts.seen.insert(0, first)
        self._processes.kill()

    def await_projector(self) -> None:
        """It may lie behind; what it has not shown when its time is up, the next start shows."""
        self._linger(PROJECTOR, "waiting for MLflow to catch up ...", PROJECTOR_S)

    def _linger(self, name: str, words: str, limit_s: float) -> None:
        if name in self._processes.running():
            self._view.say(words)
            self._processes.wait([name], limit_s, self._interrupts.seen)
            self._end([name])

    def _end(self, names: list[str]) -> None:
        left = [name for name in names if name in self._processes.running()]
        if left:
            event(log, "told_to_stop", services=",".join(left))
            self._processes.signal(left, signal.SIGTERM)
            self._processes.wait(left, TOLD_TO_STOP_S)
            self._processes.signal(left, signal.SIGKILL)
            self._processes.wait(left, TOLD_TO_STOP_S)
