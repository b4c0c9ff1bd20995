"""The numbers of a process: named by one rule, finite, and bounded in number."""

from __future__ import annotations

import math

import pytest

from infra.metrics import METRICS
from infra.prometheus_endpoint import exposition
from infra.readings import (
    LEFT_OUT,
    MAX_LABEL_SETS,
    NOT_FINITE,
    SERVICE_SERIES,
    Readings,
    all_series,
    exposed,
    exposed_metric,
)
from tests.fakes.metered_run import samples


def page(readings: Readings) -> bytes:
    return exposition(readings, {"run": "r", "service": "trainer"})


def numbers(readings: Readings, name: str) -> dict[tuple[str, ...], float]:
    own = ("run", "service")
    return {
        tuple(v for k, v in labels.items() if k not in own): value for labels, value in samples(page(readings), name)
    }


def test_no_two_series_have_one_name() -> None:
    names = [series.name for series in (*SERVICE_SERIES, *map(exposed, METRICS))]

    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("metric", "name", "labels"),
    [
        ("policy_lag/mean", "driftlog_policy_lag_mean", ()),
        ("dropped/stale", "driftlog_dropped", ("stale",)),
        ("dropped/invalid:bad_magic", "driftlog_dropped", ("invalid:bad_magic",)),
        ("policy_lag/count_12", "driftlog_policy_lag_count", ("12",)),
        ("evaluation/pass_at_4", "driftlog_evaluation_pass_at", ("4",)),
        ("time/train_seconds", "driftlog_time_seconds", ("train",)),
        ("actor/log_ratio_p05", "driftlog_actor_log_ratio_p", ("05",)),
    ],
)
def test_a_registered_metric_has_one_series_and_its_braces_are_labels(
    metric: str, name: str, labels: tuple[str, ...]
) -> None:
    found = exposed_metric(metric)

    assert found is not None
    assert (found[0].name, found[1]) == (name, labels)
    assert name in all_series()


def test_an_unregistered_metric_is_not_shown_and_is_counted() -> None:
    readings = Readings()

    readings.put_metrics({"policy_lag/meen": 1.0, "policy_lag/mean": 2.0})

    assert numbers(readings, "driftlog_policy_lag_mean") == {(): 2.0}
    assert numbers(readings, LEFT_OUT) == {(): 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_left_out_and_counted(value: float) -> None:
    readings = Readings()
    readings.put("driftlog_open_groups", 3)

    readings.put("driftlog_open_groups", value)
    readings.put_metrics({"actor/entropy": value})

    assert numbers(readings, "driftlog_open_groups") == {(): 3.0}
    assert numbers(readings, "driftlog_actor_entropy") == {}
    assert numbers(readings, NOT_FINITE) == {(): 2.0}
    assert b"NaN" not in page(readings)
    assert b"Inf" not in page(readings)


def test_a_series_with_too_many_labels_stops_growing_and_says_so() -> None:
    readings = Readings()

    readings.put_metrics({f"reward_by_task/t{number}": 1.0 for number in range(MAX_LABEL_SETS + 5)})
    readings.add("driftlog_rows_dropped_total", reason="stale")

    assert len(numbers(readings, "driftlog_reward_by_task")) == MAX_LABEL_SETS
    assert numbers(readings, LEFT_OUT) == {(): 5.0}
    assert numbers(readings, "driftlog_rows_dropped_total") == {("stale",): 1.0}


def test_labels_of_the_step_before_are_not_shown_for_the_next_one() -> None:
    readings = Readings()

    readings.put_metrics({"policy_lag/count_0": 4.0, "policy_lag/count_1": 4.0})
    readings.put_metrics({"policy_lag/count_2": 8.0})

    assert numbers(readings, "driftlog_policy_lag_count") == {("2",): 8.0}


def test_a_series_that_is_not_in_the_table_or_has_other_labels_is_a_defect() -> None:
    with pytest.raises(KeyError):
        Readings().put("driftlog_unheard_of", 1.0)
    with pytest.raises(AssertionError, match="labels"):
        Readings().add("driftlog_rows_dropped_total")


def test_counters_are_there_from_the_start() -> None:
    readings = Readings()

    readings.begin("coordinator")

    assert numbers(readings, "driftlog_switches_failed_total") == {(): 0.0}


def test_a_label_may_hold_what_has_a_meaning_in_the_text() -> None:
    readings = Readings()

    readings.put_metrics({'reward_by_task/a"b\\c': 1.0})

    (line,) = [x for x in page(readings).decode().splitlines() if x.startswith("driftlog_reward_by_task{")]
    assert r"a\"b\\c" in line
