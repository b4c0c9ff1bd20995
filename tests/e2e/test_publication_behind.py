"""Publications behind the compute on the real stack: a killed trainer, a stop in between, and an audit of it all."""

from __future__ import annotations

import signal

import pytest

from driftlog.broker_access import reading_broker
from driftlog.run_reading import opened
from schemas.ledger import StepCompleted
from tests.e2e.driving import Site, going, kill_service, leftovers, up, wait_for_version

pytestmark = [pytest.mark.long, pytest.mark.soak]

OVERLAPS = "trainer.overlap_publication=true"


def test_a_run_with_overlap_survives_a_killed_trainer_and_a_stop_and_audits_clean(site: Site) -> None:
    with going(site, OVERLAPS, "run.versions=500") as process:
        wait_for_version(site, 3)
        kill_service(site, "trainer")
        wait_for_version(site, 8)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert leftovers(site) == []
    reached = [step.version_out for step in _steps(site)][-1]

    done = up(site, OVERLAPS, f"run.versions={reached + 4}")

    assert done.returncode == 0, done.stderr
    summary = site.summary()
    assert (summary["versions_trained"], summary["undecided"], summary["audit_findings"]) == (reached + 4, 0, 0)
    assert summary["trajectories_trained"] + sum(summary["dropped"].values()) == summary["trajectories_in_log"]
    steps = _steps(site)
    assert [(s.version_in, s.version_out) for s in steps] == [(n, n + 1) for n in range(reached + 4)]
    assert sum("trainer/publication_behind_seconds" in s.metrics for s in steps) >= reached


def _steps(site: Site) -> list[StepCompleted]:
    config = site.run().stored_config()
    assert config is not None
    with reading_broker(config, site.run()) as bootstrap:
        transactions = opened(config, site.run(), bootstrap).log().transactions()
        return [t.control for t in transactions if isinstance(t.control, StepCompleted)]
