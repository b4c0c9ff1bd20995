"""Runs one service as this process: signals, life line, wiring, exit code. Shared by the service commands."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path

from driftlog import options as common
from driftlog.broker_access import kafka_settings, running_bootstrap
from driftlog.joining import join
from driftlog.life_sign import LifeSign
from driftlog.observing import observe
from driftlog.run_directory import RunDirectory
from driftlog.wiring import Site, site
from infra import logs
from infra.clock import SystemClock
from infra.config import Config
from infra.runner import Assembly, ExitCode, StopSignals, run_service, watch_parent
from infra.wakeup import Wakeup

IDLE_WAIT_S = 0.1
"""Longest sleep of an idle service: bounds how late a time-out is noticed; arrivals ring at once."""
GC_THRESHOLD = 20_000
"""objects made before the collector looks at them (Python's own: 700): hundreds of rows pass through a step, none of
them in a cycle, and each look stops the compute"""
WAIT_S = 60.0
"""how long a service that starts before its broker waits for it"""
DRAIN_MARGIN_S = 5.0
CLOSE_LIMIT_S = 25.0
"""readers and writers are let go of: each in 10 s at most, side effects of an outage included"""


def drain_limit_s(config: Config) -> float:
    """How long a service that was told to stop may go on with what it has in hand."""
    return config.generator.drain_timeout_s + DRAIN_MARGIN_S


def longest_stop_s(config: Config) -> float:
    """From SIGTERM to the end of any service, a step under way not counted: what a supervisor has to wait for."""
    return drain_limit_s(config) + CLOSE_LIMIT_S


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Options every service command has."""
    common.add_config_options(parser)
    parser.add_argument(
        "--fenced-exit", type=int, default=int(ExitCode.FENCED), metavar="N",
        help="exit code when a newer process took over (default 3; 0 for supervisors that restart on failure)",
    )  # fmt: skip
    parser.add_argument(
        "--life-sign", type=Path, metavar="FILE", help="touched while the service runs: for health checks"
    )
    parser.add_argument(
        "--wait-s", type=float, default=WAIT_S, metavar="S", help=f"how long to wait for broker and topics ({WAIT_S:g})"
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="answer /metrics and /healthz there; 0: nowhere (metrics.port)"
    )
    parser.add_argument("--log-json", action="store_true", help="log lines as JSON")
    parser.add_argument("--log-level", default="INFO", metavar="LEVEL")
    # `driftlog up` alone: stdin is a life line; its first line names the broker when everything is ready.
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)


def serve(
    options: argparse.Namespace,
    service: str,
    *,
    threads: Callable[[Config], int],
    prepare: Callable[[Config, RunDirectory], object],
    build: Callable[[Site], Assembly],
    idle_wait_s: float = IDLE_WAIT_S,
) -> int:
    """Run until finished or stopped. `prepare` does what needs no broker (imports, mostly) while it starts."""
    config, run = common.config_of(options)
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    # Before torch is loaded: its thread pool reads this once.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads(config)))
    logs.configure(options.log_level, options.log_json, service=service, run=config.run.name)
    from infra.kafka_clients import quiet_client_loggers

    quiet_client_loggers()
    signals = StopSignals(Wakeup())
    signals.install()
    life_sign = LifeSign(options.life_sign)
    clock = SystemClock()
    observing = observe(config, service, options.metrics_port)
    try:
        prepare(config, run)
        bootstrap = _bootstrap(options, service, config, run, signals, clock)
        if bootstrap is None:
            return ExitCode.OK
        assembly = build(site(config, run, bootstrap, signals.wakeup, observing))
        beat: Callable[[float], None] = life_sign.beat
        if observing is not None:
            observing.begin(kafka_settings(config, bootstrap), assembly.service)
            beat = _both(life_sign.beat, observing.beat)
        try:
            code = run_service(
                assembly.service,
                wakeup=assembly.wakeup,
                stop=signals.stop,
                halt=signals.halt,
                idle_wait_s=idle_wait_s,
                clock=clock,
                drain_limit_s=drain_limit_s(config),
                beat=beat,
            )
        finally:
            assembly.close()
    finally:
        if observing is not None:
            observing.close()
    return options.fenced_exit if code is ExitCode.FENCED else code


def _bootstrap(
    options: argparse.Namespace,
    service: str,
    config: Config,
    run: RunDirectory,
    signals: StopSignals,
    clock: SystemClock,
) -> str | None:
    """Where the broker is, once there is one with the topics of the run; None: stopped before that."""
    if options.supervised:
        return watch_parent(signals) or None  # "": the supervisor changed its mind before anything began
    bootstrap = running_bootstrap(config, run)
    joined = join(
        config,
        bootstrap,
        limit_s=options.wait_s,
        reopened=service != "trainer",
        clock=clock,
        pause=signals.stop.wait,
    )
    return bootstrap if joined else None


def _both(first: Callable[[float], None], second: Callable[[float], None]) -> Callable[[float], None]:
    def beat(now_s: float) -> None:
        first(now_s)
        second(now_s)

    return beat
