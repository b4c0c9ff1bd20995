"""driftlog up: everything on this machine, supervised, until the configured versions are trained.

Starts the embedded broker (unless one is named), topics, trainer, coordinator, generators and projector;
ends with a greedy evaluation, the audit and runs/<run>/summary.json. The same run name resumes a run, or
extends it when run.versions is larger. Ctrl-C drains and closes; the run can be resumed. Twice: at once.

--from-version N goes on from an older version until run.versions training steps lead to the newest one again. The
same command a second time goes on with that branch; for one more branch from the same weights name its first number.
"""

from __future__ import annotations

import argparse

from driftlog.options import add_branch_option, add_config_options, add_json_option, config_of

EXAMPLE = (
    "driftlog up --config configs/countdown.toml --run first --set run.versions=100\n"
    "  driftlog up --config configs/countdown.toml --run first --set run.versions=200     (extends it)\n"
    "  driftlog up --config configs/countdown.toml --run first --from-version 40        (another branch)"
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("up", help="run everything on this machine until the versions are trained")
    add_config_options(parser)
    add_branch_option(parser)
    add_json_option(parser)
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on with an existing run under changed learning settings"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Run it; 0 when the versions are trained and the audit finds nothing, or after an orderly stop."""
    from driftlog.launch import launch

    config, at = config_of(options)
    return launch(
        config, at, accept_changes=options.accept_changes, as_json=options.json, from_version=options.from_version
    )
