"""How every Kafka client of this project is built, and what its errors mean.

Guarantees: no client starts without the C checksum library; a failed start names its true cause within
bootstrap_timeout_s; every kafka-python error becomes one of schemas.errors. Secrets are never printed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kafka import KafkaProducer
from kafka import errors as kafka_errors
from kafka.codec import has_zstd
from kafka.record import util as record_util

from infra.kafka_security import SECURITY_KEYS as SECURITY_KEYS  # known from here: what a client may be told
from infra.kafka_security import check_files, check_security, refusal
from infra.kafka_sockets import ClosingNetClient
from schemas.errors import ConfigError, DriftlogError, EnvironmentMissing, LogUnavailable
from schemas.topics import MAX_MESSAGE_BYTES

Client = TypeVar("Client")

_NET_LOGGER = "kafka.net"
_OUTAGE_LOGGERS = (_NET_LOGGER, "kafka.cluster", "kafka.consumer.fetcher", "kafka.coordinator")
_CAPTURE_LOCK = threading.Lock()
_PREFLIGHT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """How to reach the broker, how long to wait for it, and how much to hold in memory."""

    bootstrap_servers: str
    """HOST:PORT, several separated by commas"""
    security: Mapping[str, str] = field(default_factory=dict, repr=False)
    """client settings of SECURITY_KEYS, from the environment"""
    bootstrap_timeout_s: float = 5.0
    request_timeout_s: float = 10.0
    delivery_timeout_s: float = 30.0
    """an unacknowledged record is reported as failed after this"""
    transaction_timeout_s: float = 10.0
    """the broker aborts a transaction after this; until then it hides what lies behind it from readers"""
    init_timeout_s: float = 30.0
    """how long a transactional writer tries to take over its identity"""
    session_timeout_s: float = 6.0
    """a silent group member is dropped after this; 6 is the least a broker accepts by default"""
    heartbeat_interval_s: float = 0.5
    """with the client's default of 3 s a second join stalls for as long"""
    reader_queue_records: int = 1_000
    reader_queue_bytes: int = 64 * 1024 * 1024
    in_flight_bytes: int = 64 * 1024 * 1024
    """the client's own buffer has no bound at all"""
    replication_factor: int = -1
    """of topics created by us; -1: the broker's default"""

    def __post_init__(self) -> None:
        server_addresses(self.bootstrap_servers)
        check_security(self.security)
        for name in ("bootstrap_timeout_s", "request_timeout_s", "delivery_timeout_s", "transaction_timeout_s"):
            if getattr(self, name) <= 1.0:
                raise ConfigError(f"kafka.{name} is {getattr(self, name)}: it must be above 1 second")
        if self.heartbeat_interval_s * 3 > self.session_timeout_s:
            raise ConfigError("kafka.heartbeat_interval_s must be at most a third of kafka.session_timeout_s")
        if self.reader_queue_records < 1 or self.reader_queue_bytes < 1 or self.in_flight_bytes < 1:
            raise ConfigError("kafka.reader_queue_records, reader_queue_bytes and in_flight_bytes must be positive")


def server_addresses(bootstrap_servers: str) -> list[tuple[str, int]]:
    """The (host, port) pairs of a bootstrap string; ConfigError names the part that is none."""
    addresses = []
    for part in bootstrap_servers.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"kafka.bootstrap_servers: {part.strip()!r} is not HOST:PORT")
        addresses.append((host.strip("[]"), int(port)))
    return addresses


def common_config(settings: KafkaSettings) -> dict[str, Any]:
    """What producers, consumers and admin clients are all told."""
    security: dict[str, Any] = dict(settings.security)
    if "ssl_check_hostname" in security:
        security["ssl_check_hostname"] = str(security["ssl_check_hostname"]).lower() not in ("false", "0", "no")
    return {
        "bootstrap_servers": [part.strip() for part in settings.bootstrap_servers.split(",")],
        "bootstrap_timeout_ms": int(settings.bootstrap_timeout_s * 1000),
        "request_timeout_ms": int(settings.request_timeout_s * 1000),
        # With the default of 30 s a consumer was still silent 18 s after the broker had come back.
        "reconnect_backoff_max_ms": 1_000,
        **security,
    }


def producer_config(settings: KafkaSettings) -> dict[str, Any]:
    """An idempotent producer with acks=all that sends at once. No serialisers: bytes in, bytes out."""
    return {
        **common_config(settings),
        "acks": "all",
        "enable_idempotence": True,
        "compression_type": "zstd",
        "linger_ms": 0,
        # One batch a partition and round trip: the default of 16 KiB would be one group at a time.
        "batch_size": 1024 * 1024,
        # Checked against the uncompressed record. The margin holds key and headers.
        "max_request_size": MAX_MESSAGE_BYTES + 64 * 1024,
        "max_block_ms": int(settings.request_timeout_s * 1000),
        "delivery_timeout_ms": int(settings.delivery_timeout_s * 1000),
        "request_timeout_ms": int(min(settings.request_timeout_s, settings.delivery_timeout_s) * 1000),
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }


def consumer_config(settings: KafkaSettings) -> dict[str, Any]:
    """A consumer of committed records that never commits, resets or decodes by itself."""
    return {
        **common_config(settings),
        "isolation_level": "read_committed",
        "enable_auto_commit": False,
        # Never a jump: a position outside the log is an error that we turn into one with the missing range.
        "auto_offset_reset": "none",
        "allow_auto_create_topics": False,
        # A group that is joined right after its topic was made may see no partitions yet; with the default of five
        # minutes it would sit there that long.
        "metadata_max_age_ms": 5_000,
        "fetch_max_wait_ms": 500,
        "fetch_min_bytes": 1,
        "fetch_max_bytes": min(32 * 1024 * 1024, max(settings.reader_queue_bytes, 1024 * 1024)),
        "max_partition_fetch_bytes": 4 * 1024 * 1024,
        "metrics_enabled": False,
    }


