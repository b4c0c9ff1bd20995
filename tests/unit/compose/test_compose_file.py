"""The compose files keep the rules of deploy/check; every rule is tripped on a changed copy of the real file."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.check import __main__ as check
from deploy.check import rules
from deploy.check.broker_config import property_name, refusal
from deploy.check.compose import (
    Compose,
    ComposeError,
    Service,
    interpolated,
    read_compose,
    read_env_file,
    seconds,
    start_order,
    variables_of,
)
from deploy.check.stand_in import Container, Stage, stage_environment
from driftlog.services import longest_stop_s
from infra.config import load_config
from infra.local_broker import _server_properties

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> Compose:
    """The real file with one thing changed."""
    real = read_compose(COMPOSE, read_env_file(ROOT / ".env"))
    raw = copy.deepcopy(dict(real.raw))
    change(raw)
    services = {name: Service(name=name, raw=entry) for name, entry in raw["services"].items()}
    return Compose(path=real.path, raw=raw, services=services)


def test_the_files_as_they_are_break_no_rule() -> None:
    assert check.static_findings() == []


TRIPS: list[tuple[rules.Rule, str, Change]] = [
    (rules.dependencies, "which is no service", lambda c: c["services"]["trainer"]["depends_on"].update(zoo={})),
    (
        rules.dependencies,
        "which has no health check",
        lambda c: c["services"]["kafka"].pop("healthcheck"),
    ),
    (
        rules.dependencies,
        "which runs on",
        lambda c: c["services"]["trainer"]["depends_on"].update(mlflow={"condition": "service_completed_successfully"}),
    ),
    (
        rules.dependencies,
        "none of",
        lambda c: c["services"]["trainer"]["depends_on"].update(kafka={"condition": "service_ready"}),
    ),
    (
        rules.dependencies,
        "which only the profiles",
        lambda c: c["services"]["projector"]["depends_on"].update(trainer={"condition": "service_healthy"}),
    ),
    (
        rules.dependencies,
        "goes in a circle",
        lambda c: c["services"]["kafka"].update(depends_on=["prepare"]),
    ),
    (rules.health_checks, "no health check", lambda c: c["services"]["generator"].pop("healthcheck")),
    (rules.health_checks, "says no interval", lambda c: c["services"]["mlflow"]["healthcheck"].pop("interval")),
    (
        rules.health_checks,
        "looks elsewhere",
        lambda c: c["services"]["projector"]["healthcheck"].update(test=["CMD", "true"]),
    ),
    (rules.ports_are_local, "not bound", lambda c: c["services"]["mlflow"].update(ports=["5000:5000"])),
    (rules.declared, "used and not declared", lambda c: c["volumes"].pop("runs")),
    (rules.declared, "declared and not used", lambda c: c["volumes"].update(more=None)),
    (rules.declared, "which does not exist", lambda c: c["services"]["kafka"].update(volumes=["./nowhere:/data"])),
    (rules.declared, "does not exist", lambda c: c["configs"]["run"].update(file="./no.toml")),
    (rules.declared, "not given by file", lambda c: c["secrets"].update(postgres_password={"environment": "P"})),
    (
        rules.writers,
        "which is mounted writable",
        lambda c: c["services"]["generator"].update(volumes=["runs:/var/lib/driftlog/runs"]),
    ),
    (
        rules.writers,
        "which is mounted read-only",
        lambda c: c["services"]["trainer"].update(volumes=["runs:/var/lib/driftlog/runs:ro"]),
    ),
    (
        rules.environment_is_known,
        "nothing reads the variable DRIFTLOG_KAFKAA",
        lambda c: c["services"]["trainer"]["environment"].update(DRIFTLOG_KAFKAA="kafka:19092"),
    ),
    (
        rules.environment_is_known,
        "holds a secret",
        lambda c: c["services"]["postgres"]["environment"].update(POSTGRES_PASSWORD="hunter2"),
    ),
    (
        rules.addresses,
        "kafak:19092 is no service",
        lambda c: c["services"]["trainer"]["environment"].update(DRIFTLOG_KAFKA="kafak:19092"),
    ),
    (
        rules.addresses,
        "answers 403",
        lambda c: c["services"]["mlflow"]["environment"].update(MLFLOW_SERVER_ALLOWED_HOSTS="localhost:*"),
    ),
    (
        rules.addresses,
        "job runners",
        lambda c: c["services"]["mlflow"]["environment"].pop("MLFLOW_SERVER_ENABLE_JOB_EXECUTION"),
    ),
    (rules.images, "names no version", lambda c: c["services"]["kafka"].update(image="apache/kafka:latest")),
    (rules.images, "has no stage", lambda c: c["services"]["trainer"]["build"].update(target="zoo")),
    (rules.images, "runs as root", lambda c: c["services"]["trainer"]["build"].update(target="packages")),
    (rules.hardening, "no-new-privileges", lambda c: c["services"]["kafka"].pop("security_opt")),
    (rules.hardening, "read_only", lambda c: c["services"]["trainer"].update(read_only=False)),
    (rules.hardening, "no tmpfs", lambda c: c["services"]["trainer"].update(tmpfs=["/var/tmp"])),
    (rules.hardening, "what it likes", lambda c: c["services"]["kafka"].update(privileged=True)),
    (rules.endings, "its longest drain", lambda c: c["services"]["generator"].update(stop_grace_period="10s")),
    (rules.endings, "again and again", lambda c: c["services"]["trainer"].update(restart="always")),
    (rules.endings, "it serves until", lambda c: c["services"]["kafka"].update(restart="no")),
    (rules.endings, "for ever", lambda c: c["services"]["trainer"]["command"].remove("--fenced-exit")),
    (rules.commands, "unrecognized arguments", lambda c: c["services"]["trainer"]["command"].append("--fast")),
    (rules.commands, "invalid choice", lambda c: c["services"]["trainer"].update(command=["traim"])),
    (rules.logs_are_bounded, "without a bound", lambda c: c["services"]["kafka"].pop("logging")),
    # More of these: test_several_machines.py.
    (rules.the_pipeline_is_whole, "none runs driftlog evaluate", lambda c: c["services"].pop("evaluator")),
    (rules.accelerators, "it reserves none", lambda c: c["services"]["trainer-gpu"].pop("deploy")),
    (rules.metrics_can_be_asked, "no Prometheus is in the file", lambda c: c["services"].pop("prometheus")),
    (rules.no_variable_is_left, "was not put in", lambda c: c["services"]["kafka"].update(image="kafka:${V+1}")),
]


@pytest.mark.parametrize(("rule", "words", "change"), TRIPS, ids=[f"{r.__name__}-{w}" for r, w, _ in TRIPS])
def test_a_file_that_breaks_a_rule_is_found(rule: rules.Rule, words: str, change: Change) -> None:
    found = list(rule(changed(change)))

    assert any(words in line for line in found), found


def test_every_rule_is_tripped_by_some_test() -> None:
    assert {rule for rule, _, _ in TRIPS} == set(rules.RULES)


def test_containers_are_given_the_time_that_the_longest_drain_of_the_settings_takes() -> None:
    compose = read_compose(COMPOSE, {})

    needed_s = longest_stop_s(load_config(None))

    assert needed_s > load_config(None).generator.drain_timeout_s
    assert all(service.stop_grace_s >= needed_s for service in compose.services.values() if service.is_ours)


def test_the_broker_of_the_file_is_set_up_like_the_embedded_one() -> None:
    addresses = {"node.id", "controller.quorum.voters", "listeners", "advertised.listeners", "log.dirs"}
    names = {"controller.listener.names", "inter.broker.listener.name", "listener.security.protocol.map"}
    # Made for the small heap and few processors of a laptop; the image's broker has a heap of its own.
    sizes = {"log.cleaner.dedupe.buffer.size", "num.network.threads", "num.io.threads", "background.threads"}
    sizes |= {"num.recovery.threads.per.data.dir"}
    lines = _server_properties(Path("data"), 9092, 9093).splitlines()
    embedded = dict(line.partition("=")[::2] for line in lines)

    environment = read_compose(COMPOSE, {}).services["kafka"].environment
    given = {property_name(name): value for name, value in environment.items()}

    compared = embedded.keys() - addresses - names - sizes
    assert {name: given.get(name) for name in compared} == {name: embedded[name] for name in compared}


@pytest.mark.kafka
def test_kafka_takes_the_configuration_of_the_file_and_refuses_a_wrong_one(tmp_path: Path, kafka_jars: Path) -> None:
    right = read_compose(COMPOSE, {}).services["kafka"]
    environment = {**right.environment, "KAFKA_PROCESS_ROLES": "broker,conductor"}
    wrong = Service(name="kafka", raw={**right.raw, "environment": environment})

    assert refusal(right, kafka_jars, tmp_path / "right") == ""
    assert "conductor" in refusal(wrong, kafka_jars, tmp_path / "wrong")


def test_the_default_profile_is_the_whole_pipeline_and_no_other_profile_is_needed_for_it() -> None:
    compose = read_compose(COMPOSE, read_env_file(ROOT / ".env"))

    active = compose.active(read_env_file(ROOT / ".env")["COMPOSE_PROFILES"].split(","))

    expected = {
        "kafka",
        "postgres",
        "mlflow",
        "prepare",
        "coordinator",
        "projector",
        "evaluator",
        "trainer",
        "generator",
    }
    assert set(active) == expected
    assert active["generator"].replicas == 2
    assert compose.profiles == ["cpu", "gpu", "observability", "tools"]


def test_a_profile_has_one_trainer_and_accelerators_are_reserved_in_gpu_alone() -> None:
    compose = read_compose(COMPOSE, read_env_file(ROOT / "deploy" / "gpu.env"))

    active = compose.active(["gpu"])

    assert [name for name, service in active.items() if service.command[:1] == ["train"]] == ["trainer-gpu"]
    reserved = {name for name, service in compose.services.items() if "nvidia" in str(service.raw.get("deploy"))}
    assert reserved == {"trainer-gpu", "generator-gpu"}
    assert all(compose.services[name].raw["shm_size"] == "8gb" for name in reserved)


def test_every_variable_of_the_env_files_is_used_by_the_compose_file() -> None:
    used = variables_of(COMPOSE.read_text(encoding="utf-8")) | {"COMPOSE_PROFILES"}

    for name in (".env", "deploy/gpu.env"):
        assert read_env_file(ROOT / name).keys() - used == set()


def test_configurations_of_the_env_files_can_be_read() -> None:
    for name in (".env", "deploy/gpu.env"):
        load_config(ROOT / read_env_file(ROOT / name)["DRIFTLOG_TOML"])


def test_secrets_are_seen_neither_by_git_nor_by_a_build() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "deploy/secrets/postgres_password"], cwd=ROOT, check=False, timeout=30
    )
    kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]

    assert ignored.returncode in (0, 128)  # 128: a copy of the tree without git
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not any("secrets" in line or line in ("!deploy", "!.") for line in kept)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${A}", "1"),
        ("x-${A:-2}-${B:-2}", "x-1-2"),
        ("$$HOME and ${C}", "$HOME and "),
        ({"k${A}": ["${A}"]}, {"k${A}": ["1"]}),
        (7, 7),
    ],
)
def test_variables_are_put_in_as_compose_does(text: object, expected: object) -> None:
    assert interpolated(text, {"A": "1", "C": ""}) == expected


def test_a_variable_that_must_be_set_is_named() -> None:
    with pytest.raises(ComposeError, match="variable BROKERS must be set: where the log is"):
        interpolated("${BROKERS:?where the log is}", {"BROKERS": ""})


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("2m", 120), ("1m30s", 90)])
def test_durations_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_a_duration_of_another_kind_is_refused() -> None:
    with pytest.raises(ComposeError, match="no duration"):
        seconds("soon")


def test_services_start_after_those_they_wait_for() -> None:
    order = [service.name for service in start_order(read_compose(COMPOSE, {}).active(["cpu"]))]

    assert order.index("kafka") < order.index("prepare") < order.index("trainer")
    assert order.index("postgres") < order.index("mlflow") < order.index("projector")


@pytest.mark.parametrize(("text", "words"), [("a: [", "not YAML"), ("version: 3", "no services")])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.yml").write_text(text)

    with pytest.raises(ComposeError, match=words):
        read_compose(tmp_path / "c.yml", {})


def test_a_stage_has_the_environment_and_the_user_of_the_stage_it_is_made_from() -> None:
    text = "FROM a AS one\nENV A=1 \\\n    B=2\nUSER 7:7\nFROM one AS two\nENV B=3\nFROM b AS three\n"

    assert stage_environment(text, "two") == {"A": "1", "B": "3"}
    assert rules.stage_users(text) == {"one": "7:7", "two": "7:7", "three": ""}
    assert stage_environment(DOCKERFILE, "mlflow")["HOME"] == "/tmp"


def test_a_process_stands_for_a_container_with_its_own_addresses_and_paths(tmp_path: Path) -> None:
    compose = read_compose(COMPOSE, read_env_file(ROOT / ".env"))
    stage = Stage(
        compose=compose,
        folder=tmp_path,
        addresses={"kafka:19092": "127.0.0.1:7001", "mlflow:5000": "127.0.0.1:7002"},
        replaced={"MLFLOW_BACKEND_STORE_URI": "sqlite:///x.db"},
    )

    trainer = Container(stage, compose.services["trainer"]).environment()
    mlflow = Container(stage, compose.services["mlflow"])

    assert trainer["DRIFTLOG_KAFKA"] == "127.0.0.1:7001"
    assert trainer["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:7002"
    assert trainer["HOME"] == str(tmp_path / "containers" / "trainer" / "tmp")
    assert "MLFLOW_BACKEND_STORE_URI" not in trainer
    assert mlflow.environment()["MLFLOW_BACKEND_STORE_URI"] == "sqlite:///x.db"
    assert mlflow.environment()["POSTGRES_PASSWORD_FILE"] == str(tmp_path / "secrets" / "postgres_password")
    assert "mlflow:5000" in mlflow.environment()["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    assert mlflow._here("5000") == "7002"
    assert mlflow._here("0.0.0.0") == "127.0.0.1"
