"""Every query of the dashboard and of the alerts is answered by the real pages of the services."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

import pytest

from infra.prometheus_endpoint import Endpoint
from infra.readings import BY_SERVICE, PROCESS, all_series
from tests.fakes.metered_run import MeteredService, labels_by_name, metered_services, samples
from tests.fakes.promql import (
    FROM_PROMETHEUS,
    alert_rules,
    dashboard_queries,
    grouped_labels,
    legend_labels,
    series_of,
)

OTHER_EXPORTERS = frozenset({"up"})


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MeteredService]:
    return metered_services(tmp_path_factory.mktemp("metered"))


@pytest.fixture(scope="module")
def exposed(services: Mapping[str, MeteredService]) -> dict[str, set[str]]:
    """What Prometheus would have scraped: over HTTP, from a real endpoint of each service."""
    found: dict[str, set[str]] = {}
    for service in services.values():
        endpoint = Endpoint(("127.0.0.1", 0), service.page, lambda: (True, ""))
        endpoint.start()
        try:
            port = endpoint.wait_until_open(10.0)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                for name, labels in labels_by_name(answer.read()).items():
                    found.setdefault(name, set()).update(labels)
        finally:
            endpoint.close()
    return found


def problems(expression: str, legend: str, exposed: Mapping[str, set[str]]) -> list[str]:
    known = {**exposed, **{name: set() for name in OTHER_EXPORTERS}}
    found, labels = [], set(FROM_PROMETHEUS)
    for name, asked in series_of(expression):
        if name not in known:
            found.append(f"no service has {name}")
            continue
        labels |= known[name]
        found += [f"{name} has no label {label}" for label in asked - known[name] - FROM_PROMETHEUS]
    wanted = grouped_labels(expression) | legend_labels(legend)
    return found + [f"nothing in it has the label {label}" for label in sorted(wanted - labels)]


def test_every_query_of_the_dashboard_asks_for_series_and_labels_that_a_real_endpoint_has(
    exposed: Mapping[str, set[str]],
) -> None:
    queries = dashboard_queries()

    assert len(queries) > 30
    wrong = {f"{panel}: {query}": problems(query, legend, exposed) for panel, legend, query in queries}
    assert {query: found for query, found in wrong.items() if found} == {}


def test_every_alert_asks_for_series_and_labels_that_a_real_endpoint_has(exposed: Mapping[str, set[str]]) -> None:
    wrong = {name: problems(rule["expr"], "", exposed) for name, rule in alert_rules().items()}

    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_check_notices_a_wrong_name_and_a_wrong_label(exposed: Mapping[str, set[str]]) -> None:
    assert problems("rate(driftlog_stepz_total[5m])", "", exposed) == ["no service has driftlog_stepz_total"]
    asked = 'driftlog_steps_total{worker="g0"}'
    assert problems(asked, "", exposed) == ["driftlog_steps_total has no label worker"]
    assert problems("sum by (phase) (driftlog_steps_total)", "", exposed) == ["nothing in it has the label phase"]
    assert problems("driftlog_steps_total", "{{standing}}", exposed) == ["nothing in it has the label standing"]


def test_every_service_shows_every_series_that_is_its_own(services: Mapping[str, MeteredService]) -> None:
    shown = set().union(*(labels_by_name(service.page()) for service in services.values()))
    own = {series.name for group in (PROCESS, *BY_SERVICE.values()) for series in group}

    assert own - shown == set()
    assert {name for name in shown if name.startswith("driftlog_")} <= set(all_series())


def test_what_the_ledger_says_is_what_the_trainer_shows(services: Mapping[str, MeteredService]) -> None:
    page = services["trainer"].page()
    own = {"run": "run", "service": "trainer"}

    ((labels, steps),) = samples(page, "driftlog_steps_total")
    assert labels.keys() == own.keys()
    assert steps >= 4
    assert samples(page, "driftlog_consumer_lag_records") == [({**labels, "topic": "trajectories"}, 5.0)]
    assert samples(page, "driftlog_dead_letters_total") == [({**labels, "code": "bad_magic"}, 1.0)]
    events = samples(page, "driftlog_log_events_total")
    assert [(found["event"], found["level"], count) for found, count in events] == [("log_in_doubt", "warning", 1.0)]
    assert samples(page, "driftlog_policy_lag_count") != []


def test_the_coordinator_shows_its_decisions_and_its_view(services: Mapping[str, MeteredService]) -> None:
    page = services["coordinator"].page()

    (started,) = samples(page, "driftlog_switches_started_total")
    (activated,) = samples(page, "driftlog_switches_activated_total")
    (failed,) = samples(page, "driftlog_switches_failed_total")
    assert started[1] >= activated[1] > 0 == failed[1]
    assert [age for _, age in samples(page, "driftlog_worker_heartbeat_age_seconds")] == [1.5]
    assert {labels["standing"] for labels, _ in samples(page, "driftlog_workers")} == {
        "joined", "admitted", "expired", "left"
    }  # fmt: skip
