"""What must hold in a compose file of ours, beyond its schema. Each rule gives findings, one line each, service first.

The rules know the project: its environment variables, its command line, its settings, its Dockerfile.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.check.compose import Compose, ComposeError, Service, start_order, texts
from driftlog.__main__ import _parser as command_line
from driftlog.environment_variables import is_known
from driftlog.services import longest_stop_s
from infra.config import load_config
from infra.kafka_clients import SECURITY_KEYS

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")
RUNS = "/var/lib/driftlog/runs"
WRITERS = frozenset({"prepare", "train", "coordinate", "status"})
"""verbs whose container may write what a run keeps; status: the container for commands by hand"""
ONE_SHOT = frozenset({"prepare", "status"})
PIPELINE = ("prepare", "coordinate", "project", "evaluate", "train", "generate")
NOT_ASKABLE = frozenset({"kafka-exporter"})
"""its image has no program that could ask it"""
_ADDRESS = re.compile(r"(?<![\w.-])([a-z][a-z0-9-]*):(\d{2,5})(?!\d)")
_SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|CREDENTIAL")
Rule = Callable[[Compose], Iterator[str]]


def dependencies(compose: Compose) -> Iterator[str]:
    """Targets exist, conditions can come true, nothing waits for what its profile does not start, no circles."""
    for service in compose.services.values():
        for name, condition in service.depends_on.items():
            other = compose.services.get(name)
            if other is None:
                yield f"{service.name}: depends on {name}, which is no service"
                continue
            if condition not in CONDITIONS:
                yield f"{service.name}: condition {condition} of {name} is none of {', '.join(CONDITIONS)}"
            if condition == "service_healthy" and not other.healthcheck:
                yield f"{service.name}: waits until {name} is healthy, which has no health check"
            if condition == "service_completed_successfully" and not _ends(other):
                yield f"{service.name}: waits until {name} has completed, which runs on"
            if other.profiles and not (service.profiles and service.profiles <= other.profiles):
                yield f"{service.name}: depends on {name}, which only the profiles {sorted(other.profiles)} start"
    try:
        start_order(compose.services)
    except ComposeError as error:
        yield f"services: {error}"


def health_checks(compose: Compose) -> Iterator[str]:
    """Whatever runs on can be asked how it is, with limits."""
    for service in compose.services.values():
        if _ends(service) or service.name in NOT_ASKABLE:
            continue
        if not service.healthcheck:
            yield f"{service.name}: no health check"
            continue
        for key in ("interval", "timeout", "retries", "start_period"):
            if key not in service.raw["healthcheck"]:
                yield f"{service.name}: its health check says no {key}"
        if service.is_ours and "--life-sign" in service.command:
            path = service.command[service.command.index("--life-sign") + 1]
            if path not in service.healthcheck:
                yield f"{service.name}: writes its life sign to {path}, its health check looks elsewhere"


def ports_are_local(compose: Compose) -> Iterator[str]:
    """No port is open to the network: none of these servers asks who is there."""
    for service in compose.services.values():
        for port in service.raw.get("ports", ()):
            if not str(port).startswith("127.0.0.1:"):
                yield f"{service.name}: port {port} is not bound to 127.0.0.1"


def declared(compose: Compose) -> Iterator[str]:
    """Volumes, secrets, configs and networks are declared and used; what is mounted exists; secrets are files."""
    used: dict[str, set[str]] = {"volumes": set(), "secrets": set(), "configs": set(), "networks": set()}
    for service in compose.services.values():
        used["volumes"] |= {mount.source for mount in service.mounts if not mount.is_bind}
        used["networks"] |= set(service.raw.get("networks", ()))
        for kind in ("secrets", "configs"):
            used[kind] |= {e if isinstance(e, str) else e["source"] for e in service.raw.get(kind, ())}
        for mount in service.mounts:
            if mount.is_bind and not (compose.path.parent / mount.source).exists():
                yield f"{service.name}: mounts {mount.source}, which does not exist"
    for kind, names in used.items():
        for name in sorted(names - compose.names(kind)):
            yield f"{kind}: {name} is used and not declared"
        for name in sorted(compose.names(kind) - names):
            yield f"{kind}: {name} is declared and not used"
    for name, entry in (compose.raw.get("configs") or {}).items():
        if not (compose.path.parent / entry["file"]).is_file():
            yield f"configs: {name}: {entry['file']} does not exist"
    for name, entry in (compose.raw.get("secrets") or {}).items():
        if "file" not in entry:
            yield f"secrets: {name} is not given by file"


def writers(compose: Compose) -> Iterator[str]:
    """The folder of the runs is writable for those that write it, and for nobody else."""
    for service in compose.services.values():
        for mount in service.mounts:
            if mount.target != RUNS or not service.command:
                continue
            # One that takes its configuration from a file makes the initial policy by itself.
            may_write = service.command[0] in WRITERS or not _config_of(service).startswith("runs/")
            if mount.read_only and may_write:
                yield f"{service.name}: {service.command[0]} writes to {RUNS}, which is mounted read-only"
            if not mount.read_only and not may_write:
                yield f"{service.name}: {service.command[0]} only reads {RUNS}, which is mounted writable"


def environment_is_known(compose: Compose) -> Iterator[str]:
    """Every variable of ours is one that the project reads; no secret stands in the file."""
    for service in compose.services.values():
        for name, value in service.environment.items():
            ours = name.startswith("DRIFTLOG_") or (service.is_ours and name.startswith("MLFLOW_"))
            if ours and not is_known(name, SECURITY_KEYS):
                yield f"{service.name}: nothing reads the variable {name}"
            if _SECRET.search(name) and not value.startswith("/run/secrets/"):
                yield f"{service.name}: {name} holds a secret in the file; name a file of /run/secrets"


def addresses(compose: Compose) -> Iterator[str]:
    """Each name:port of a service is a service of the file; MLflow answers to the name it has there."""
    allowed = {
        name: set(service.environment.get("MLFLOW_SERVER_ALLOWED_HOSTS", "").split(","))
        for name, service in compose.services.items()
        if service.target == "mlflow"
    }
    for service in compose.services.values():
        own = {name: value for name, value in service.environment.items() if name != "MLFLOW_SERVER_ALLOWED_HOSTS"}
        for text in [*own.values(), *service.command]:
            for host, port in _ADDRESS.findall(text):
                if host == "localhost":
                    continue
                if host not in compose.services:
                    yield f"{service.name}: {host}:{port} is no service of this file"
                elif allowed.get(host) is not None and f"{host}:{port}" not in allowed[host]:
                    yield f"{service.name}: {host} does not list {host}:{port} in its allowed hosts and answers 403"
    for name in allowed:
        if compose.services[name].environment.get("MLFLOW_SERVER_ENABLE_JOB_EXECUTION") != "false":
            yield f"{name}: its job runners are on: seven more processes"


def images(compose: Compose) -> Iterator[str]:
    """Versions are named; what we build comes from a stage of the one Dockerfile and does not run as root."""
    users = stage_users(DOCKERFILE.read_text(encoding="utf-8"))
    for service in compose.services.values():
        image = str(service.raw.get("image", ""))
        tag = image.rpartition("/")[2].partition(":")[2]
        if service.target is None:
            if not re.search(r"\d+\.\d+", tag):
                yield f"{service.name}: image {image!r} names no version"
        elif service.target not in users:
            yield f"{service.name}: the Dockerfile has no stage {service.target!r}"
        elif not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[service.target]):
            yield f"{service.name}: stage {service.target!r} runs as {users[service.target] or 'root'}"


def hardening(compose: Compose) -> Iterator[str]:
    """What is ours may write nowhere but its volumes and /tmp, gains no rights, and reaps its children."""
    for service in compose.services.values():
        if "no-new-privileges:true" not in service.raw.get("security_opt", ()):
            yield f"{service.name}: security_opt lacks no-new-privileges:true"
        if service.raw.get("privileged") or "docker.sock" in str(service.raw.get("volumes")):
            yield f"{service.name}: may do on the host what it likes"
        if not service.is_ours and service.target is None:
            continue
        if not any(str(entry).split(":")[0] == "/tmp" for entry in service.raw.get("tmpfs", ())):
            yield f"{service.name}: no tmpfs at /tmp, where its life sign and its caches lie"
        for key, value in (("read_only", True), ("init", True), ("cap_drop", ["ALL"])):
            if service.raw.get(key) != value:
                yield f"{service.name}: {key} is not {value}"


def endings(compose: Compose) -> Iterator[str]:
    """Services have the time to drain; one that ended is not started again; one that was replaced stays down."""
    needed_s = max(longest_stop_s(load_config(path)) for path in (None, _run_config(compose)))
    for service in compose.services.values():
        restart = str(service.raw.get("restart", "no"))
        if not service.is_ours:
            if restart != "unless-stopped":
                yield f"{service.name}: restart is {restart}; it serves until it is stopped"
            continue
        if restart in ("always", "unless-stopped"):
            yield f"{service.name}: restart {restart} would start a finished run again and again"
        if service.command[0] in ONE_SHOT:
            continue
        if service.stop_grace_s < needed_s:
            yield f"{service.name}: stop_grace_period {service.stop_grace_s:g} s < {needed_s:g} s, its longest drain"
        words = service.command
        if "--fenced-exit" not in words or words[words.index("--fenced-exit") + 1] != "0":
            yield f"{service.name}: without --fenced-exit 0 two of a kind start each other for ever"


def commands(compose: Compose) -> Iterator[str]:
    """The command line understands every command of ours."""
    parser, _ = command_line()
    for service in compose.services.values():
        if not service.is_ours:
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(service.command)
        except SystemExit:
            words = said.getvalue().strip().splitlines()[-1]
            yield f"{service.name}: driftlog {' '.join(service.command)}: {words}"


def logs_are_bounded(compose: Compose) -> Iterator[str]:
    """A run of weeks does not fill the disk with its logs."""
    for service in compose.services.values():
        if "max-size" not in (service.raw.get("logging", {}).get("options") or {}):
            yield f"{service.name}: its log grows without a bound (logging.options.max-size)"


def the_pipeline_is_whole(compose: Compose) -> Iterator[str]:
    """Some service runs each command that a run needs."""
    there = {service.command[0] for service in compose.services.values() if service.is_ours and service.command}
    for verb in PIPELINE:
        if verb not in there:
            yield f"services: none runs driftlog {verb}"


def accelerators(compose: Compose) -> Iterator[str]:
    """What runs on the image for accelerators reserves one, with shared memory; nobody else holds one."""
    for service in compose.services.values():
        resources = service.raw.get("deploy", {}).get("resources", {})
        reserved = "gpu" in str(resources.get("reservations", {}).get("devices", ""))
        if service.is_for_gpu and not reserved:
            yield f"{service.name}: its image is for accelerators, and it reserves none"
        if reserved and not service.is_for_gpu:
            yield f"{service.name}: reserves an accelerator, which its image cannot use"
        if service.is_for_gpu and "shm_size" not in service.raw:
            yield f"{service.name}: no shm_size: 64 MB of shared memory is too little for its engine"


def metrics_can_be_asked(compose: Compose) -> Iterator[str]:
    """Numbers have a reader: a Prometheus of the file, or a port of the host, one for each container of a profile."""
    if any("prom/prometheus" in str(service.raw.get("image")) for service in compose.services.values()):
        return
    taken: dict[tuple[str, int], str] = {}
    for service in compose.services.values():
        port = service.environment.get("DRIFTLOG_METRICS_PORT")
        if port is None or _ends(service):
            continue
        published = [str(entry).split(":") for entry in service.raw.get("ports", ())]
        hosts = [_port_range(words[-2]) for words in published if len(words) > 1 and words[-1] == port]
        if not hosts:
            yield f"{service.name}: no port of the host leads to its metrics ({port}), and no Prometheus is in the file"
            continue
        if len(hosts[0]) < service.replicas:
            yield f"{service.name}: {service.replicas} copies, {len(hosts[0])} ports of the host for their metrics"
        for key in ((profile, number) for profile in sorted(service.profiles) for number in hosts[0]):
            if taken.setdefault(key, service.name) != service.name:
                yield f"{service.name}: port {key[1]} of the host is {taken[key]}'s under the profile {key[0]}"


def no_variable_is_left(compose: Compose) -> Iterator[str]:
    """Every variable is written in a form that is understood here."""
    for service in compose.services.values():
        for text in texts(service.raw):
            if "${" in text:
                yield f"{service.name}: {text!r} has a variable that was not put in"


RULES: tuple[Rule, ...] = (
    dependencies, health_checks, ports_are_local, declared, writers, environment_is_known, addresses, images,
    hardening, endings, commands, logs_are_bounded, the_pipeline_is_whole, accelerators, metrics_can_be_asked,
    no_variable_is_left,
)  # fmt: skip


def findings(compose: Compose) -> list[str]:
    """Everything that any rule finds."""
    return [f"{compose.path.name}: {finding}" for rule in RULES for finding in rule(compose)]


def stage_users(dockerfile: str) -> dict[str, str]:
    """Stage -> the user it ends as ("" is root); a stage begins as its base ended."""
    users: dict[str, str] = {}
    current = ""
    for line in dockerfile.splitlines():
        words = line.split()
        if words[:1] == ["FROM"] and "AS" in words:
            current = words[words.index("AS") + 1]
            users[current] = users.get(words[1], "")
        elif words[:1] == ["USER"]:
            users[current] = words[1]
    return users


def _run_config(compose: Compose) -> Path | None:
    """The configuration of the run that the file names; None where it is not there, which is another rule's finding."""
    path = compose.path.parent / str((compose.raw.get("configs") or {}).get("run", {}).get("file", ""))
    return path if path.is_file() else None


def _config_of(service: Service) -> str:
    words = service.command
    return words[words.index("--config") + 1] if "--config" in words else ""


def _port_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _ends(service: Service) -> bool:
    return service.is_ours and bool(service.command) and service.command[0] in ONE_SHOT
