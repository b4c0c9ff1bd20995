"""Every variable of the environment that this project reads: addresses and credentials, never settings of a run.

A credential may be given by file: NAME_FILE names a file whose content is the value, so that it stands neither in
a process list nor in `docker inspect`. Values are never printed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ConfigError, EnvironmentMissing

KAFKA_VARIABLE = "DRIFTLOG_KAFKA"
KAFKA_PREFIX = "DRIFTLOG_KAFKA_"
METRICS_PORT_VARIABLE = "DRIFTLOG_METRICS_PORT"
METRICS_HOST_VARIABLE = "DRIFTLOG_METRICS_HOST"
FILE_SUFFIX = "_FILE"
MAX_SECRET_BYTES = 64 * 1024
"""a certificate chain is a few KiB; a log named by mistake is not"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable."""

    name: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable(name=KAFKA_VARIABLE, meaning="HOST:PORT[,HOST:PORT] of the broker, over `kafka.bootstrap_servers`"),
    Variable(name="MLFLOW_TRACKING_URI", meaning="address of MLflow, over `mlflow.uri`"),
    Variable(name=METRICS_PORT_VARIABLE, meaning="port on which a service answers /metrics, over `metrics.port`"),
    Variable(name=METRICS_HOST_VARIABLE, meaning="address it listens on, over `metrics.host`"),
    Variable(name="HOSTNAME", meaning="names the worker of `driftlog generate --worker @host`"),
)
"""beside the security settings of the Kafka client: kafka_variables"""


def kafka_variables(security_keys: Sequence[str]) -> tuple[str, ...]:
    """The name of each security setting of the Kafka client as a variable; each may end in _FILE.

    >>> kafka_variables(["sasl_plain_password"])
    ('DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD',)
    """
    return tuple(KAFKA_PREFIX + key.upper() for key in security_keys)


def is_known(name: str, security_keys: Sequence[str]) -> bool:
    """Whether this project reads the variable."""
    credentials = kafka_variables(security_keys)
    plain = {variable.name for variable in VARIABLES} | set(credentials)
    return name in plain or (name.endswith(FILE_SUFFIX) and name.removesuffix(FILE_SUFFIX) in credentials)


def kafka_security(
    configured: Mapping[str, str], environment: Mapping[str, str], security_keys: Sequence[str]
) -> dict[str, str]:
    """kafka.security with what the environment names in front of it. An empty variable is one that is not set.

    ConfigError: an unknown variable, with the nearest ones, or one given both ways. EnvironmentMissing: no such file.
    """
    found = dict(configured)
    given: dict[str, str] = {}
    known = kafka_variables(security_keys)
    for name, value in sorted(environment.items()):
        if not name.startswith(KAFKA_PREFIX) or not value:
            continue
        by_file = name not in known and name.endswith(FILE_SUFFIX)
        plain = name.removesuffix(FILE_SUFFIX) if by_file else name
        if plain not in known:
            near = difflib.get_close_matches(plain, known, n=3, cutoff=0.0)
            raise ConfigError(
                f"environment variable {name}: no setting of the Kafka client; the nearest are {', '.join(near)}"
            )
        if plain in given:
            raise ConfigError(f"environment variables {given[plain]} and {name} give the same setting: unset one")
        given[plain] = name
        found[plain.removeprefix(KAFKA_PREFIX).lower()] = _content(name, Path(value)) if by_file else value
    return found


def _content(name: str, path: Path) -> str:
    """The text of a secret file, without the line end an editor leaves."""
    try:
        if path.stat().st_size > MAX_SECRET_BYTES:
            raise ConfigError(f"{name}: {path} is larger than {MAX_SECRET_BYTES} bytes: it is no secret")
        text = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise EnvironmentMissing(f"{name}: {path} cannot be read: {reason}") from error
    if not text:
        raise ConfigError(f"{name}: {path} is empty")
    return text
