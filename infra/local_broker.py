"""One Apache Kafka broker on this machine, from its Maven jars: no installation, no container.

Guarantees: it listens on 127.0.0.1 only; `start` returns when it answers a metadata request, or raises with
the last lines of its log; another process finds and stops it through broker.json in its data directory.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path

from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings
from schemas.errors import EnvironmentMissing, LogUnavailable

KAFKA_VERSION = "4.3.1"
_FILES = resources.files("infra") / "broker_files"
_COMPLETE = ".complete"
_FREE_PORT_TRIES = 20
_PORT_LIMIT_S = 5.0
# Serial collector and first-stage compiler: the port is up in 2 s instead of 4, and 370 MB resident are enough.
_JVM = ("-Xms256m", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
# The shell is gone at once: the broker belongs to no process of ours and outlives them all.
_DETACHED = '"$@" </dev/null & echo $! >"$DRIFTLOG_PID_FILE"'
# With stdin as a life line: when the process that started the broker is gone, however it went, `read` ends.
_LIFE_LINE = """
exec 3<&0
"$@" </dev/null 3<&- & java=$!
echo "$java" >"$DRIFTLOG_PID_FILE"
(read -r _ <&3; kill -TERM "$java" 2>/dev/null) & watch=$!
exec 3<&-
wait "$java"
kill "$watch" 2>/dev/null
"""
# Held so that their life lines stay open: java's pid -> the shell that watches it.
_life_lines: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerHandle:
    """A running broker, as broker.json says it."""

    port: int
    pid: int
    data_dir: str

    @property
    def bootstrap_servers(self) -> str:
        """What clients are told."""
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """What makes an embedded broker another one than usual, for tests of secured and odd brokers."""

    properties: Mapping[str, str] = field(default_factory=dict)
    """over the usual ones of server.properties"""
    format_arguments: tuple[str, ...] = ()
    """of StorageTool, for a new data directory (--add-scram ...)"""
    security: Mapping[str, str] = field(default_factory=dict, repr=False)
    """of the client that asks whether it answers"""


_USUAL = BrokerOptions()


def default_cache_dir() -> Path:
    """Where the jars are kept when nobody says otherwise: in the checkout, or in the user's cache when installed."""
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").exists():
        return checkout / ".cache" / f"kafka-{KAFKA_VERSION}"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "driftlog" / f"kafka-{KAFKA_VERSION}"


def ensure_jars(cache_dir: Path) -> Path:
    """The directory with the broker's jars, fetched by maven when it is not complete."""
    if (cache_dir / _COMPLETE).exists():
        return cache_dir
    maven = _program("mvn", "maven (`apt-get install maven`, `brew install maven`)")
    cache_dir.parent.mkdir(parents=True, exist_ok=True)
    fetched = cache_dir.with_name(f"{cache_dir.name}.{os.getpid()}.tmp")
    shutil.rmtree(fetched, ignore_errors=True)
    with resources.as_file(_FILES / "pom.xml") as pom:
        command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={fetched}"]
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    if result.returncode or not any(fetched.glob("kafka_*.jar")):
        said = (result.stdout + result.stderr).strip()[-2000:]
        raise EnvironmentMissing(f"maven could not fetch the Kafka {KAFKA_VERSION} jars:\n{said}\n{_instead()}")
    (fetched / _COMPLETE).touch()
    try:
        fetched.rename(cache_dir)  # atomic: another process sees all of it or nothing
    except OSError:
        if not (cache_dir / _COMPLETE).exists():  # a half-filled directory of an older kind
            shutil.rmtree(cache_dir)
            fetched.rename(cache_dir)
        else:
            shutil.rmtree(fetched)
    return cache_dir


