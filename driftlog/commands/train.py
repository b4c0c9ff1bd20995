"""driftlog train: the trainer service. Under torchrun rank 0 is the service, the other ranks compute their share.

torchrun --nproc-per-node 2 -m driftlog train --config configs/countdown.toml --run demo
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from driftlog import options as common
from driftlog.policies import initial_policy
from driftlog.run_directory import RunDirectory
from driftlog.services import add_service_options, serve
from driftlog.wiring import Site
from infra import logs
from infra.config import Config
from infra.runner import Assembly, ExitCode

EXAMPLE = "driftlog train --config configs/countdown.toml --run demo"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("train", help="run the trainer")
    add_service_options(parser)
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
        build=_build,
    )
    return _leave(code) if os.environ.get("WORLD_SIZE", "1") != "1" else code


def _leave(code: int) -> int:
    """End this rank now. Everything is closed; threads that torch leaves behind abort the interpreter's exit at times
    ("terminate called without an active exception"), and torchrun would take that for a failed rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _build(at: Site) -> Assembly:
    from driftlog.wiring_trainer import build_trainer

    return build_trainer(at)


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