def build(kind: Callable[..., Client], settings: KafkaSettings, config: Mapping[str, Any]) -> Client:
    """Construct a client. EnvironmentMissing: it can never work like this; LogUnavailable: it may later."""
    require_codecs()
    check_files(settings.security)
    _preflight(settings)
    built: list[ClosingNetClient] = []

    def net_client(**kwargs: Any) -> Any:
        client = ClosingNetClient(**kwargs)
        built.append(client)
        return client

    def give_up() -> None:
        for client in built:
            client.stop_trying()

    with _bootstrap_causes(give_up) as causes:
        try:
            return kind(**config, kafka_client=net_client)
        except kafka_errors.KafkaError as error:
            for client in built:  # its I/O thread would go on for ever
                client.close()
            raise _bootstrap_error(settings, causes, error) from error


def require_codecs() -> None:
    """The C libraries without which the client is 20 to 80 times slower, or cannot compress at all."""
    if record_util.crc32c_c is None:
        raise EnvironmentMissing(
            "the package `crc32c` is missing: pip install crc32c (checksums in pure Python are too slow)"
        )
    if not has_zstd():
        raise EnvironmentMissing(
            "the package `zstandard` is missing: pip install zstandard (records are compressed with zstd)"
        )


def is_refusal(error: BaseException) -> bool:
    """The broker knows this user, and does not let it.

    A user that may write no topic at all is refused an id for its producer, in an error that only names the reason.
    """
    return isinstance(error, kafka_errors.AuthorizationError) or "AuthorizationFailedError" in str(error)


def explain(error: BaseException, what: str) -> DriftlogError:
    """The error of our own tree for one of the client's. `what` says what was tried, and where."""
    if is_refusal(error):
        return EnvironmentMissing(
            f"{what}: the broker refuses it ({error}); grant this user the right (`driftlog acl` makes the rules), "
            "then start again"
        )
    if isinstance(error, kafka_errors.SaslAuthenticationFailedError):
        return EnvironmentMissing(f"{what}: authentication failed ({error}); check kafka.security")
    if isinstance(error, kafka_errors.UnknownTopicOrPartitionError):
        return EnvironmentMissing(f"{what}: no such topic or partition ({error}); create the run's topics first")
    return LogUnavailable(f"{what}: {error}")


def abandon(producer: KafkaProducer, *, limit_s: float) -> None:
    """Close a producer in bounded time; what it still holds fails. Public close() gives up half-way on a time-out."""
    sender = producer._sender
    sender.force_close()
    sender.join(limit_s)
    if not sender.is_alive():
        producer.close(timeout=limit_s)
    else:  # stuck in a request: a daemon, gone with the process; its own exit hook would raise then
        producer._unregister_cleanup()
        producer._closed = True


def quiet_client_loggers() -> None:
    """Let only real errors of kafka-python through: called once by a service's main, never on import.

    An outage of seconds fills pages with refused attempts, reported as errors; ours is one LogUnavailable instead.
    What a consumer only logs (a topic that it may not read) is asked for at its start.
    """
    logging.getLogger("kafka").setLevel(logging.ERROR)
    for name in _OUTAGE_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


# ---------------------------------------------------------------- why a bootstrap failed


def _preflight(settings: KafkaSettings) -> None:
    """DNS and TCP by hand: at once and with the cause, where the client would retry in silence."""
    if "proxy_url" in settings.security:
        return
    causes = []
    for host, port in server_addresses(settings.bootstrap_servers):
        try:
            with socket.create_connection((host, port), timeout=_PREFLIGHT_TIMEOUT_S):
                return
        except socket.gaierror as error:
            causes.append(f"{host}:{port}: host name not known ({error.strerror})")
        except ConnectionRefusedError:
            causes.append(f"{host}:{port}: connection refused (nothing listens there)")
        except OSError as error:
            causes.append(f"{host}:{port}: {error.strerror or error}")
    raise LogUnavailable(f"no Kafka broker reachable: {'; '.join(causes)}. Start one, or set kafka.bootstrap_servers")


class _Causes(logging.Handler):
    """Keeps the exceptions that the client only logs, and stops its tries when none can succeed."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        super().__init__(level=logging.WARNING)
        self.seen: list[str] = []
        self._give_up = give_up

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        self.seen += [f"{type(a).__name__}: {a}" for a in arguments if isinstance(a, BaseException)]
        if refusal(self.seen) is not None:
            self._give_up()


@contextmanager
def _bootstrap_causes(give_up: Callable[[], None]) -> Iterator[_Causes]:
    """Listen to what the client's connections log while it starts; one start at a time."""
    logger = logging.getLogger(_NET_LOGGER)
    handler = _Causes(give_up)
    with _CAPTURE_LOCK:
        level, propagate = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        try:
            yield handler
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def _bootstrap_error(settings: KafkaSettings, causes: _Causes, error: BaseException) -> DriftlogError:
    user = settings.security.get("sasl_plain_username")
    where = f"cannot start a Kafka client for {settings.bootstrap_servers}" + (f" as user {user!r}" if user else "")
    refused = refusal(causes.seen)
    if refused is not None:
        return EnvironmentMissing(f"{where}: {refused}")
    told = [words for words in causes.seen if "Unable to bootstrap" not in words]
    cause = told[-1] if told else f"{type(error).__name__}: {error}"
    if "socket disconnected" in cause:
        cause += "; the broker hangs up on every try: it may want another kafka.security.security_protocol, see its log"
    return LogUnavailable(f"{where} within {settings.bootstrap_timeout_s:g} s: {cause}")
