"""driftlog status: where a run stands, from its log alone. With --watch the live view, until the run ends or Ctrl-C."""

from __future__ import annotations

import argparse
import sys
import time

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import OpenedRun, opened_run
from infra.clock import SystemClock
from infra.runner import ExitCode

EXAMPLE = "driftlog status --run demo --watch"
_TICK_S = 0.1


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("status", help="where a run stands")
    add_run_options(parser)
    parser.add_argument("--watch", action="store_true", help="go on showing it")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Show it."""
    from consumers.offline.status import status

    with opened_run(options) as at:
        if options.watch:
            _watch(at)
            return ExitCode.OK
        found = status(at.log(), now_us=SystemClock().now_us(), limits=at.config.alarms)
    if options.json:
        print(found.to_json())
    else:
        print(found.text(), file=sys.stderr)
    return ExitCode.OK


def _watch(at: OpenedRun) -> None:
    """Ctrl-C is the usual end."""
    from driftlog.log_tail import LogTail
    from driftlog.view import View
    from driftlog.view_state import RunState

    state = RunState(at.run_id)
    tail = LogTail(at.kafka, at.run_id)
    try:
        tail.read_to_end(state)
        with View(at.run.name, at.config.run.versions, at.config.view.refresh_s, alarms=at.config.alarms) as view:
            while not state.fold.ended:
                view.update(state, time.monotonic(), {})
                time.sleep(_TICK_S)
                tail.read(state)
            view.update(state, time.monotonic(), {}, force=True)
    except KeyboardInterrupt:
        pass
    finally:
        tail.close()
