"""How Kafka clients are built, without any broker."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.record import util as record_util

from infra import kafka_clients
from infra.kafka_clients import KafkaSettings, build, common_config, consumer_config, explain, producer_config
from infra.kafka_reader import missing_range
from schemas.errors import ConfigError, EnvironmentMissing, LogUnavailable


def settings(servers: str = "127.0.0.1:1", **changes: object) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=servers, **{"bootstrap_timeout_s": 1.1, **changes})  # type: ignore[arg-type]


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A port that accepts, and answers every connection with these bytes (or not at all) before it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                held.append(connection)
                if answer is not None:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for connection in held:
        connection.close()


def test_a_server_without_port_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="'broker' is not HOST:PORT"):
        settings("broker")


def test_several_servers_and_ipv6_are_understood() -> None:
    assert kafka_clients.server_addresses("a:1, [::1]:2") == [("a", 1), ("::1", 2)]


def test_an_unknown_security_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'ssl_ca_file'; did you mean 'ssl_cafile'"):
        settings(security={"ssl_ca_file": "/ca.pem"})


def test_secrets_are_not_in_the_repr() -> None:
    shown = repr(settings(security={"sasl_plain_password": "hunter2"}))
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"request_timeout_s": 0.5}, "request_timeout_s"),
        ({"heartbeat_interval_s": 3.0}, "a third"),
        ({"reader_queue_records": 0}, "must be positive"),
    ],
)
def test_impossible_limits_are_configuration_errors(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**change)


def test_security_settings_are_passed_through_with_their_types() -> None:
    config = common_config(settings(security={"security_protocol": "SSL", "ssl_check_hostname": "false"}))
    assert config["security_protocol"] == "SSL"
    assert config["ssl_check_hostname"] is False


def test_consumers_never_commit_reset_or_decode_by_themselves() -> None:
    config = consumer_config(settings())
    assert config["enable_auto_commit"] is False
    assert config["auto_offset_reset"] == "none"
    assert config["isolation_level"] == "read_committed"
    assert not [key for key in config if "deserializer" in key]


def test_producers_are_idempotent_and_send_at_once() -> None:
    config = producer_config(settings())
    assert (config["acks"], config["enable_idempotence"], config["linger_ms"]) == ("all", True, 0)
    assert not [key for key in config if "serializer" in key]


def test_without_the_c_checksum_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_util, "crc32c_c", None)
    with pytest.raises(EnvironmentMissing, match="pip install crc32c"):
        build(KafkaAdminClient, settings(), common_config(settings()))


def test_without_zstd_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_clients, "has_zstd", lambda: False)
    with pytest.raises(EnvironmentMissing, match="pip install zstandard"):
        build(KafkaAdminClient, settings(), common_config(settings()))


def test_a_refused_connection_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    refused = settings(f"127.0.0.1:{port}")
    with pytest.raises(LogUnavailable, match=f"127.0.0.1:{port}: connection refused"):
        build(KafkaAdminClient, refused, common_config(refused))


def test_an_unknown_host_is_named() -> None:
    unknown = settings("no-such-host.invalid:9092")
    with pytest.raises(LogUnavailable, match="no-such-host.invalid:9092: host name not known"):
        build(KafkaAdminClient, unknown, common_config(unknown))


def test_a_server_that_never_answers_is_unavailable_within_the_limit() -> None:
    threads_before = threading.active_count()
    with listener(None) as port:
        silent = settings(f"127.0.0.1:{port}")
        with pytest.raises(LogUnavailable, match=r"within 1.1 s"):
            build(KafkaAdminClient, silent, common_config(silent))
    assert threading.active_count() == threads_before


# The client leaves the socket of a failed handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_tls_against_a_plain_port_is_an_environment_error() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        tls = settings(f"127.0.0.1:{port}", security={"security_protocol": "SSL"})
        with pytest.raises(EnvironmentMissing, match="does not speak TLS"):
            build(KafkaAdminClient, tls, common_config(tls))
    gc.collect()


def test_plain_text_against_a_tls_port_is_an_environment_error() -> None:
    alert = bytes.fromhex("15030300020250")  # what a TLS server says to anything else
    with listener(alert) as port:
        plain = settings(f"127.0.0.1:{port}")
        with pytest.raises(EnvironmentMissing, match="the broker speaks TLS"):
            build(KafkaAdminClient, plain, common_config(plain))


def test_listening_for_the_cause_leaves_the_loggers_as_they_were() -> None:
    logger = logging.getLogger("kafka.net")
    before = (logger.level, logger.propagate, list(logger.handlers))
    test_a_server_that_never_answers_is_unavailable_within_the_limit()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_client_loggers_are_quiet_only_when_asked() -> None:
    names = ("kafka", *kafka_clients._OUTAGE_LOGGERS)
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.NOTSET)
        assert logging.getLogger("kafka.cluster").isEnabledFor(logging.ERROR)
        kafka_clients.quiet_client_loggers()
        assert not logging.getLogger("kafka.cluster").isEnabledFor(logging.ERROR)
        assert logging.getLogger("kafka.producer.sender").isEnabledFor(logging.ERROR)
        assert not logging.getLogger("kafka.producer.sender").isEnabledFor(logging.WARNING)
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (kafka_errors.TopicAuthorizationFailedError(), EnvironmentMissing),
        (kafka_errors.SaslAuthenticationFailedError(), EnvironmentMissing),
        (kafka_errors.UnknownTopicOrPartitionError(), EnvironmentMissing),
        (kafka_errors.KafkaTimeoutError(), LogUnavailable),
    ],
)
def test_client_errors_become_ours(error: Exception, kind: type[Exception]) -> None:
    explained = explain(error, "topic x")
    assert type(explained) is kind
    assert "topic x" in str(explained)


def test_a_missing_range_is_named_with_its_size() -> None:
    error = missing_range([(("t", 0), 1000, 1500, 2000)])
    assert "records 1000-1499 are no longer in the log (it starts at 1500): 500 lost" in str(error)
