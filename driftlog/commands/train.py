"""driftlog train: the trainer service. Under torchrun rank 0 is the service, the other ranks compute their share.

torchrun --nproc-per-node 2 -m driftlog train --config configs/countdown.toml --run demo

--from-version N goes on from an older version. A supervisor that repeats the command does not branch again: while the
newest version stands on a branch from N, training goes on with that branch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from consumers.trainer.branching import BranchWish
from driftlog import options as common
from driftlog.branches import plan_branch
from driftlog.policies import initial_policy
from driftlog.run_directory import RunDirectory
from driftlog.run_reading import OpenedRun
from driftlog.services import add_service_options, serve
from driftlog.wiring import Site
from infra import logs
from infra.config import Config
from infra.runner import Assembly, ExitCode, say_on_stderr
from schemas.policy_fold import PolicyFold

EXAMPLE = (
    "driftlog train --config configs/countdown.toml --run demo\n"
    "  driftlog train --config configs/countdown.toml --run demo --from-version 40"
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("train", help="run the trainer")
    add_service_options(parser)
    common.add_branch_option(parser)
    # `driftlog up` alone: it has read the log, and a trainer that it starts again must not read another wish from it.
    parser.add_argument("--when-newest", type=int, help=argparse.SUPPRESS)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the trainer until the configured versions are trained."""
    if os.environ.get("RANK", "0") != "0":
        return _leave(_serve_rank(options))
    code = serve(
        options,
        "trainer",
        threads=lambda config: config.trainer.threads,
        prepare=_prepare,
        build=lambda at: _build(at, options),
    )
    return _leave(code) if os.environ.get("WORLD_SIZE", "1") != "1" else code


def _leave(code: int) -> int:
    """End this rank now. Everything is closed; threads that torch leaves behind abort the interpreter's exit at times
    ("terminate called without an active exception"), and torchrun would take that for a failed rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _build(at: Site, options: argparse.Namespace) -> Assembly:
    from driftlog.wiring_trainer import build_trainer

    return build_trainer(at, branch=_wish(at, options.from_version, options.when_newest))


def _wish(at: Site, from_version: int | None, when_newest: int | None) -> BranchWish | None:
    """As handed over, or made from the log as it stands."""
    if from_version is None:
        return None
    if when_newest is not None:
        return BranchWish(from_version=from_version, when_newest=when_newest)
    fold = PolicyFold()
    for _ in OpenedRun(config=at.config, run=at.run, kafka=at.kafka).log().policy(fold):
        pass
    wish, words = plan_branch(fold, from_version, at.config.run.versions)
    say_on_stderr(words)
    return wish


def _prepare(config: Config, at: RunDirectory) -> None:
    importlib.import_module("driftlog.wiring_trainer")
    importlib.import_module("driftlog.learning_settings").check_learning(config)
    initial_policy(config, at)


def _serve_rank(options: argparse.Namespace) -> int:
    """Not the trainer itself: no broker, no store, no signals to obey but the end."""
    config, at = common.config_of(options)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.trainer.threads))
    logs.configure(options.log_level, options.log_json, service=f"trainer-{os.environ['RANK']}", run=config.run.name)
    from driftlog.wiring_trainer import serve_rank

    serve_rank(config, at)
    return ExitCode.OK
