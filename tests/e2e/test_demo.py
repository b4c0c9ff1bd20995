"""A short demo through real services and a real broker, and the questions one asks afterwards."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.driving import Site, driftlog, leftovers, make_site, up

SUMMARY_FIELDS = {
    "versions_published", "versions_live", "groups_trained", "trajectories_in_log", "trajectories_trained", "dropped",
    "dropped_groups", "undecided", "success_first", "success_last", "greedy_success_before", "greedy_success_after",
    "held_out_greedy_success_before", "held_out_greedy_success_after", "policy_lag_histogram", "max_policy_lag_trained",
    "tokens_generated", "wall_s", "trainer_idle_fraction", "generator_idle_fraction", "audit_findings", "audit_notices",
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, kafka_jars: Path) -> Site:
    """One finished run, for every question of this module."""
    site = make_site(tmp_path_factory.mktemp("demo"))
    done = up(site, "run.versions=8", "generator.workers=2", "mlflow.enabled=true", options=("--json",))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == site.summary()
    assert leftovers(site) == []
    return site


def test_summary_has_every_field_and_adds_up(demo: Site) -> None:
    summary = demo.summary()

    assert SUMMARY_FIELDS - summary.keys() == set()
    assert summary["versions_published"] == 9
    assert summary["groups_trained"] == 8 * 4
    assert summary["undecided"] == 0
    assert summary["trajectories_trained"] + sum(summary["dropped"].values()) == summary["trajectories_in_log"]
    assert summary["max_policy_lag_trained"] <= 2
    assert summary["audit_findings"] == 0


def test_audit_of_the_stored_run_finds_nothing_and_starts_the_broker_itself(demo: Site) -> None:
    done = driftlog("audit", "--directory", str(demo.runs), "--json")

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["errors"], report["ended"]) == (0, True)
    assert report["counts"]["checkpoints_verified"] == 9
    # Each step names what repeats it, and the RNG state it names is the one that was saved.
    assert (report["counts"]["steps_replayable"], report["counts"]["rng_states_compared"]) == (8, 8)
    assert leftovers(demo) == []


@pytest.fixture(scope="module")
def broker(demo: Site) -> Iterator[Site]:
    """The run with its broker up, so that each question need not start it."""
    data = ("--run", "tiny", "--directory", str(demo.runs))
    assert driftlog("broker", "start", *data).returncode == 0
    yield demo
    stopped = driftlog("down", *data, "--json")
    assert json.loads(stopped.stdout) == {"tiny": ["broker"]}
    assert leftovers(demo) == []


def test_trace_tells_the_life_of_a_sample(broker: Site) -> None:
    demo = broker
    best = driftlog("samples", "--directory", str(demo.runs), "--version", "3", "--best", "--limit", "1", "--json")
    assert best.returncode == 0, best.stderr
    sample = json.loads(best.stdout)[0]

    told = driftlog("trace", sample["trajectory_id"], "--directory", str(demo.runs))

    assert told.returncode == 0, told.stderr
    for word in ("request", "claim", "proof policy@", "trajectories[", "trained into version 3", "lag", "consumed"):
        assert word in told.stderr


def test_the_report_of_the_ended_run_is_one_page_with_its_figures(broker: Site) -> None:
    page = broker.folder / "report.html"
    done = driftlog("report", "--directory", str(broker.runs), "--out", str(page), "--no-audit", "--json")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["state"], told["bytes"]) == ("ended", page.stat().st_size)
    assert told["figures"] > 15
    assert "<title>" in page.read_text()


def test_status_of_the_stored_run_says_that_it_ended(broker: Site) -> None:
    demo = broker
    done = driftlog("status", "--directory", str(demo.runs), "--json")

    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["state"], status["newest_version"], status["open_groups"]) == ("ended", 8, 0)


def test_a_version_is_pinned_and_unpinned_once_each_and_an_unknown_one_is_refused(broker: Site) -> None:
    where = ("--directory", str(broker.runs))
    codes = [driftlog(*words, *where).returncode for words in (("pin", "2"), ("pin", "2"), ("unpin", "2"))]
    unpinned, unknown = driftlog("unpin", "2", *where), driftlog("pin", "99", *where)

    assert codes == [0, 2, 0]
    assert (unpinned.returncode, unknown.returncode) == (2, 2)
    assert "not pinned" in unpinned.stderr
    assert "no such version" in unknown.stderr


def test_mlflow_has_the_run(demo: Site) -> None:
    assert (demo.runs / "mlflow.db").exists()
    assert "finished" in (demo.run().logs / "projector.log").read_text()


def test_mlflow_says_what_the_log_says_and_an_edit_is_found(broker: Site) -> None:
    where = ("--directory", str(broker.runs))
    compared = driftlog("mlflow", "compare", *where, "--json")
    assert compared.returncode == 0, compared.stderr
    report = json.loads(compared.stdout)
    assert (report["differences"], report["is_running"]) == ([], False)
    assert report["entries"] > 500

    with closing(sqlite3.connect(broker.runs / "mlflow.db")) as database, database:
        database.execute("update logged_model_tags set tag_value = '9' where tag_key = 'driftlog.depth'")
    edited = driftlog("mlflow", "compare", *where)
    assert edited.returncode == 1
    assert "version/2/tag/depth: '9', the log says '2'" in edited.stderr
    audited = driftlog("audit", *where, "--mlflow")
    assert audited.returncode == 1
    assert "error  mlflow.mirror version/2/tag/depth" in audited.stderr


def test_a_lost_mlflow_is_made_anew_from_the_log(broker: Site) -> None:
    where = ("--directory", str(broker.runs), "--tracking-uri", f"sqlite:///{broker.folder / 'fresh.db'}", "--json")
    missing = driftlog("mlflow", "compare", *where)
    assert missing.returncode == 2
    assert "fresh.db does not exist" in missing.stderr

    assert driftlog("mlflow", "rebuild", *where).returncode == 0
    compared = driftlog("mlflow", "compare", *where)

    assert compared.returncode == 0, compared.stderr
    report = json.loads(compared.stdout)
    assert (report["differences"], report["records_behind"]) == ([], 0)


def test_a_second_run_of_the_same_name_does_nothing_again(demo: Site) -> None:
    before = demo.summary()

    done = up(demo, "run.versions=8", "generator.workers=2", "mlflow.enabled=true")

    assert done.returncode == 0, done.stderr
    assert "has its 8 versions already" in done.stderr
    assert demo.summary() == before


def test_a_changed_learning_setting_is_refused_by_key(demo: Site) -> None:
    done = up(demo, "run.versions=8", "trainer.learning_rate=2e-3")

    assert done.returncode == 2
    assert "trainer.learning_rate: 0.001 -> 0.002" in done.stderr
    assert "Traceback" not in done.stderr
