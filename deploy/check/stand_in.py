"""Containers of a compose file as processes of this machine: same command, same environment, addresses and paths of
its own. Kept: environment (nothing of the caller's leaks in), working directory, volumes, read-only mounts where the
kernel allows a mount namespace. Not kept: images, users, networks, read-only root, limits.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deploy.check.compose import Compose, Mount, Service

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
_READ_ONLY = 'for v in $READ_ONLY; do mount --bind "$v" "$v"; mount -o remount,ro,bind "$v"; done; exec "$@"'
WORKING_DIRECTORIES = {"cpu": "/var/lib/driftlog", "mlflow": "/var/lib/mlflow"}
ENTRY_POINTS = {"cpu": "driftlog", "mlflow": str(ROOT / "deploy" / "mlflow-server")}
HEALTH_LIMIT_S = 20.0


class CheckFailed(AssertionError):
    """The stack did not do what the file promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the processes of one check live, and what stands for what."""

    compose: Compose
    folder: Path
    addresses: Mapping[str, str]
    """name:port of the compose network -> host:port here"""
    replaced: Mapping[str, str]
    """environment variable -> its value here: what no address or path can say (a database of another kind)"""

    def volume(self, name: str) -> Path:
        """The folder that stands for a named volume."""
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def secret(self, name: str) -> Path:
        """The file that stands for a secret; its content is of no use outside."""
        path = self.folder / "secrets" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(f"not-the-{name}\n", encoding="ascii")
        return path


class Container:
    """One container of one service. State: its process."""

    def __init__(self, stage: Stage, service: Service, number: int = 1) -> None:
        self.service = service
        self.name = service.name if service.replicas == 1 else f"{service.name}-{number}"
        self._stage = stage
        self._root = stage.folder / "containers" / self.name
        self._ports = {"9464": str(free_port())}
        self.log = self._root / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.healthy_after_s: float | None = None
        self._started_s = 0.0

    def start(self, *command: str) -> None:
        """Start it, with its own command or another (as `docker compose run`)."""
        target = self.service.target
        assert target is not None
        (self._root / "tmp").mkdir(parents=True, exist_ok=True)
        for old in (self._root / "tmp").iterdir():  # a tmpfs is empty when a container starts
            if old.is_file():
                old.unlink()
        words = [self._here(word) for word in (command or tuple(self.service.command))]
        environment = self.environment()
        line = [ENTRY_POINTS[target], *words]
        read_only = [str(self._stage.volume(mount.source)) for mount in self._volumes() if mount.read_only]
        if read_only and can_mount():
            environment["READ_ONLY"] = " ".join(read_only)
            line = ["unshare", "--mount", "sh", "-euc", _READ_ONLY, "sh", *line]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                line, cwd=self._working_directory(), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._started_s = time.monotonic()
        self.healthy_after_s = None

    def ask(self) -> bool:
        """Run its health check once; True when it passes."""
        words = [self._here(word) for word in self.service.healthcheck]
        asked = subprocess.run(
            words, cwd=self._working_directory(), env=self.environment(), capture_output=True, check=False,
            timeout=HEALTH_LIMIT_S,
        )  # fmt: skip
        if asked.returncode == 0 and self.healthy_after_s is None:
            self.healthy_after_s = round(time.monotonic() - self._started_s, 1)
        return asked.returncode == 0

    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def terminate(self) -> None:
        """As `docker compose stop` begins."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Whatever it left, now."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=10)

    def last_words(self) -> str:
        """The end of what it said."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:] if self.log.exists() else ""

    def environment(self) -> dict[str, str]:
        """What the container would have, of its image and of the file, at the addresses of this machine."""
        image = stage_environment(DOCKERFILE.read_text(encoding="utf-8"), self.service.target or "")
        own = {
            name: value if name == "MLFLOW_SERVER_ALLOWED_HOSTS" else self._here(value)
            for name, value in {**image, **self.service.environment}.items()
        }
        own |= {name: value for name, value in self._stage.replaced.items() if name in own}
        own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
        own["HOSTNAME"] = self.name
        return own

    def _here(self, text: str) -> str:
        """The text with addresses, ports and paths of this machine."""
        for there, here in self._stage.addresses.items():
            host, port = there.rsplit(":", 1)
            text = re.sub(rf"(?<![\w.-]){re.escape(there)}(?!\d)", here, text)
            if host == self.service.name:
                own_port = here.rsplit(":", 1)[1]
                text = re.sub(rf"^{port}$|(?<=127\.0\.0\.1:){port}(?!\d)", own_port, text)
        text = self._ports.get(text, text).replace("0.0.0.0", "127.0.0.1")
        for there, path in self._paths():
            if text == there or text.startswith(there + "/"):
                return str(path) + text[len(there) :]
        return text

    def _paths(self) -> list[tuple[str, Path]]:
        found = [(mount.target, self._stage.volume(mount.source)) for mount in self._volumes()]
        found += [
            (entry["target"], (self._stage.compose.path.parent / self._file("configs", entry["source"])).resolve())
            for entry in self.service.raw.get("configs", ())
        ]
        found += [(f"/run/secrets/{name}", self._stage.secret(name)) for name in self.service.raw.get("secrets", ())]
        return [*found, ("/tmp", self._root / "tmp")]

    def _file(self, kind: str, name: str) -> str:
        return str(self._stage.compose.raw[kind][name]["file"])

    def _volumes(self) -> list[Mount]:
        return [mount for mount in self.service.mounts if not mount.is_bind]

    def _working_directory(self) -> Path:
        """A folder in which relative paths lead to the volumes."""
        inside = WORKING_DIRECTORIES[self.service.target or ""]
        path = self._root / "work"
        path.mkdir(parents=True, exist_ok=True)
        for mount in self._volumes():
            link = path / os.path.relpath(mount.target, inside)
            if not link.is_symlink():
                link.symlink_to(self._stage.volume(mount.source))
        return path


def stage_environment(dockerfile: str, stage: str) -> dict[str, str]:
    """What ENV of a stage, and of those it is made from, sets."""
    found: dict[str, dict[str, str]] = {}
    current = ""
    for line in dockerfile.replace("\\\n", " ").splitlines():
        words = line.split(maxsplit=1)
        if words[:1] == ["FROM"] and " AS " in line:
            base, current = words[1].split(" AS ")
            found[current] = dict(found.get(base, {}))
        elif words[:1] == ["ENV"]:
            found[current] |= dict(word.partition("=")[::2] for word in shlex.split(words[1]))
    return found.get(stage, {})


@cache
def can_mount() -> bool:
    """Whether this user may have mounts of its own."""
    try:
        probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
