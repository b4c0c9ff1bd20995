"""MLflow as the log's mirror: what is shown live, made anew, or read back is what the log says, entry for entry."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from consumers.offline.mirror import Difference, compare, while_running
from consumers.projection_rows import decode_bookmark
from infra.mlflow_access import MlflowSettings
from infra.mlflow_reading import ReadMirror, read_mirror
from infra.mlflow_tracker import MlflowTracker
from schemas import policy_events as ev
from schemas.errors import ConfigError, TrackerUnavailable
from tests.fakes.projected_log import RUN, ProjectedLog, expected_of, project
from tests.fakes.virtual_clock import START_US, VirtualClock


def _eventful(log: ProjectedLog) -> Iterator[None]:
    """Superseded, retired, pinned, a branch, a metric that is not finite, an evaluation; complete at the end."""
    log.switch(0, at_s=0)
    log.full_step(1, at_s=10, reward=0.1)
    log.full_step(2, at_s=20, reward=0.2)
    yield
    log.full_step(3, at_s=30, reward=0.3)
    log.step(4, at_s=40, metrics={"actor/lr": 1e-3}, nonfinite=("actor/ppo_kl",))
    log.publish(4, at_s=40)
    yield
    log.full_step(5, at_s=50, reward=0.4)
    log.policy(ev.VersionPinned(run=RUN, at_us=START_US, version=2, reason="a paper names it"))
    log.policy(ev.VersionRetired(run=RUN, at_us=START_US, version=1, rule="keep=3"))
    log.evaluation(3, 1.0, None, 0.5)
    yield
    log.policy(ev.BranchStarted(run=RUN, at_us=START_US, from_version=3))
    log.publish(6, at_s=60, parent=3, depth=3)
    log.switch(6, at_s=61)
    log.evaluation(5, 0.25)
    log.end(6, at_s=70)


def _eventful_log() -> ProjectedLog:
    log = ProjectedLog()
    for _ in _eventful(log):
        pass
    return log


def _read(log: ProjectedLog, settings: MlflowSettings) -> ReadMirror:
    return read_mirror(settings, "demo", expected_of(log).mirror["run/tag/log"])


def _differences(log: ProjectedLog, settings: MlflowSettings) -> list[Difference]:
    there = _read(log, settings)
    expected = expected_of(log, up_to=decode_bookmark(there.bookmark or ""))
    if there.is_running:
        return compare(while_running(expected.mirror), while_running(there.entries))
    return compare(expected.mirror, there.entries)


def _empty_mlflow(settings: MlflowSettings, tables: Path, folder: Path) -> MlflowSettings:
    folder.mkdir()
    shutil.copy(tables, folder / "mlflow.db")
    return dataclasses.replace(settings, tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


@pytest.fixture(scope="module")
def shown(mlflow_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ProjectedLog, Path]:
    """(an eventful log, the database that mirrors it)."""
    path = tmp_path_factory.mktemp("shown") / "mlflow.db"
    shutil.copy(mlflow_tables, path)
    log = _eventful_log()
    settings = MlflowSettings(tracking_uri=f"sqlite:///{path}", experiment="tests")
    project(log, MlflowTracker(settings, log.clock)).close()
    return log, path


@pytest.fixture
def mirror(shown: tuple[ProjectedLog, Path], tmp_path: Path) -> tuple[ProjectedLog, MlflowSettings]:
    """The log and a copy of its mirror, to be spoilt."""
    shutil.copy(shown[1], tmp_path / "mlflow.db")
    return shown[0], MlflowSettings(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", experiment="tests")


def test_a_live_projection_and_a_rebuild_into_an_empty_mlflow_are_the_log_entry_for_entry(
    mlflow_settings: MlflowSettings, mlflow_tables: Path, tmp_path: Path
) -> None:
    log = ProjectedLog()
    for _ in _eventful(log):  # live: several processes, each of which is told to stop in mid-run
        project(log, MlflowTracker(mlflow_settings, log.clock), batch_records=7).close()
        assert _differences(log, mlflow_settings) == []
    project(log, MlflowTracker(mlflow_settings, log.clock), batch_records=7).close()
    other = _empty_mlflow(mlflow_settings, mlflow_tables, tmp_path / "other")
    project(log, MlflowTracker(other, log.clock), batch_records=500, rebuild=True).close()

    live, rebuilt = _read(log, mlflow_settings), _read(log, other)
    assert live.entries == rebuilt.entries
    assert live.bookmark == rebuilt.bookmark
    assert compare(expected_of(log).mirror, live.entries) == []
    assert len(live.entries) > 200


def test_what_a_version_shows(mirror: tuple[ProjectedLog, MlflowSettings]) -> None:
    read = _read(*mirror).entries

    states = [read[f"version/{version}/tag/state"] for version in range(7)]
    assert states == ["was_live", "retired", "was_live", "was_live", "superseded", "was_live", "live"]
    assert [read[f"version/{version}/tag/branch"] for version in (0, 5, 6)] == ["main", "main", "v6 from v3"]
    assert read["version/6/tag/parent_model_id"] == "model of version 3"
    assert read["version/2/tag/trajectories_read"] == "0:[4,8)"
    assert read["version/2/tag/pinned_because"] == "a paper names it"
    assert read["version/4/tag/nonfinite"] == "actor/ppo_kl"
    assert f"curve/nonfinite_metrics@4 at {START_US // 1_000 + 40_000} = 1.0" in read
    assert read["run/started_ms"] == str(START_US // 1_000)
    assert read["run/ended_ms"] == str(START_US // 1_000 + 70_000)
    assert [(entry, value) for entry, value in read.items() if entry.startswith("dataset/")] == [
        (
            "dataset/demo.trajectories for v1-v6 up to ledger@10",
            '{"partitions":{"0":[0,20]},"topic":"demo.trajectories"} {"records": 20}',
        )
    ]


def test_the_registry_holds_the_live_the_best_and_the_pinned_version(
    mirror: tuple[ProjectedLog, MlflowSettings],
) -> None:
    import mlflow

    read = _read(*mirror).entries
    uri = mirror[1].tracking_uri

    # An evaluation counts more than a metric of training, where version 5 is the best.
    assert (read["alias/best"], read["alias/live"]) == ("3", "6")
    assert sorted(entry for entry in read if entry.startswith("registry/")) == [
        "registry/2",
        "registry/3",
        "registry/6",
    ]
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    best = client.get_model_version_by_alias("tests.demo", "best")
    assert best.source == "driftlog:/demo/a3/manifest.json"
    assert best.tags["driftlog.manifest_sha256"] == f"{3:064x}"


def test_each_move_of_an_alias_is_told_with_where_it_was_and_where_it_is(
    mlflow_settings: MlflowSettings, caplog: pytest.LogCaptureFixture
) -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=10, reward=0.5)

    def moves() -> list[dict[str, object]]:
        project(log, MlflowTracker(mlflow_settings, log.clock)).close()
        told = [record.driftlog_fields for record in caplog.records if record.message == "alias_moved"]  # type: ignore[attr-defined]
        caplog.clear()
        return told

    with caplog.at_level(logging.INFO, logger="infra.mlflow_registry"):
        first = moves()
        log.full_step(2, at_s=20, reward=0.25)
        second = moves()
        third = moves()

    # Each with the time of its line, as every event of the logs.
    assert first == [
        {"alias": "live", "from_version": "", "to_version": 1},
        {"alias": "best", "from_version": "", "to_version": 1},
    ]
    assert second == [{"alias": "live", "from_version": "1", "to_version": 2}]
    assert third == []


_EDITS = [
    (
        "update logged_model_tags set tag_value = 'live' where tag_key = 'driftlog.state' and tag_value = 'retired'",
        "version/1/tag/state",
    ),
    ("update metrics set value = 0.9 where key = 'critic/rewards/mean' and step = 2", "curve/critic/rewards/mean@2"),
    ("delete from metrics where key = 'actor/lr' and step = 3", "curve/actor/lr@3"),
    ("update params set value = '1' where key = 'lr'", "param/lr"),
    ("delete from registered_model_aliases where alias = 'best'", "alias/best"),
    ("update registered_model_aliases set version = 1 where alias = 'live'", "alias/live"),
    ("delete from inputs where source_type = 'DATASET'", "dataset/"),
    ("delete from inputs where source_type = 'RUN_INPUT'", "model_input/"),
    ("delete from inputs where source_type = 'RUN_OUTPUT'", "model_output/"),
    ("update runs set status = 'FAILED'", "run/status"),
    ("update runs set name = 'mine'", "run/name"),
    ("update logged_models set name = 'x' where name = 'demo-v2'", "version/2"),
    ("update model_version_tags set value = 'f00' where key = 'driftlog.manifest_sha256'", "registry/"),
]


@pytest.mark.parametrize(("statement", "entry"), _EDITS, ids=[entry for _, entry in _EDITS])
def test_what_somebody_edited_is_named(
    mirror: tuple[ProjectedLog, MlflowSettings], tmp_path: Path, statement: str, entry: str
) -> None:
    assert _differences(*mirror) == []
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        assert database.execute(statement).rowcount >= 1

    differences = _differences(*mirror)

    assert differences
    assert {one.entry.startswith(entry) for one in differences} == {True}, differences


def test_what_somebody_did_with_mlflows_own_client_is_named(mirror: tuple[ProjectedLog, MlflowSettings]) -> None:
    import mlflow

    settings = mirror[1]
    client = mlflow.MlflowClient(tracking_uri=settings.tracking_uri, registry_uri=settings.tracking_uri)
    there = _read(*mirror)
    experiment = client.get_run(there.mlflow_run).info.experiment_id
    models = client.search_logged_models([experiment], filter_string=f"source_run_id = '{there.mlflow_run}'")
    by_version = {model.tags["driftlog.version"]: model.model_id for model in models}
    client.log_metric(there.mlflow_run, "critic/rewards/mean", 7.0, timestamp=5, step=2)
    client.delete_logged_model(by_version["4"])
    client.set_tag(there.mlflow_run, "note", "a person may write what they like")
    client.set_tag(there.mlflow_run, "driftlog.log", there.entries["run/tag/log"])
    client.set_logged_model_tags(by_version["2"], {"driftlog.depth": "9", "team": "x"})
    client.set_registered_model_alias("tests.demo", "production", "1")

    assert [one.text() for one in _differences(*mirror)] == [
        "curve/critic/rewards/mean@2 at 5 = 7.0: not from this log",
        "version/2/tag/depth: '9', the log says '2'",
        "version/4: missing (the log says 'demo-v4 READY')",
        "version/5/tag/parent_model_id: 'a model that is gone', the log says 'model of version 4'",
    ]


def test_a_rebuild_beside_an_edited_run_takes_its_place_when_it_is_complete(
    mirror: tuple[ProjectedLog, MlflowSettings], tmp_path: Path
) -> None:
    log, settings = mirror
    old = _read(*mirror).mlflow_run
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        database.execute("update metrics set value = 0.9 where key = 'critic/rewards/mean'")
    assert _differences(*mirror) != []
    service = project(log, MlflowTracker(settings, log.clock), rebuild=True)
    assert _read(*mirror).mlflow_run == old

    service.close()

    new = _read(*mirror)
    assert new.mlflow_run != old
    assert _differences(*mirror) == []
    # The old run's entries of the registry are gone, and a projector that starts now goes on with the new run.
    tracker = MlflowTracker(settings, log.clock)
    project(log, tracker).close()
    assert tracker.run_id == new.mlflow_run
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=settings.tracking_uri, registry_uri=settings.tracking_uri)
    assert len(client.search_model_versions("name='tests.demo'")) == 3
    assert client.get_run(old).data.tags["driftlog.replaced_by"] == new.mlflow_run
    assert client.get_run(new.mlflow_run).data.tags["driftlog.replaces"] == old


def test_a_projector_whose_run_was_replaced_goes_on_with_the_new_one(mlflow_settings: MlflowSettings) -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=10)
    tracker = MlflowTracker(mlflow_settings, log.clock)
    service = project(log, tracker)
    old = tracker.run_id
    project(log, MlflowTracker(mlflow_settings, log.clock), rebuild=True).close()
    log.full_step(2, at_s=20)

    for _ in range(3):
        while service.step():
            pass
        log.clock.advance(60)

    assert tracker.run_id != old
    log.end(2, at_s=30)
    while service.step():
        pass
    service.close()
    assert _read(log, mlflow_settings).mlflow_run == tracker.run_id
    assert _differences(log, mlflow_settings) == []


def test_a_log_made_anew_under_the_same_name_gets_a_run_of_its_own(mlflow_settings: MlflowSettings) -> None:
    first = ProjectedLog()
    first.full_step(1, at_s=10, reward=0.9)
    one = MlflowTracker(mlflow_settings, first.clock)
    project(first, one).close()
    second = ProjectedLog(config_digest="other")
    for version in (1, 2, 3):
        second.full_step(version, at_s=10 * version)
    other = MlflowTracker(mlflow_settings, second.clock)
    project(second, other).close()

    assert one.run_id != other.run_id
    assert _differences(second, mlflow_settings) == []
    assert _read(first, mlflow_settings).mlflow_run == one.run_id


def test_any_call_may_fail_after_it_was_done_and_nothing_is_there_twice(
    mlflow_settings: MlflowSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    log = _eventful_log()
    calls = 0
    # Ever further apart, so that the projection gets on between them.
    failing = {number * (number + 1) // 2 + 2 for number in range(1, 40)}

    def spoil(name: str) -> None:
        original = getattr(mlflow.MlflowClient, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            result = original(*args, **kwargs)
            calls += 1
            if calls in failing:
                raise ConnectionError("the answer was lost")
            return result

        monkeypatch.setattr(mlflow.MlflowClient, name, call)

    for name in (
        "create_run", "update_run", "log_batch", "log_inputs", "log_outputs", "create_logged_model", "set_terminated",
        "finalize_logged_model", "set_logged_model_tags", "create_registered_model", "create_model_version",
        "set_registered_model_alias", "delete_model_version", "log_text",
    ):  # fmt: skip
        spoil(name)
    service = project(log, MlflowTracker(mlflow_settings, log.clock), batch_records=9)
    for _ in range(60):
        while service.step():
            pass
        log.clock.advance(60)
    assert service.finished
    assert service.failures >= 5
    monkeypatch.undo()
    service.close()

    assert _differences(log, mlflow_settings) == []
    client = mlflow.MlflowClient(mlflow_settings.tracking_uri, mlflow_settings.tracking_uri)
    assert len(client.search_model_versions("name='tests.demo'")) == 3


def test_reading_says_what_is_missing(mlflow_settings: MlflowSettings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment 'tests'"):
        read_mirror(mlflow_settings, "demo", "log-a")
    nowhere = MlflowSettings(tracking_uri=f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(ConfigError, match=r"none\.db does not exist"):
        read_mirror(nowhere, "demo", "log-a")
    MlflowTracker(mlflow_settings, VirtualClock())._access.open(create=True)
    with pytest.raises(ConfigError, match=r"nothing of it is there\): make it with `driftlog mlflow rebuild`"):
        read_mirror(mlflow_settings, "demo", "log-a")


def test_a_database_that_is_locked_while_it_is_read_is_unavailable(
    mirror: tuple[ProjectedLog, MlflowSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import sql

    text = sql.text
    monkeypatch.setattr(sql, "text", lambda words: text(words.replace("busy_timeout = 20000", "busy_timeout = 1")))
    other = sqlite3.connect(mirror[1].tracking_uri.removeprefix("sqlite:///"))
    other.execute("begin exclusive")
    try:
        with pytest.raises(TrackerUnavailable, match="locked"):
            _read(*mirror)
    finally:
        other.rollback()
        other.close()
    assert _differences(*mirror) == []
