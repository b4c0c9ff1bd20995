"""driftlog prepare: everything a run needs before its services start one by one: checks, topics, the stored
configuration, the initial policy. What is there already is checked and kept, so it may run before every start.

`driftlog up` does the same by itself. Services then take --config DIRECTORY/RUN, and all of them the same settings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading

from driftlog.broker_access import kafka_settings, running_bootstrap
from driftlog.joining import await_topics
from driftlog.options import add_config_options, add_json_option, config_of
from driftlog.policies import check_initial_policy, check_learning, initial_policy
from driftlog.services import WAIT_S
from driftlog.task_wiring import with_checked_task
from infra.clock import SystemClock
from infra.config import Config
from infra.runner import ExitCode

EXAMPLE = (
    "driftlog prepare --config configs/countdown.toml --run demo\n"
    "  driftlog prepare --config configs/countdown.toml --run demo --set run.versions=500     (extends it)"
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser(
        "prepare", help="topics, configuration, initial policy: before services run one by one"
    )
    add_config_options(parser)
    add_json_option(parser)
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on with an existing run under changed learning settings"
    )
    parser.add_argument(
        "--wait-s", type=float, default=WAIT_S, metavar="S", help=f"how long to wait for the broker ({WAIT_S:g})"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Prepare it; 0 also when everything was there."""
    config, at = config_of(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from infra.kafka_clients import quiet_client_loggers

    quiet_client_loggers()
    check_initial_policy(config)
    check_learning(config)
    config = with_checked_task(config)
    with at.held():
        bootstrap = running_bootstrap(config, at)
        _make_topics(config, bootstrap, limit_s=options.wait_s)
        changes = at.adopt(config, accept_changes=options.accept_changes)
        policy = initial_policy(config, at)
    stored = at.config_files()[-1]
    if options.json:
        print(json.dumps({"run": at.name, "config": str(stored), "policy": str(policy), "changed": changes}))
    for change in changes:
        print(f"changed: {change}", file=sys.stderr)
    print(f"run {at.name} is prepared at {bootstrap}: {stored}, initial policy {policy}", file=sys.stderr)
    return ExitCode.OK


def _make_topics(config: Config, bootstrap: str, *, limit_s: float) -> None:
    """Create what is missing, when the broker answers."""
    from infra.kafka_admin import KafkaLogAdmin

    def create() -> frozenset[str]:
        admin = KafkaLogAdmin(kafka_settings(config, bootstrap))
        try:
            admin.create_topics(config.run.name)
        finally:
            admin.close()
        return frozenset()

    clock, never = SystemClock(), threading.Event()
    await_topics(create, (), where=bootstrap, limit_s=limit_s, clock=clock, pause=never.wait)