def start(
    data_dir: Path,
    *,
    jars: Path,
    port: int | None = None,
    die_with_parent: bool = False,
    timeout_s: float = 60.0,
    options: BrokerOptions = _USUAL,
) -> BrokerHandle:
    """Start a broker on data_dir (formatted when new) and wait until it answers. A running one is returned as it is."""
    running = status(data_dir)
    if running is not None:
        return running
    java = _program("java", "a JDK, 17 or later (`apt-get install openjdk-17-jre-headless`, `brew install openjdk`)")
    data_dir = data_dir.resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    port = _free_port() if port is None else _claim(port)
    properties = data_dir / "server.properties"
    properties.write_text(_server_properties(data_dir, port, _free_port(avoid=port), options), encoding="ascii")
    classpath = os.pathsep.join(str(jar) for jar in sorted(jars.glob("*.jar")))
    if not (data_dir / "log" / "meta.properties").exists():
        _format(java, classpath, properties, options.format_arguments)
    deadline_s = time.monotonic() + timeout_s
    pid = _launch(java, classpath, properties, data_dir, die_with_parent=die_with_parent)
    handle = BrokerHandle(port=port, pid=pid, data_dir=str(data_dir))
    asking = KafkaSettings(bootstrap_servers=handle.bootstrap_servers, security=options.security)
    _wait_until_ready(handle, asking, deadline_s)
    (data_dir / "broker.json").write_text(json.dumps(asdict(handle)), encoding="ascii")
    return handle


def status(data_dir: Path) -> BrokerHandle | None:
    """The broker that runs on data_dir, whoever started it; None when there is none."""
    try:
        handle = BrokerHandle(**json.loads((data_dir / "broker.json").read_text(encoding="ascii")))
    except FileNotFoundError:
        return None
    return handle if _is_our_java(handle.pid, Path(handle.data_dir)) and _listens(handle.port) else None


def stop(data_dir: Path, *, timeout_s: float = 20.0) -> bool:
    """End the broker that runs on data_dir: politely, then by force. False when none ran."""
    path = data_dir / "broker.json"
    try:
        handle = BrokerHandle(**json.loads(path.read_text(encoding="ascii")))
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    if not _is_our_java(handle.pid, Path(handle.data_dir)):
        return False
    end_process(handle.pid, timeout_s=timeout_s)
    return True


def end_process(pid: int, *, timeout_s: float) -> None:
    """SIGTERM, at most timeout_s of patience, SIGKILL."""
    for sign, patience_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 10.0)):
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            break
        if wait_for_end(pid, timeout_s=patience_s):
            break
    shell = _life_lines.pop(pid, None)
    if shell is not None:
        shell.communicate(timeout=5.0)  # closes the life line and reaps the shell


def wait_for_end(pid: int, *, timeout_s: float) -> bool:
    """True when the process is gone, at most timeout_s from now."""
    deadline_s = time.monotonic() + timeout_s
    while _alive(pid):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)
    return True


# ---------------------------------------------------------------- the pieces of start


def _program(name: str, what: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise EnvironmentMissing(f"`{name}` is not on the PATH: install {what}. {_instead()}")
    return path


def _instead() -> str:
    return "Or use a broker you have: --set kafka.bootstrap_servers=HOST:PORT"


def _claim(port: int) -> int:
    """The given port, as soon as it is free: a broker that was just killed goes on listening after its pid is gone."""
    deadline_s = time.monotonic() + _PORT_LIMIT_S
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError as error:
                if time.monotonic() >= deadline_s:
                    raise EnvironmentMissing(
                        f"port {port} is taken ({error.strerror}): stop what listens there, or give another port"
                    ) from error
        time.sleep(0.05)


def _free_port(avoid: int = 0) -> int:
    for _ in range(_FREE_PORT_TRIES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port != avoid:
            return port
    raise EnvironmentMissing("no free port on 127.0.0.1")


def _server_properties(data_dir: Path, port: int, controller_port: int, options: BrokerOptions = _USUAL) -> str:
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data_dir / "log"),
        "auto.create.topics.enable": "false",
        "message.max.bytes": str(16 * 1024 * 1024),
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # A trainer killed inside a transaction hides later records until this sweep finds it: 10 s by default.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
        # The cleaner's default buffer takes half of a 256 MB heap: stalls of 0.5 s were measured with it.
        "log.cleaner.dedupe.buffer.size": "16777216",
        "log.retention.ms": "-1",
        # A broker that was killed may register again only when its last life's session has run out: 9 s by default.
        "broker.session.timeout.ms": "4000",
        "broker.heartbeat.interval.ms": "500",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "2",
        "num.recovery.threads.per.data.dir": "2",
    }
    return "".join(f"{name}={value}\n" for name, value in {**settings, **options.properties}.items())


