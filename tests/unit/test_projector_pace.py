"""When the projector writes, when the registry follows, and what an end, a stop and a restart do to both."""

from __future__ import annotations

from typing import Any

import pytest

from consumers.projection_rows import decode_bookmark
from consumers.projector import ProjectorPorts, ProjectorService, ProjectorSettings
from tests.fakes.projected_log import RUN, FakeTracker, ProjectedLog, inline, run_to_rest, three_steps


def _service(log: ProjectedLog, tracker: FakeTracker, **options: Any) -> ProjectorService:
    ports = ProjectorPorts(reader=log.reader(), tracker=tracker, clock=log.clock, background=inline)
    return ProjectorService(ProjectorSettings(run=RUN, **options), ports)


@pytest.fixture
def log() -> ProjectedLog:
    return three_steps()


def test_what_arrives_is_held_for_the_interval_and_written_at_once_at_the_end(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker, write_every_s=5.0)
    run_to_rest(service)
    log.full_step(4, at_s=40)
    run_to_rest(service)
    assert 4 not in tracker.versions

    log.clock.advance(5)
    run_to_rest(service)
    assert tracker.versions[4]["state"] == "live"

    log.full_step(5, at_s=50)
    log.end(5, at_s=60)
    run_to_rest(service)
    assert (tracker.versions[5]["state"], tracker.status) == ("live", "finished")
    assert service.finished


def test_what_is_held_is_written_when_the_service_is_told_to_stop(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker, write_every_s=5.0)
    run_to_rest(service)
    log.full_step(4, at_s=40)
    run_to_rest(service)
    service.close()

    assert tracker.versions[4]["state"] == "live"
    assert tracker.promoted.aliases == {"live": 4}
    assert tracker.status == "killed"


def test_the_registry_follows_at_its_own_interval_and_at_the_end(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker, promote_every_s=10.0)
    run_to_rest(service)
    assert tracker.promoted.aliases["live"] == 3
    log.full_step(4, at_s=40)
    run_to_rest(service)
    assert (tracker.versions[4]["state"], tracker.promoted.aliases["live"]) == ("live", 3)

    log.clock.advance(10)
    run_to_rest(service)
    assert tracker.promoted.aliases["live"] == 4

    log.full_step(5, at_s=50)
    log.end(5, at_s=60)
    run_to_rest(service)
    assert tracker.promoted.aliases["live"] == 5


def test_after_a_restart_the_aliases_never_go_back(log: ProjectedLog) -> None:
    """The fold begins at the start of the log, where version 0 is the newest."""
    tracker = FakeTracker()
    run_to_rest(_service(log, tracker))
    moved: list[int] = []
    promote = tracker.promote
    tracker.promote = lambda wanted: (moved.append(wanted.aliases.get("live", -1)), promote(wanted))[1]  # type: ignore[method-assign]

    log.full_step(4, at_s=40)
    run_to_rest(_service(log, tracker, batch_records=1))

    assert set(moved) == {4}


def test_a_run_that_is_extended_after_its_end_is_shown_to_its_last_end(log: ProjectedLog) -> None:
    log.end(3, at_s=50)
    log.start_again(at_s=60)
    tracker = FakeTracker()
    service = _service(log, tracker)
    run_to_rest(service)
    assert not service.finished

    log.full_step(4, at_s=70)
    log.end(4, at_s=80)
    again = FakeTracker()
    for each, other in ((service, tracker), (_service(log, again), again)):
        run_to_rest(each)
        assert each.finished
        assert other.status == "finished"
    assert again.shown() == tracker.shown()


def test_the_last_events_of_a_run_move_the_bookmark_although_they_show_nothing(log: ProjectedLog) -> None:
    log.end(3, at_s=50)
    tracker = FakeTracker()
    service = _service(log, tracker, batch_records=1)
    run_to_rest(service)

    assert service.finished
    assert tracker.bookmark is not None
    assert decode_bookmark(tracker.bookmark).policy == len([r for r in log.records() if r.topic == "demo.policy"])
