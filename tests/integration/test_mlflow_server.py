"""The tracker through `mlflow server`: what a server does otherwise than a database, and what it may refuse."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from consumers.offline.mirror import compare
from infra.mlflow_access import MlflowSettings
from infra.mlflow_reading import read_mirror
from infra.mlflow_tracker import MlflowTracker
from schemas.errors import TrackerUnavailable
from tests.fakes.projected_log import ORIGIN, ProjectedLog, expected_of, project
from tests.fakes.virtual_clock import VirtualClock

_ALLOWED = "localhost:{port}"
_START_S = 120


@pytest.fixture(scope="module")
def server(mlflow_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a server on an empty database; it answers to `localhost` and no other name."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "mlflow.db").write_bytes(mlflow_tables.read_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port),
        "--workers", "1", "--allowed-hosts", _ALLOWED.format(port=port),
    ]  # fmt: skip
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        _await_health(process, port, folder / "log")
        yield port
    finally:
        os.killpg(process.pid, 9)
        process.wait(timeout=30)


def _await_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(_START_S):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the server ended: {log.read_text()[-2_000:]}") from None
    raise AssertionError(f"no answer for {_START_S} s: {log.read_text()[-2_000:]}")


@pytest.mark.slow
def test_a_server_holds_what_the_log_says_after_a_live_projection_and_after_a_rebuild(server: int) -> None:
    log = ProjectedLog()
    for version in (1, 2):
        log.full_step(version, at_s=10 * version, reward=version / 10)
    log.end(2, at_s=30)
    settings = MlflowSettings(tracking_uri=f"http://localhost:{server}", experiment="served")
    for rebuild in (False, True):
        project(log, MlflowTracker(settings, log.clock), rebuild=rebuild).close()
        expected = expected_of(log)
        there = read_mirror(settings, "demo", expected.mirror["run/tag/log"])

        assert compare(expected.mirror, there.entries) == []


@pytest.mark.slow
def test_a_server_that_refuses_the_host_is_told_as_such_once(server: int, caplog: pytest.LogCaptureFixture) -> None:
    settings = MlflowSettings(tracking_uri=f"http://127.0.0.1:{server}", experiment="served")
    with pytest.raises(TrackerUnavailable, match=rf"refuse the Host header '127\.0\.0\.1:{server}'.*--allowed-hosts"):
        MlflowTracker(settings, VirtualClock()).start(ORIGIN, [])

    log = ProjectedLog()
    log.full_step(1, at_s=1)
    service = project(log, MlflowTracker(settings, log.clock))
    for _ in range(5):
        log.clock.advance(60)
        service.step()
        service.step()

    assert service.failures >= 3
    assert [record.message for record in caplog.records] == ["tracker_unavailable"]


@pytest.mark.slow
def test_a_server_that_is_not_there_is_unavailable_within_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        settings = MlflowSettings(tracking_uri=f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(TrackerUnavailable, match="mlflow start"):
            MlflowTracker(settings, VirtualClock()).start(ORIGIN, [])
