"""Runs one service as this process: signals, life line, wiring, exit code. Shared by the service commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from driftlog import options as common
from driftlog.broker_access import running_bootstrap
from driftlog.run_directory import RunDirectory
from driftlog.wiring import Site, site
from infra import logs
from infra.clock import SystemClock
from infra.config import Config
from infra.runner import Assembly, ExitCode, StopSignals, run_service, watch_parent
from infra.wakeup import Wakeup

IDLE_WAIT_S = 0.05
"""Longest sleep of an idle service: bounds how late a time-out is noticed; arrivals ring at once."""


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Options every service command has."""
    common.add_config_options(parser)
    parser.add_argument(
        "--fenced-exit", type=int, default=int(ExitCode.FENCED), metavar="N",
        help="exit code when a newer process took over (default 3; 0 for supervisors that restart on failure)",
    )  # fmt: skip
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
    # Before torch is loaded: its thread pool reads this once.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads(config)))
    logs.configure(options.log_level, options.log_json, service=service, run=config.run.name)
    from infra.kafka_clients import quiet_client_loggers

    quiet_client_loggers()
    signals = StopSignals(Wakeup())
    signals.install()
    prepare(config, run)
    if options.supervised:
        bootstrap = watch_parent(signals)
        if not bootstrap:
            return ExitCode.OK  # the supervisor changed its mind before anything began
    else:
        bootstrap = running_bootstrap(config, run)
    clock = SystemClock()
    assembly = build(site(config, run, bootstrap, signals.wakeup))
    try:
        code = run_service(
            assembly.service,
            wakeup=assembly.wakeup,
            stop=signals.stop,
            halt=signals.halt,
            idle_wait_s=idle_wait_s,
            clock=clock,
            drain_limit_s=config.generator.drain_timeout_s + 5.0,
        )
    finally:
        assembly.close()
    return options.fenced_exit if code is ExitCode.FENCED else code