def _format(java: str, classpath: str, properties: Path, arguments: tuple[str, ...]) -> None:
    # A cluster id is 16 bytes in URL-safe base64 and must not look like an option.
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
    cluster = "A" + cluster[1:] if cluster.startswith("-") else cluster
    command = [java, *_JVM, "-cp", classpath, "kafka.tools.StorageTool"]
    command += ["format", "-t", cluster, "-c", str(properties), "--ignore-formatted", *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if result.returncode:
        raise EnvironmentMissing(f"formatting {properties.parent} failed:\n{(result.stdout + result.stderr)[-2000:]}")


def _launch(java: str, classpath: str, properties: Path, data_dir: Path, *, die_with_parent: bool) -> int:
    """Start java under a shell that writes its pid down; the pid."""
    logging_config = data_dir / "log4j2.properties"
    logging_config.write_bytes((_FILES / "log4j2.properties").read_bytes())
    pid_file = data_dir / "java.pid"
    pid_file.unlink(missing_ok=True)
    command = ["/bin/sh", "-c", _LIFE_LINE if die_with_parent else _DETACHED, "driftlog-broker"]
    command += [java, *_JVM, f"-Dlog4j2.configurationFile=file:{logging_config}", f"-Ddriftlog.log.dir={data_dir}"]
    command += ["-cp", classpath, "kafka.Kafka", str(properties)]
    environment = {**os.environ, "DRIFTLOG_PID_FILE": str(pid_file)}
    with (data_dir / "console.log").open("wb") as console:
        # A session of its own: Ctrl-C in the terminal ends the services first, the broker when they are done.
        shell = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if die_with_parent else subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
            env=environment,
        )
    if not die_with_parent:
        shell.wait(timeout=10.0)
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        if pid_file.exists() and (text := pid_file.read_text(encoding="ascii")).endswith("\n"):
            if die_with_parent:
                _life_lines[int(text)] = shell
            return int(text)
        time.sleep(0.005)
    shell.kill()
    shell.wait(timeout=10.0)
    raise EnvironmentMissing(f"the shell that starts java did not answer:\n{_last_lines(data_dir)}")


def _wait_until_ready(handle: BrokerHandle, asking: KafkaSettings, deadline_s: float) -> None:
    """Until a metadata request is answered. A broker that died or stays silent is an error with its last words."""
    data_dir = Path(handle.data_dir)
    trouble: LogUnavailable | None = None
    while time.monotonic() < deadline_s:
        if not _alive(handle.pid):
            end_process(handle.pid, timeout_s=0.0)
            raise EnvironmentMissing(f"the Kafka broker died at its start ({data_dir}):\n{_last_lines(data_dir)}")
        if _listens(handle.port):
            try:
                with closing(KafkaLogAdmin(asking)) as admin:
                    admin.existing_topics()
                return
            except LogUnavailable as error:
                trouble = error
        time.sleep(0.05)
    end_process(handle.pid, timeout_s=2.0)
    raise EnvironmentMissing(f"the Kafka broker does not answer ({trouble}):\n{_last_lines(data_dir)}")


def _last_lines(data_dir: Path, count: int = 15) -> str:
    lines: list[str] = []
    for name in ("console.log", "server.log"):
        path = data_dir / name
        if path.exists():
            found = path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
            lines += [f"{name}: {line}" for line in found]
    return "\n".join(lines) or "(it logged nothing)"


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def _alive(pid: int) -> bool:
    """Runs, and is not a zombie that nobody reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():  # not Linux
        return True
    try:
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_our_java(pid: int, data_dir: Path) -> bool:
    """The pid may have been given to another process meanwhile: never stop that one."""
    if not _alive(pid):
        return False
    command = Path(f"/proc/{pid}/cmdline")
    if command.parent.exists():
        return str(data_dir).encode() in command.read_bytes()
    command_line = ["ps", "-o", "command=", "-p", str(pid)]
    listed = subprocess.run(command_line, check=False, capture_output=True, text=True, timeout=10)
    return str(data_dir) in listed.stdout
