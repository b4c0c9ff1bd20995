"""The stack of docker-compose.yml lived through on this machine, in the order and under the conditions of the file:

0. Kafka's own tool takes the broker's configuration;
1. a short run to its end: every service healthy on the way, every exit 0, audit and MLflow agree with the log;
2. the same run made longer: services of an ended run wait until the trainer opened it, go on, and are told to stop
   in the middle: every exit 0 within its stop_grace_period, audit clean.

Kafka is the embedded broker, and a folder of sqlite stands for Postgres.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.check.broker_config import refusal
from deploy.check.compose import read_compose, start_order
from deploy.check.stand_in import CheckFailed, Container, Stage, can_mount, free_port
from infra import local_broker

STANDS_IN = frozenset({"kafka", "postgres"})
START_LIMIT_S = 180.0
RUN_LIMIT_S = 240.0
POLL_S = 0.25
VERSIONS, LONGER = 8, 400
GROWN = 4
"""versions beyond the first end after which the longer run is stopped"""


@dataclass(slots=True)
class Story:
    """What happened."""

    containers: list[Container] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def play(path: Path, variables: dict[str, str], folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Both parts; the facts for the RESULT line. CheckFailed says what went wrong and where to look."""
    began_s = time.monotonic()
    jars = local_broker.ensure_jars(local_broker.default_cache_dir())
    refused = refusal(read_compose(path, variables).services["kafka"], jars, folder / "broker-config")
    if refused:
        raise CheckFailed(f"kafka: its configuration is refused:\n{refused}")
    broker = local_broker.start(folder / "kafka", jars=jars, die_with_parent=True)
    story = Story()
    mlflow_port = free_port()
    try:
        for part, versions in (("short", VERSIONS), ("longer", LONGER)):
            variables = {**variables, "DRIFTLOG_VERSIONS": str(versions), "DRIFTLOG_EVALUATE_EVERY": "4"}
            compose = read_compose(path, variables)
            stage = Stage(
                compose=compose,
                folder=folder,
                addresses={"kafka:19092": broker.bootstrap_servers, "mlflow:5000": f"127.0.0.1:{mlflow_port}"},
                replaced={"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}"},
            )
            say(f"part {part}: {versions} versions")
            started = _up(stage, variables["COMPOSE_PROFILES"].split(","), story, say)
            if part == "short":
                _await_end(started, say)
                story.facts["healthy_after_s"] = {c.name: c.healthy_after_s for c in started if c.service.healthcheck}
                story.facts["hosts"] = _host_checks(mlflow_port)
                _ask_the_run(stage, ("audit", "status", "mlflow compare"), story, say)
            else:
                _await_growth(stage, started, say)
                story.facts["stopped_after_s"] = _stop(started, say)
                _ask_the_run(stage, ("audit",), story, say)
            for container in started:
                container.kill()
    finally:
        for container in story.containers:
            container.kill()
        local_broker.stop(folder / "kafka")
    return {**story.facts, "read_only_mounts": can_mount(), "wall_s": round(time.monotonic() - began_s, 1)}


def _up(stage: Stage, profiles: Sequence[str], story: Story, say: Callable[[str], None]) -> list[Container]:
    """Start what `docker compose up` starts, as the conditions of the file allow."""
    started: dict[str, list[Container]] = {}
    for service in start_order(stage.compose.active(profiles)):
        if service.name in STANDS_IN:
            continue
        for name, condition in service.depends_on.items():
            for other in started.get(name, ()):
                _await_condition(other, condition)
        containers = [Container(stage, service, number + 1) for number in range(service.replicas)]
        for container in containers:
            container.start()
            story.containers.append(container)
        say(f"  started {', '.join(container.name for container in containers)}")
        started[service.name] = containers
    found = [container for containers in started.values() for container in containers]
    _await_health([c for c in found if c.service.healthcheck])
    return found


def _await_condition(container: Container, condition: str) -> None:
    if condition == "service_healthy":
        _await_health([container])
    elif condition == "service_completed_successfully":
        _until(
            lambda: container.exit_code() is not None, START_LIMIT_S, f"{container.name} has not completed", container
        )
        _require(container.exit_code() == 0, f"{container.name} ended with {container.exit_code()}", container)


