"""Where the log of a run is: a broker that was named, the run's own one, or the run's own one started for a while."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from driftlog.environment_variables import KAFKA_VARIABLE, kafka_security
from driftlog.run_directory import RunDirectory
from schemas.errors import EnvironmentMissing, LogUnavailable

if TYPE_CHECKING:
    from infra.config import Config
    from infra.kafka_clients import KafkaSettings

_STARTER_WAIT_S = 60.0


def external_bootstrap(config: Config, environment: Mapping[str, str] = os.environ) -> str | None:
    """The broker that the environment or the configuration names; None: the embedded one is meant."""
    return environment.get(KAFKA_VARIABLE) or config.kafka.bootstrap_servers or None


def kafka_settings(config: Config, bootstrap: str, environment: Mapping[str, str] = os.environ) -> KafkaSettings:
    """The clients' settings of this configuration, with the credentials of the environment."""
    from infra.kafka_clients import SECURITY_KEYS, KafkaSettings

    kafka = config.kafka
    return KafkaSettings(
        bootstrap_servers=bootstrap,
        security=kafka_security(kafka.security, environment, SECURITY_KEYS),
        request_timeout_s=kafka.request_timeout_s,
        delivery_timeout_s=kafka.delivery_timeout_s,
        transaction_timeout_s=kafka.transaction_timeout_s,
        session_timeout_s=kafka.session_timeout_s,
        reader_queue_records=kafka.reader_queue_records,
        reader_queue_bytes=kafka.reader_queue_bytes,
        in_flight_bytes=kafka.in_flight_bytes,
    )


def running_bootstrap(config: Config, run: RunDirectory) -> str:
    """The broker of a run, which must be there already. EnvironmentMissing says how to get one."""
    named = external_bootstrap(config)
    if named is not None:
        return named
    from infra import local_broker

    handle = local_broker.status(run.broker)
    if handle is None:
        raise EnvironmentMissing(
            f"no broker runs for {run.name!r}: start one with `driftlog broker start --run {run.name}`, or name yours "
            f"with --set kafka.bootstrap_servers=HOST:PORT or {KAFKA_VARIABLE}"
        )
    return handle.bootstrap_servers


@contextmanager
def reading_broker(config: Config, run: RunDirectory) -> Iterator[str]:
    """The broker of a run for as long as it is read; an embedded one that is down is started, and stopped after."""
    named = external_bootstrap(config)
    if named is not None:
        _require_answer(config, named)
        yield named
        return
    from infra import local_broker

    if not (run.broker / "log").is_dir():
        raise EnvironmentMissing(
            f"run {run.name!r} has no log in {run.broker}: it never began, or its broker was another"
        )
    handle = local_broker.status(run.broker)
    if handle is not None:
        yield handle.bootstrap_servers
        return
    with _sole_starter(run):
        handle = local_broker.status(run.broker)
        ours = handle is None
        if handle is None:
            jars = local_broker.ensure_jars(local_broker.default_cache_dir())
            handle = local_broker.start(run.broker, jars=jars, die_with_parent=True)
        try:
            yield handle.bootstrap_servers
        finally:
            if ours:
                local_broker.stop(run.broker)


def _require_answer(config: Config, bootstrap: str) -> None:
    """A broker that is away when a command begins is the user's to put right: exit 2, not a failure of the run."""
    from infra.kafka_admin import KafkaLogAdmin

    try:
        KafkaLogAdmin(kafka_settings(config, bootstrap)).close()
    except LogUnavailable as error:
        raise EnvironmentMissing(str(error)) from error


@contextmanager
def _sole_starter(run: RunDirectory) -> Iterator[None]:
    """Two readers at once must not both start the broker."""
    deadline_s = time.monotonic() + _STARTER_WAIT_S
    with (run.broker / "reader.lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise EnvironmentMissing(
                        f"another command reads run {run.name!r} with a broker of its own; try again when it is done"
                    ) from None
                time.sleep(0.1)
        yield
