"""`up --from-version`: what it gives up is said, the branch is trained to its end, and the same words do not branch
twice unasked.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.driving import Site, driftlog, going, leftovers, make_site, up, wait_for_version

pytestmark = pytest.mark.long

BRANCH = ("--from-version", "3")


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory, kafka_jars: Path) -> Iterator[Site]:
    """A run of 6 versions that goes on from version 3, interrupted. The tests go on from each other."""
    site = make_site(tmp_path_factory.mktemp("branching"))
    done = up(site, "run.versions=6")
    assert done.returncode == 0, done.stderr
    with going(site, "run.versions=500", options=BRANCH) as process:
        wait_for_version(site, 8)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    where = ("--run", "tiny", "--directory", str(site.runs))
    assert driftlog("broker", "start", *where).returncode == 0  # so that each command need not
    yield site
    assert driftlog("down", *where).returncode == 0
    assert leftovers(site) == []


def test_what_the_branch_gives_up_is_said(branched: Site) -> None:
    said = (branched.folder / "up-tiny.txt").read_text()

    assert "going on from version 3: versions 4-6 (3 steps) stay in the log as another branch" in said


def test_what_cannot_be_is_refused_before_anything_starts(branched: Site) -> None:
    log = branched.run().logs / "trainer.log"
    before, (newest, _) = log.read_text(), _newest(branched)
    for version, words in ((999, f"no such version; the run has versions 0-{newest}"), (newest, "it is the newest")):
        refused = up(branched, "run.versions=500", options=("--from-version", str(version)))

        assert refused.returncode == 2, refused.stderr
        assert words in refused.stderr
        assert "Traceback" not in refused.stderr
    assert log.read_text() == before


def test_a_branch_that_was_interrupted_is_gone_on_with_by_the_same_command(branched: Site) -> None:
    reached, depth = _newest(branched)

    resumed = up(branched, f"run.versions={depth + 2}", options=(*BRANCH, "--json"))

    assert resumed.returncode == 0, resumed.stderr
    assert "going on with the branch from version 3, begun as version 7" in resumed.stderr
    summary = json.loads(resumed.stdout)
    assert (summary["newest_version"], summary["newest_step"]) == (reached + 2, depth + 2)
    assert summary["branches"] == [{"version": 7, "from_version": 3, "left_versions": [4, 5, 6], "left_steps": 3}]
    assert summary["versions_trained"] == 6 + depth + 2 - 3
    assert (summary["audit_findings"], summary["undecided"]) == (0, 0)
    assert summary["switch_latency_s"]["published_to_live"]["count"] >= 6


def test_the_same_command_after_the_end_says_that_the_branch_is_done(branched: Site) -> None:
    reached, depth = _newest(branched)

    again = up(branched, f"run.versions={depth}", options=BRANCH)

    assert again.returncode == 0, again.stderr
    assert "the branch from version 3 is done: it began as version 7" in again.stderr
    assert "say --from-version 7" in again.stderr
    assert _newest(branched) == (reached, depth)


def test_status_and_audit_know_the_branch(branched: Site) -> None:
    reached, depth = _newest(branched)

    told = driftlog("status", "--directory", str(branched.runs))
    given_up = driftlog("trace", "--never-trained", "--directory", str(branched.runs), "--json")

    assert f"newest version {reached} (step {depth})" in told.stderr
    assert "branch: version 7 goes on from version 3; versions 4-6 (3 steps) stay in the log" in told.stderr
    assert "switches (last" in told.stderr
    assert json.loads(given_up.stdout) == {"run": "tiny", "never_trained": []}
    assert driftlog("audit", "--directory", str(branched.runs)).returncode == 0


def test_a_run_that_does_not_exist_is_not_begun_by_a_wish_to_branch(site: Site) -> None:
    refused = up(site, options=BRANCH)

    assert refused.returncode == 2
    assert "there is no run 'tiny'" in refused.stderr
    assert not site.run().path.exists()


def _newest(site: Site) -> tuple[int, int]:
    """The newest version, and the training steps that led to it."""
    found = json.loads(driftlog("status", "--directory", str(site.runs), "--json").stdout)
    return found["newest_version"], found["newest_step"]
