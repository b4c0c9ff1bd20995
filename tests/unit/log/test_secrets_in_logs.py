"""At DEBUG nothing that a configuration or a client of Kafka says holds a password."""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Iterator

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from infra import kafka_clients, logs
from infra.config import load_config
from infra.kafka_clients import KafkaSettings, build, common_config, consumer_config, producer_config
from schemas.errors import LogUnavailable

SECRET = "hush-4711"
SECURITY = {
    "security_protocol": "SASL_PLAINTEXT",
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_plain_username": "trainer",
    "sasl_plain_password": SECRET,
}


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    """What a service writes at DEBUG."""
    root, kafka = logging.getLogger(), logging.getLogger("kafka")
    handlers, level, kafka_level = root.handlers[:], root.level, kafka.level
    stream = io.StringIO()
    logs.configure("DEBUG", json=True, stream=stream, service="trainer", run="demo")
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    kafka.setLevel(kafka_level)


def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a client of each kind, built as ours are, ends with where nobody listens."""
    # Otherwise nothing of the client itself would be reached.
    monkeypatch.setattr(kafka_clients, "_preflight", lambda settings: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}", security=SECURITY)
    configs = (common_config(settings), consumer_config(settings), producer_config(settings))
    said = []
    for kind, config in zip((KafkaAdminClient, KafkaConsumer, KafkaProducer), configs, strict=True):
        with pytest.raises(LogUnavailable) as caught:
            build(kind, settings, {**config, "bootstrap_timeout_ms": 50})
        said.append(f"{caught.value} {settings!r}")
    return said


def test_clients_and_their_settings_at_debug_write_no_password(
    said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("tests.secrets")
    logs.event(logger, "configured", level=logging.DEBUG, config=repr(load_config(None)))
    for words in refusals(monkeypatch):
        logs.event(logger, "refused", level=logging.DEBUG, reason=words)

    assert said.getvalue().count('"event": "refused"') == 3
    assert SECRET not in said.getvalue()


def test_it_is_the_level_of_its_logger_that_keeps_the_client_from_writing_it(
    said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("kafka").setLevel(logging.DEBUG)

    refusals(monkeypatch)

    assert SECRET in said.getvalue()
