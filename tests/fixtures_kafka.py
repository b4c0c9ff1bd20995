"""One embedded Kafka broker for the whole test session, gone with it however the session ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import local_broker
from infra.kafka_clients import quiet_client_loggers
from schemas.errors import EnvironmentMissing


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    """The broker's jars. Where java or maven is missing the tests are skipped, except in CI."""
    # As a service does at its start. Also: pytest keeps log records, and with them the sockets of refused connections.
    quiet_client_loggers()
    try:
        return local_broker.ensure_jars(local_broker.default_cache_dir())
    except EnvironmentMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kafka_broker(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[local_broker.BrokerHandle]:
    """A running broker."""
    data_dir = tmp_path_factory.mktemp("kafka")
    handle = local_broker.start(data_dir, jars=kafka_jars, die_with_parent=True)
    yield handle
    local_broker.stop(data_dir)