def _await_health(containers: Sequence[Container]) -> None:
    """Until each passed its health check once. One that has ended well needs not pass it any more."""
    waiting = [container for container in containers if container.healthy_after_s is None]
    deadline_s = time.monotonic() + START_LIMIT_S
    while waiting:
        for container in waiting[:]:
            if container.ask():
                waiting.remove(container)
            code = container.exit_code()
            _require(
                code is None or container not in waiting,
                f"{container.name} ended ({code}) before it was healthy",
                container,
            )
        if waiting:
            _require(time.monotonic() < deadline_s, f"{waiting[0].name} did not become healthy", waiting[0])
            time.sleep(POLL_S)


def _await_end(containers: Sequence[Container], say: Callable[[str], None]) -> None:
    """Until every service of the run ended by itself, with 0."""
    ours = [container for container in containers if container.service.is_ours]
    for container in ours:
        _until(lambda c=container: c.exit_code() is not None, RUN_LIMIT_S, f"{container.name} goes on", container)  # type: ignore[misc]
        _require(container.exit_code() == 0, f"{container.name} ended with {container.exit_code()}", container)
    say(f"  the run has ended: {len(ours)} processes, each with 0")


def _await_growth(stage: Stage, containers: Sequence[Container], say: Callable[[str], None]) -> None:
    """Until the run has versions beyond its first end; nobody may leave before."""
    trainer = next(container for container in containers if container.service.name == "trainer")
    checkpoints = stage.volume("runs")

    def versions() -> int:
        return len(list(checkpoints.glob("*/checkpoints/*/*/manifest.json")))

    _until(lambda: versions() >= 1 + VERSIONS + GROWN, RUN_LIMIT_S, "the ended run did not grow", trainer)
    for container in containers:
        if container.service.is_ours and container.service.name != "prepare":
            code = container.exit_code()
            _require(code is None, f"{container.name} left ({code}) a run that goes on", container)
    say(f"  the ended run goes on: {versions()} checkpoints")


def _stop(containers: Sequence[Container], say: Callable[[str], None]) -> dict[str, float]:
    """SIGTERM for all of ours; seconds until each was gone."""
    ours = [c for c in containers if c.service.is_ours and c.service.name != "prepare"]
    began_s = time.monotonic()
    for container in ours:
        container.terminate()
    gone: dict[str, float] = {}
    while len(gone) < len(ours):
        for container in ours:
            if container.name not in gone and container.exit_code() is not None:
                gone[container.name] = round(time.monotonic() - began_s, 1)
            elif container.name not in gone:
                waited_s = time.monotonic() - began_s
                _require(waited_s < container.service.stop_grace_s, f"{container.name} would be killed", container)
        time.sleep(0.05)
    for container in ours:
        _require(
            container.exit_code() == 0, f"{container.name}: told to stop, ended {container.exit_code()}", container
        )
    say(f"  told to stop: each ended with 0, the last after {max(gone.values())} s")
    return gone


def _ask_the_run(stage: Stage, questions: Sequence[str], story: Story, say: Callable[[str], None]) -> None:
    """Commands in the container for commands."""
    tools = stage.compose.services["tools"]
    run = tools.command[tools.command.index("--run") + 1]
    for question in questions:
        container = Container(stage, tools)
        story.containers.append(container)
        container.start(*question.split(), "--run", run, "--json")
        _until(lambda c=container: c.exit_code() is not None, 120.0, f"{question} does not end", container)  # type: ignore[misc]
        _require(container.exit_code() == 0, f"driftlog {question} ended with {container.exit_code()}", container)
        say(f"  driftlog {question}: 0")


def _host_checks(port: int) -> dict[str, int]:
    """HTTP status of the server by the name it is called: the file's list of allowed hosts, at work."""
    found = {}
    for host, expected in (("mlflow:5000", 200), (f"localhost:{port}", 200), ("elsewhere.example:5000", 403)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            body = json.dumps({"max_results": 1})
            headers = {"Host": host, "Content-Type": "application/json"}
            connection.request("POST", "/api/2.0/mlflow/experiments/search", body=body, headers=headers)
            found[host.partition(":")[0]] = status = connection.getresponse().status
        finally:
            connection.close()
        if status != expected:
            raise CheckFailed(f"mlflow answers {status} to the name {host}, expected {expected}")
    return found


def _until(done: Callable[[], bool], limit_s: float, words: str, container: Container) -> None:
    deadline_s = time.monotonic() + limit_s
    while not done():
        _require(not container.exit_code(), f"{container.name} ended with {container.exit_code()}", container)
        _require(time.monotonic() < deadline_s, f"{words} after {limit_s:g} s", container)
        time.sleep(POLL_S)


def _require(holds: bool, words: str, container: Container) -> None:
    if not holds:
        raise CheckFailed(f"{words}. The end of {container.log}:\n{container.last_words()}")
