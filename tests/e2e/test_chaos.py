"""kill -9 of a generator, the trainer and the coordinator in one run: it ends by itself, nothing is lost or twice."""

from __future__ import annotations

from tests.e2e.chaos_smoke import VICTIMS, check, run_with_deaths
from tests.e2e.driving import Site


def test_a_run_survives_the_death_of_each_service(site: Site) -> None:
    summary = run_with_deaths(site, VICTIMS, versions=14)

    assert check(summary, 14) == []


def test_the_check_of_a_run_names_what_is_missing() -> None:
    whole = {
        "versions_trained": 2,
        "groups_trained": 8,
        "trajectories_trained": 32,
        "trajectories_in_log": 36,
        "dropped": {"duplicate": 4},
        "undecided": 0,
        "audit_findings": 0,
    }

    assert check(whole, 2) == []
    assert check({**whole, "groups_trained": 7}, 2) == ["groups_trained is 7, expected 8"]
    assert check({**whole, "dropped": {}}, 2) == ["trained + dropped is not what lies in the log"]
