"""A compose file as `docker compose` would see it: variables put in, anchors merged, profiles known. Reads, judges not.

Only what the files here use is understood: ${NAME}, ${NAME:-default}, ${NAME:?words} and $$.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?:(:-|:\?)([^}]*))?\})")
_SECONDS = re.compile(r"(?:(\d+)m)?(?:(\d+)s)?")


class ComposeError(ValueError):
    """The file cannot be read as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One volume or bind mount of a service."""

    source: str
    target: str
    read_only: bool

    @property
    def is_bind(self) -> bool:
        """A path of the host, not a named volume."""
        return self.source.startswith((".", "/", "~"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service, with the parts that are asked for; `raw` is all of it."""

    name: str
    raw: Mapping[str, Any]

    @property
    def profiles(self) -> frozenset[str]:
        """Profiles that start it; none: always."""
        return frozenset(self.raw.get("profiles", ()))

    @property
    def command(self) -> list[str]:
        """Its arguments."""
        command = self.raw.get("command", [])
        return command.split() if isinstance(command, str) else [str(word) for word in command]

    @property
    def environment(self) -> dict[str, str]:
        """Its variables; one without a value is taken from outside, where it is set."""
        given = self.raw.get("environment", {})
        if isinstance(given, list):
            given = dict(entry.partition("=")[::2] for entry in given)
        return {name: str(value) for name, value in given.items() if value is not None}

    @property
    def depends_on(self) -> dict[str, str]:
        """Service -> condition."""
        given = self.raw.get("depends_on", {})
        if isinstance(given, list):
            return dict.fromkeys(given, "service_started")
        return {name: entry.get("condition", "service_started") for name, entry in given.items()}

    @property
    def healthcheck(self) -> list[str]:
        """The command of its health check; empty: none."""
        test = self.raw.get("healthcheck", {}).get("test", [])
        return list(test[1:]) if isinstance(test, list) else ["sh", "-c", test]

    @property
    def mounts(self) -> list[Mount]:
        """Its volumes and bind mounts."""
        found = []
        for entry in self.raw.get("volumes", ()):
            source, target, *mode = str(entry).split(":")
            found.append(Mount(source=source, target=target, read_only="ro" in mode))
        return found

    @property
    def target(self) -> str | None:
        """The stage of the Dockerfile it is built from; None: somebody else's image."""
        build = self.raw.get("build")
        return None if build is None else str(build.get("target", ""))

    @property
    def is_ours(self) -> bool:
        """It runs a command of driftlog."""
        image = str(self.raw.get("image", ""))
        return self.target in ("cpu", "gpu") or "driftlog/cpu" in image or "driftlog/gpu" in image

    @property
    def is_for_gpu(self) -> bool:
        """Its image is the one with vLLM."""
        return self.target == "gpu" or "driftlog/gpu" in str(self.raw.get("image", ""))

    @property
    def replicas(self) -> int:
        """How many containers."""
        return int(self.raw.get("deploy", {}).get("replicas", 1))

    @property
    def stop_grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL; 10 when nothing is said."""
        return seconds(self.raw.get("stop_grace_period", "10s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """A whole file."""

    path: Path
    raw: Mapping[str, Any]
    services: Mapping[str, Service]

    def active(self, profiles: Sequence[str]) -> dict[str, Service]:
        """The services that `docker compose up` starts under these profiles."""
        return {
            name: service
            for name, service in self.services.items()
            if not service.profiles or service.profiles & set(profiles)
        }

    @property
    def profiles(self) -> list[str]:
        """Every profile that is named."""
        return sorted({profile for service in self.services.values() for profile in service.profiles})

    def names(self, kind: str) -> set[str]:
        """What is declared at the top: volumes, secrets, configs, networks."""
        return set(self.raw.get(kind) or {})


def read_compose(path: Path, environment: Mapping[str, str]) -> Compose:
    """Read a file. ComposeError names what is wrong."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ComposeError(f"{path}: not YAML: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("services"), dict):
        raise ComposeError(f"{path}: no services")
    filled = interpolated(raw, environment)
    services = {name: Service(name=name, raw=entry) for name, entry in filled["services"].items()}
    return Compose(path=path, raw=filled, services=services)


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """The value with the variables of every text put in; keys stay as they are."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _value_of(match, environment), value)
    if isinstance(value, dict):
        return {key: interpolated(entry, environment) for key, entry in value.items()}
    if isinstance(value, list):
        return [interpolated(entry, environment) for entry in value]
    return value


def variables_of(text: str) -> set[str]:
    """Names of the variables that a file takes from outside."""
    return {name for dollar, name, _, _ in _VARIABLE.findall(text) if not dollar}


def read_env_file(path: Path) -> dict[str, str]:
    """NAME=value a line, # comments."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#"))


def seconds(text: str) -> float:
    """A duration of the compose file: 90s, 2m, 1m30s."""
    match = _SECONDS.fullmatch(str(text))
    if match is None or not text:
        raise ComposeError(f"{text!r} is no duration like 90s or 1m30s")
    return 60.0 * int(match[1] or 0) + int(match[2] or 0)


def start_order(services: Mapping[str, Service]) -> list[Service]:
    """Every service after those it depends on. ComposeError names a circle."""
    ordered: list[Service] = []
    open_: set[str] = set()

    def visit(name: str) -> None:
        if name in open_:
            raise ComposeError(f"depends_on goes in a circle through {name}")
        service = services.get(name)
        if service is None or service in ordered:
            return
        open_.add(name)
        for other in service.depends_on:
            visit(other)
        open_.remove(name)
        ordered.append(service)

    for name in services:
        visit(name)
    return ordered


def texts(value: Any) -> Iterator[str]:
    """Every text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from texts(entry)


def _value_of(match: re.Match[str], environment: Mapping[str, str]) -> str:
    dollar, name, operator, words = match.groups()
    if dollar:
        return "$"
    value = environment.get(name, "")
    if value or operator is None:
        return value
    if operator == ":?":
        raise ComposeError(f"variable {name} must be set: {words}")
    return str(words)
