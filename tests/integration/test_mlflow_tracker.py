"""The tracker on a real MLflow with sqlite: what is there afterwards, and what somebody else may do to it."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from infra.mirror_entries import BOOKMARK_TAG, safe_name
from infra.mlflow_access import MlflowSettings
from infra.mlflow_tracker import MlflowTracker
from schemas.errors import ConfigError, TrackerUnavailable
from tests.fakes.projected_log import ORIGIN, ProjectedLog, project
from tests.fakes.virtual_clock import START_US, VirtualClock


@pytest.fixture
def settings(mlflow_settings: MlflowSettings) -> MlflowSettings:
    return mlflow_settings


@pytest.fixture
def tracker(mlflow_tracker: MlflowTracker) -> MlflowTracker:
    return mlflow_tracker


@pytest.fixture
def client(mlflow_client: Any) -> Any:
    return mlflow_client


def _started(settings: MlflowSettings, *params: dict[str, str]) -> MlflowTracker:
    tracker = MlflowTracker(settings, VirtualClock())
    tracker.start(ORIGIN, params)
    return tracker


def _models(client: Any, tracker: MlflowTracker) -> dict[str, Any]:
    experiment = client.get_run(tracker.run_id).info.experiment_id
    found = client.search_logged_models(
        [experiment], filter_string=f"source_run_id = '{tracker.run_id}'", max_results=100
    )
    assert len({model.tags["driftlog.version"] for model in found}) == len(found)
    return {model.tags["driftlog.version"]: model for model in found}


def _curve(client: Any, tracker: MlflowTracker, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(tracker.run_id, name))


def test_a_whole_run_is_there_and_a_restart_changes_nothing(
    settings: MlflowSettings, tracker: MlflowTracker, client: Any
) -> None:
    log = ProjectedLog()
    for version in (1, 2, 3):
        log.full_step(version, at_s=10 * version, reward=version / 10)
    project(log, tracker, batch_records=7)

    def snapshot() -> tuple[Any, ...]:
        run = client.get_run(tracker.run_id)
        models = _models(client, tracker)
        return (
            run.data.metrics, run.data.params, run.data.tags[BOOKMARK_TAG],
            {version: (model.name, model.tags) for version, model in models.items()},
            {name: _curve(client, tracker, name) for name in run.data.metrics},
            sorted(output.model_id for output in run.outputs.model_outputs),
        )  # fmt: skip

    models = _models(client, tracker)
    assert sorted(models) == ["0", "1", "2", "3"]
    assert models["3"].name == "demo-v3"
    assert models["3"].status.value == "READY"
    assert models["3"].tags["driftlog.parent"] == "2"
    assert models["3"].tags["driftlog.parent_model_id"] == models["2"].model_id
    assert models["3"].tags["driftlog.checkpoint_uri"] == "demo/a3/manifest.json"
    assert models["3"].tags["driftlog.state"] == "live"
    assert models["2"].tags["driftlog.state"] == "was_live"
    assert models["3"].tags["mlflow.model.isExternal"] == "true"
    assert [(m.key, m.value) for m in models["3"].metrics] == [("critic/rewards/mean", 0.3)]
    assert _curve(client, tracker, "critic/rewards/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert _curve(client, tracker, "ledger_total/trajectory/dropped/stale") == [(1, 1.0), (2, 2.0), (3, 3.0)]

    before = snapshot()
    project(log, MlflowTracker(settings, log.clock))
    assert snapshot() == before


def test_the_end_of_a_run_is_its_status_and_a_later_start_opens_it_again(
    settings: MlflowSettings, tracker: MlflowTracker, client: Any
) -> None:
    tracker.start(ORIGIN, [])
    run_id = tracker.run_id
    for status in ("killed", "failed", "finished"):
        tracker.end(status)  # type: ignore[arg-type]
        assert client.get_run(run_id).info.status == status.upper()
        assert client.get_run(run_id).info.end_time is not None
    tracker.log_step(1, {"late": 1.0}, START_US)
    tracker.save_bookmark("b")

    again = MlflowTracker(settings, VirtualClock())
    assert again.start(ORIGIN, []) == "b"
    assert again.run_id == run_id
    assert client.get_run(run_id).info.status == "RUNNING"
    assert _curve(client, tracker, "late") == [(1, 1.0)]


def test_what_is_buffered_is_written_before_the_bookmark_and_in_allowed_batches(
    tracker: MlflowTracker, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker.start(ORIGIN, [])
    sizes: list[int] = []
    log_batch = type(tracker._access.client).log_batch

    def note(self: Any, run_id: str, metrics: Any = (), **rest: Any) -> Any:
        sizes.append(len(metrics))
        return log_batch(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(type(tracker._access.client), "log_batch", note)
    for step in range(5):
        tracker.log_step(step, {f"m{index}": float(step) for index in range(450)}, START_US)
    tracker.save_bookmark("there")

    assert max(sizes) <= 1_000
    assert sum(sizes) == 2_250
    assert _curve(client, tracker, "m449") == [(step, float(step)) for step in range(5)]
    assert client.get_run(tracker.run_id).data.tags[BOOKMARK_TAG] == "there"


def test_non_finite_values_never_become_points(
    tracker: MlflowTracker, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tracker.start(ORIGIN, [])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            tracker.log_step(step, {"kl": float("inf"), "loss": float("nan"), "good": 1.0}, START_US)
    tracker.save_bookmark("b")

    assert client.get_run(tracker.run_id).data.metrics == {"good": 1.0}
    # One warning a metric, not one a step.
    assert [record.message for record in caplog.records] == ["metric_not_finite", "metric_not_finite"]


def test_250_parameters_one_of_them_long_are_all_there(tracker: MlflowTracker, client: Any) -> None:
    params = {f"key{index}": str(index) for index in range(249)} | {"trainer.prompt": "p" * 9_000}
    tracker.start(ORIGIN, [params])

    there = client.get_run(tracker.run_id).data.params
    assert len(there) == 250
    assert there["trainer.prompt"].endswith("...[cut, 9000 characters, whole in params/trainer.prompt.txt]")
    assert len(there["trainer.prompt"]) == 6_000
    whole = client.download_artifacts(tracker.run_id, "params/trainer.prompt.txt")
    assert Path(whole).read_text() == "p" * 9_000


def test_a_server_with_shorter_limits_gets_shorter_values(
    tracker: MlflowTracker, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    tracker.start(ORIGIN, [])
    log_batch = type(tracker._access.client).log_batch

    def old_server(self: Any, run_id: str, params: Any = (), **rest: Any) -> Any:
        if any(len(param.value) > 250 for param in params):
            raise MlflowException("Param value had length 6000, which exceeded length limit of 250", 1000)
        return log_batch(self, run_id, params=params, **rest)

    monkeypatch.setattr(type(tracker._access.client), "log_batch", old_server)
    tracker.start(ORIGIN, [{"long": "x" * 9_000, "short": "y"}])

    there = client.get_run(tracker.run_id).data.params
    assert (len(there["long"]), there["short"]) == (250, "y")


def test_a_changed_parameter_is_added_beside_the_old_one(
    settings: MlflowSettings, tracker: MlflowTracker, client: Any
) -> None:
    first = {"lr": "1e-5", "prompt": "p" * 9_000}
    tracker.start(ORIGIN, [first])
    for lr in ("5e-6", "5e-6", "1e-6"):
        _started(settings, {"lr": lr, "prompt": "p" * 9_000, "new": "1"})

    there = client.get_run(tracker.run_id).data.params
    assert {key: value for key, value in there.items() if key != "prompt"} == {
        "lr": "1e-5",
        "lr/segment-1": "5e-6",
        "lr/segment-2": "1e-6",
        "new": "1",
    }


def test_a_run_deleted_under_way_is_replaced_and_filled_from_the_start(
    tracker: MlflowTracker, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=10)
    service = project(log, tracker)
    deleted = tracker.run_id
    client.delete_run(deleted)
    log.full_step(2, at_s=20)

    with caplog.at_level(logging.WARNING):
        while service.step():
            pass
        log.clock.advance(1)
        while service.step():
            pass

    assert tracker.run_id != deleted
    assert client.get_run(tracker.run_id).data.tags["driftlog.replaces"] == deleted
    assert _curve(client, tracker, "actor/lr") == [(1, 1e-3), (2, 1e-3)]
    assert sorted(_models(client, tracker)) == ["0", "1", "2"]
    assert [record.message for record in caplog.records] == ["tracker_unavailable", "tracker_run_was_deleted"]


def test_a_deleted_experiment_says_what_to_do(tracker: MlflowTracker, client: Any) -> None:
    tracker.start(ORIGIN, [])
    client.delete_experiment(client.get_run(tracker.run_id).info.experiment_id)

    with pytest.raises(ConfigError, match="'tests' was deleted .*: restore it .*, or choose another name"):
        tracker.start(ORIGIN, [])


def test_an_experiment_that_is_deleted_in_mid_run_and_restored_is_caught_up(
    tracker: MlflowTracker, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=10)
    service = project(log, tracker)
    experiment = client.get_run(tracker.run_id).info.experiment_id
    client.delete_experiment(experiment)
    log.full_step(2, at_s=20)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            while service.step():
                pass
            log.clock.advance(60)
        client.restore_experiment(experiment)
        while service.step():
            pass

    assert _curve(client, tracker, "actor/lr") == [(1, 1e-3), (2, 1e-3)]
    told = [record.message for record in caplog.records if record.name == "consumers.projector"]
    assert told == ["tracker_unavailable", "projection_starts", "tracker_is_back"]


def test_a_locked_database_is_unavailable_and_can_be_used_afterwards(
    settings: MlflowSettings, tracker: MlflowTracker, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import sql

    tracker.start(ORIGIN, [])
    # MLflow waits 20 s for a lock; the outcome is the same after 1 ms.
    text = sql.text
    monkeypatch.setattr(sql, "text", lambda words: text(words.replace("busy_timeout = 20000", "busy_timeout = 1")))
    other = sqlite3.connect(settings.tracking_uri.removeprefix("sqlite:///"))
    other.execute("begin exclusive")
    try:
        tracker.log_step(1, {"a": 1.0}, START_US)
        with pytest.raises(TrackerUnavailable, match="database is locked"):
            tracker.save_bookmark("b")
    finally:
        other.rollback()
        other.close()

    assert tracker.start(ORIGIN, []) is None
    tracker.log_step(1, {"a": 1.0}, START_US)
    tracker.save_bookmark("b")
    assert _curve(client, tracker, "a") == [(1, 1.0)]


def test_a_refused_host_header_is_named_as_such(tracker: MlflowTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException

    tracker.start(ORIGIN, [])
    remote = MlflowTracker(MlflowSettings(tracking_uri="http://mlflow:5000"), VirtualClock())
    remote._access.client = tracker._access.client

    def refuse(*args: object, **kwargs: object) -> None:
        raise MlflowException("API request failed with error code 403: Invalid Host header - possible DNS rebinding")

    monkeypatch.setattr(type(tracker._access.client), "get_experiment_by_name", refuse)
    with pytest.raises(TrackerUnavailable, match="refuse the Host header 'mlflow:5000'.*--allowed-hosts"):
        remote.start(ORIGIN, [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("critic/rewards/mean", "critic/rewards/mean"),
        ("dropped/invalid:x", "dropped/invalid:x"),
        ("a@b{c}", "a_b_c_"),
        ("", "_"),
    ],
)
def test_names_are_made_of_what_mlflow_accepts(given: str, expected: str) -> None:
    assert safe_name(given) == expected


def test_a_bookmark_that_would_be_cut_is_a_mistake_of_ours(tracker: MlflowTracker) -> None:
    tracker.start(ORIGIN, [])
    with pytest.raises(ValueError, match="at most 5000"):
        tracker.save_bookmark("x" * 5_001)
