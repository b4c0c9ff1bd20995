"""A service command as a container runs it: alone, against a broker that lacks something, until it is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driftlog import life_sign
from driftlog.__main__ import main
from infra.local_broker import BrokerHandle

pytestmark = [pytest.mark.integration, pytest.mark.kafka]
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


def coordinator(tmp_path: Path, broker: str, *words: str) -> subprocess.Popen[str]:
    """`driftlog coordinate` of the run `alone`, which imports least."""
    directory = f'run.directory="{tmp_path / "runs"}"'
    return subprocess.Popen(
        [sys.executable, "-m", "driftlog", "coordinate", "--run", "alone", "--set", directory, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DRIFTLOG_KAFKA": broker}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and words."""
    try:
        _, words = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, words


def test_without_a_broker_it_waits_and_ends_with_1(tmp_path: Path) -> None:
    code, words = ended(coordinator(tmp_path, "127.0.0.1:1", "--wait-s", "0.6"))

    assert code == 1
    assert "event=waiting_for_the_log" in words or "waiting_for_the_log" in words
    assert "127.0.0.1:1: connection refused" in words
    assert "(waited 0.6 s)" in words


def test_without_topics_it_says_which_command_makes_them_and_ends_with_2(
    tmp_path: Path, kafka_broker: BrokerHandle
) -> None:
    code, words = ended(coordinator(tmp_path, kafka_broker.bootstrap_servers, "--wait-s", "0"))

    assert code == 2
    assert "has no topic alone." in words
    assert "`driftlog prepare`" in words


def test_it_is_healthy_while_it_runs_and_ends_with_0_when_told_to_stop(
    tmp_path: Path, kafka_broker: BrokerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIFTLOG_KAFKA", kafka_broker.bootstrap_servers)
    assert main(["topics", "--run", "alone", "--json"]) == 0
    sign = tmp_path / "alive"
    process = coordinator(tmp_path, kafka_broker.bootstrap_servers, "--life-sign", str(sign))
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not sign.exists() and time.monotonic() < deadline_s and process.poll() is None:
            time.sleep(0.05)
        healthy = life_sign.main([str(sign), "60"], time.time())
        process.send_signal(signal.SIGTERM)
    finally:
        code, words = ended(process)

    assert healthy == 0, words
    assert code == 0, words
