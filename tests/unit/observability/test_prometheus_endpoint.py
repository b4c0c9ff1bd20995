"""The HTTP side: two pages, a verdict on the loop, and a port that is taken stops nobody."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.prometheus_endpoint import Endpoint, Pulse, exposition
from infra.readings import Readings
from tests import tree_rules as rules

ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def opened(pulse: Pulse, now_s: float = 0.0) -> Iterator[str]:
    readings = Readings()
    readings.put("driftlog_open_groups", 3)
    endpoint = Endpoint(
        ("127.0.0.1", 0), lambda: exposition(readings, {"run": "r"}, process=True), lambda: pulse.verdict(now_s)
    )
    endpoint.start()
    try:
        port = endpoint.wait_until_open(10.0)
        assert port is not None
        yield f"http://127.0.0.1:{port}"
    finally:
        endpoint.close()


def ask(address: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(address, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_has_the_numbers_and_the_memory_of_the_process_and_every_other_page_says_what_there_is() -> None:
    with opened(Pulse(60.0, 0.0)) as address:
        code, page = ask(f"{address}/metrics?x=1")
        assert code == 200
        assert 'driftlog_open_groups{run="r"} 3.0' in page
        assert "process_resident_memory_bytes" in page
        assert ask(f"{address}/metrics", "HEAD") == (200, "")
        assert ask(f"{address}/") == (404, "there are /metrics and /healthz\n")


def test_healthz_follows_the_loop() -> None:
    pulse = Pulse(60.0, 0.0)
    with opened(pulse, now_s=100.0) as address:
        assert ask(f"{address}/healthz") == (503, "the service prepares itself: its loop has not begun\n")
        pulse.turned(99.0)
        assert ask(f"{address}/healthz") == (200, "the loop turned 1.0 s ago\n")
        pulse.turned(30.0)
        code, words = ask(f"{address}/healthz")
        assert (code, words) == (503, "the loop turned last 70 s ago, at most 60 s are allowed\n")


def test_healthz_says_since_when_the_broker_is_away_and_leaves_the_verdict_to_the_loop() -> None:
    pulse = Pulse(60.0, 0.0)
    pulse.turned(99.0)
    with opened(pulse, now_s=100.0) as address:
        pulse.broker(answered=False, asked_us=1_700_000_000_900_000)
        pulse.broker(answered=False, asked_us=1_700_000_005_000_000)
        away = ask(f"{address}/healthz")
        pulse.turned(30.0)
        away_and_stuck = ask(f"{address}/healthz")
        pulse.turned(99.0)
        pulse.broker(answered=True, asked_us=1_700_000_010_000_000)
        back = ask(f"{address}/healthz")

    words = "broker unreachable since 2023-11-14T22:13:20+00:00\n"
    assert away == (200, f"the loop turned 1.0 s ago; {words}")
    assert away_and_stuck == (503, f"the loop turned last 70 s ago, at most 60 s are allowed; {words}")
    assert back == (200, "the loop turned 1.0 s ago\n")


def test_a_port_that_is_taken_is_said_and_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = Endpoint(taken.getsockname(), lambda: b"", lambda: (True, ""))
        endpoint.start()
        assert endpoint.wait_until_open(0.3) is None
        endpoint.close()

    assert "metrics_port_unusable" in [record.message for record in caplog.records]


def test_closing_is_safe_before_the_start_and_twice() -> None:
    endpoint = Endpoint(("127.0.0.1", 0), lambda: b"", lambda: (True, ""))

    endpoint.close()
    endpoint.close()


@pytest.mark.parametrize(
    ("library", "door"), [("prometheus_client", "infra/prometheus_endpoint.py"), ("opentelemetry", "infra/tracing.py")]
)
def test_a_library_has_one_door(library: str, door: str) -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in rules.python_files(ROOT, rules.PACKAGES)
        if f"from {library}" in path.read_text() or f"import {library}" in path.read_text()
    }

    assert users == {door}
