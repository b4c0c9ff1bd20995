"""Which processes `driftlog up` starts, with which arguments. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from driftlog.processes import Program
from infra.config import Config

TRAINER, PROJECTOR, EVALUATOR = "trainer", "projector", "evaluator"
BESIDE = (PROJECTOR, EVALUATOR)  # training goes on without them


def programs(config: Config, config_file: str, branch: Sequence[str] = (), *, metrics_port: int = 0) -> list[Program]:
    """The services of a run. `metrics_port`: of the first of them, the others follow it; 0: none has one."""
    common = ("--config", config_file, "--supervised")
    found = [
        Program(name=TRAINER, arguments=("train", *common, *branch), threads=config.trainer.threads),
        Program(name="coordinator", arguments=("coordinate", *common)),
    ]
    for number in range(config.generator.workers):
        arguments = ("generate", *common, "--worker", f"g{number}")
        found.append(Program(name=f"generator-{number}", arguments=arguments, threads=config.generator.threads))
    if config.mlflow.enabled:
        # Behind everything that trains: the backlog is in the log, and it catches up.
        found.append(Program(name=PROJECTOR, arguments=("project", *common), niceness=19))
    if config.evaluation.enabled:
        settings, threads = ("evaluate", *common), config.evaluation.threads
        found.append(Program(name=EVALUATOR, arguments=settings, threads=threads, niceness=19))
    return [with_port(program, metrics_port + place if metrics_port else 0) for place, program in enumerate(found)]


def with_port(program: Program, port: int) -> Program:
    """The program with a port of its own: an inherited variable would give all of them the same one."""
    return Program(
        name=program.name,
        arguments=(*program.arguments, "--metrics-port", str(port)),
        threads=program.threads,
        niceness=program.niceness,
    )


def metrics_words(found: Sequence[Program], host: str) -> str:
    """Where each answers, in one line."""
    return "metrics: " + ", ".join(f"{p.name} http://{host}:{p.arguments[-1]}/metrics" for p in found)
