"""A run with metrics on, asked by a real Prometheus: every query of the dashboard, and every alert stays quiet."""

from __future__ import annotations

import signal
import socket
import urllib.request

import pytest

from tests.e2e.driving import Site, going, wait_for_version, wait_until
from tests.fakes.prometheus_server import Prometheus, needs_prometheus, prometheus
from tests.fakes.promql import ALERTS, dashboard_queries

pytestmark = [pytest.mark.long, pytest.mark.soak]

SERVICES = ("trainer", "coordinator", "generator-0", "evaluator")
SETTINGS = (
    "run.versions=5000", "evaluation.enabled=true", "evaluation.every_versions=2", "evaluation.max_prompts=2",
    "evaluation.samples_per_prompt=1",
)  # fmt: skip


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(21_000, 29_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for place, found in enumerate(sockets):
                found.bind(("127.0.0.1", first + place))
            return first
        except OSError:
            continue
        finally:
            for found in sockets:
                found.close()
    raise AssertionError("no ports are free")


@needs_prometheus
def test_every_query_of_the_dashboard_is_answered_by_a_real_run_and_no_alert_fires(site: Site) -> None:
    first = free_ports(len(SERVICES) + 1)
    ports = {name: first + place for place, name in enumerate(SERVICES)}
    targets = [f"127.0.0.1:{port}" for port in ports.values()]

    with (
        going(site, *SETTINGS, f"metrics.port={first}") as process,
        prometheus(site.folder / "prometheus", first + len(SERVICES), targets, ALERTS) as server,
    ):
        wait_for_version(site, 4)
        wait_until(lambda: bool(server.query("driftlog_evaluation_sampled_reward_mean")), "an evaluation", 60.0)
        wait_until(lambda: not _unanswered(server), "every query to be answered", 20.0)
        unhealthy = [name for name, port in ports.items() if not _is_healthy(port)]
        up = {sample["metric"]["instance"] for sample in server.query("up == 1")}
        firing = server.firing()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)

    assert unhealthy == []
    assert up == set(targets)
    assert firing == set()
    said = (site.folder / "up-tiny.txt").read_text()
    assert f"trainer http://127.0.0.1:{first}/metrics" in said


def _unanswered(server: Prometheus) -> list[str]:
    return [expression for _, _, expression in dashboard_queries() if not server.query(expression)]


def _is_healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
        return bool(answer.status == 200)
