"""One run in one go against the same run stopped and resumed again and again: equal to the last sha256."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driving import Site, driftlog, going, is_published, leftovers, make_site, up, wait_for_version

pytestmark = [pytest.mark.long, pytest.mark.soak]

VERSIONS = 12
"""room for four stops, each of which may come late by a version or two"""
ON_POLICY = (f"run.versions={VERSIONS}", "trainer.max_lag=0", 'generator.batching="group"')
STOPS = 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, kafka_jars: Path) -> Site:
    """Run `tiny` in one go."""
    site = make_site(tmp_path_factory.mktemp("diff"))
    done = up(site, *ON_POLICY)
    assert done.returncode == 0, done.stderr
    return site


def _newest(site: Site) -> int:
    """The newest version that the trainer has committed; 0 before the first."""
    return max((version for version in range(1, VERSIONS + 1) if is_published(site, version)), default=0)


def _diff(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = driftlog("diff", *arguments, "--json")
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_a_run_that_was_stopped_and_resumed_is_equal_to_the_last_sha256(site: Site, tmp_path: Path) -> None:
    resumed = make_site(tmp_path / "resumed")  # of the same name: samples are drawn by group id, which names the run
    stopped_at: list[int] = []
    for _ in range(STOPS):
        # One more than there are: a stop at a version that is there already would hit a process that has just begun.
        with going(resumed, *ON_POLICY) as process:
            wait_for_version(resumed, _newest(resumed) + 1)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        stopped_at.append(_newest(resumed))
    # Each came in mid-run, and the next start went on from there.
    assert len({0, *stopped_at, VERSIONS}) == STOPS + 2
    assert stopped_at == sorted(stopped_at)
    done = up(resumed, *ON_POLICY)
    assert done.returncode == 0, done.stderr
    assert leftovers(resumed) == []

    code, report, words = _diff("tiny", "tiny", "--directory", str(site.runs), "--directory", str(resumed.runs))

    assert code == 0, words
    assert (report["equal"], report["steps"], report["rows"]) == (True, VERSIONS, VERSIONS * 4 * 4)
    assert (report["weights"], report["weights_not_retained"]) == (VERSIONS + 1, 0)
    assert report["last_weights_sha256"][0] == report["last_weights_sha256"][1] != ""
    assert report["config"] == {}
    assert "equal: " in words
    assert leftovers(site) == leftovers(resumed) == []


def test_another_seed_in_another_folder_differs_and_the_first_difference_is_named(site: Site, tmp_path: Path) -> None:
    other = make_site(tmp_path / "other")
    done = up(other, "run.versions=1", "trainer.max_lag=0", 'generator.batching="group"', "run.seed=7")
    assert done.returncode == 0, done.stderr

    code, report, words = _diff(str(site.run().path), str(other.run().path), "--to", "1")

    assert code == 1, words
    assert report["config"]["run.seed"] == [0, 7]
    assert report["first"] == report["differences"][0]
    assert f"first difference: version {report['first']['version_a']}" in words
    assert report["first"]["a"] != report["first"]["b"]
    assert leftovers(other) == []


def test_a_run_that_is_not_there_is_a_usage_error(site: Site) -> None:
    code, _, words = _diff("tiny", str(site.folder / "nowhere" / "run"), "--directory", str(site.runs))

    assert code == 2
    assert "no run lies there" in words


def test_the_audit_scores_rows_again_and_lineage_and_trace_tell_of_them(site: Site) -> None:
    where = ("--run", "tiny", "--directory", str(site.runs))
    assert driftlog("broker", "start", *where).returncode == 0
    audited = driftlog("audit", *where, "--recompute", "8", "--json")
    lineage = driftlog("lineage", *where, "--version", "3", "--json")
    tree, dot = driftlog("lineage", *where), driftlog("lineage", *where, "--dot")
    group = json.loads(lineage.stdout)["sources"][0]["group_id"] if lineage.stdout else ""
    prompt = driftlog("trace", group.rpartition("/e")[0], "--directory", str(site.runs))
    assert driftlog("down", *where).returncode == 0

    assert audited.returncode == 0, audited.stderr
    report = json.loads(audited.stdout)
    assert (report["recompute"]["trajectories"], report["recompute"]["not_checked"]) == (8, {})
    assert report["counts"]["advantages_recomputed"] == VERSIONS * 4 * 4
    differences = [one["max_difference"] for one in report["recompute"]["behaviour"].values()]
    assert 0 <= max(differences) < 1e-4
    told = json.loads(lineage.stdout)
    assert [parent["version"] for parent in told["parents"]] == [2, 1, 0]
    assert told["sampled_under"] == {"2": 16}
    assert f"run tiny: {VERSIONS + 1} versions" in tree.stderr
    assert dot.stdout.startswith('digraph "tiny" {')
    assert "trained into version 3" in prompt.stderr
    assert leftovers(site) == []
