"""The projector mirrors the log, and the tracker's troubles stay with the tracker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from consumers.projector import ProjectorPorts, ProjectorService, ProjectorSettings, in_thread
from schemas.errors import ConfigError, TrackerUnavailable
from schemas.policy_events import WorkerJoined
from tests.fakes.projected_log import RUN, FakeTracker, ProjectedLog, inline, run_to_rest, three_steps
from tests.fakes.virtual_clock import START_US


def _service(
    log: ProjectedLog,
    tracker: FakeTracker,
    *,
    batch_records: int = 200,
    background: Callable[..., Future[str | None]] = inline,
    **options: Any,
) -> ProjectorService:
    settings = ProjectorSettings(run=RUN, params=[{"lr": "1e-3"}], batch_records=batch_records, **options)
    ports = ProjectorPorts(reader=log.reader(), tracker=tracker, clock=log.clock, background=background)
    return ProjectorService(settings, ports)


@pytest.fixture
def log() -> ProjectedLog:
    return three_steps()


def test_every_version_has_an_entry_and_the_curves_have_its_points(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    run_to_rest(_service(log, tracker))

    assert sorted(tracker.versions) == [0, 1, 2, 3]
    assert [tracker.versions[version]["state"] for version in range(4)] == [
        "superseded",
        "was_live",
        "was_live",
        "live",
    ]
    assert [tracker.versions[version].get("parent") for version in range(4)] == [None, "0", "1", "2"]
    assert tracker.curve("critic/rewards/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert tracker.curve("ledger_total/trajectory/dropped/stale") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert tracker.params == [{"lr": "1e-3"}]


def test_a_run_that_ended_is_marked_finished_and_the_service_is_done(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker)
    run_to_rest(service)
    assert not service.finished

    log.end(3, at_s=99)
    run_to_rest(service)

    assert service.finished
    assert tracker.status == "finished"
    service.close()
    assert tracker.status == "finished"


def test_a_stop_in_the_middle_of_a_run_is_marked_killed_once(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker)
    run_to_rest(service)

    service.close()
    service.close()

    assert tracker.status == "killed"
    assert tracker.calls.count("end") == 1


def test_a_restart_goes_on_from_the_bookmark_and_shows_nothing_twice(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    run_to_rest(_service(log, tracker))
    calls_before = len(tracker.calls)

    run_to_rest(_service(log, tracker))
    assert tracker.calls[calls_before:] == ["start", "log_text", "promote"]

    log.full_step(4, at_s=40)
    run_to_rest(_service(log, tracker))

    assert tracker.curve("ledger_total/trajectory/trained")[-1] == (4, 8.0)
    assert tracker.versions[3]["state"] == "was_live"
    assert tracker.calls[calls_before:].count("log_step") == 2


@pytest.mark.parametrize("batch_records", [1, 2, 3, 7])
def test_the_size_of_a_batch_changes_nothing(log: ProjectedLog, batch_records: int) -> None:
    whole, small = FakeTracker(), FakeTracker()
    run_to_rest(_service(log, whole))
    run_to_rest(_service(log, small, batch_records=batch_records))

    assert small.points == whole.points
    assert small.versions == whole.versions


@pytest.mark.parametrize("batch_records", [1, 3, 200])
def test_a_ledger_that_is_read_before_the_policy_topic_changes_nothing(log: ProjectedLog, batch_records: int) -> None:
    log.end(3, at_s=99)
    one, other = FakeTracker(), FakeTracker()
    for first, tracker in (("demo.policy", one), ("demo.ledger", other)):
        settings = ProjectorSettings(run=RUN, batch_records=batch_records)
        ports = ProjectorPorts(reader=log.reader(first), tracker=tracker, clock=log.clock, background=inline)
        service = ProjectorService(settings, ports)
        run_to_rest(service)
        assert service.finished

    assert other.shown() == one.shown()
    assert other.versions[1]["parent_model"] == "of 0"


@pytest.mark.parametrize("call", range(40))
def test_a_tracker_that_fails_at_any_call_ends_up_with_the_same(log: ProjectedLog, call: int) -> None:
    """Nothing lost, nothing twice: the failed batch is projected again from the log."""
    healthy, sick = FakeTracker(), FakeTracker()
    run_to_rest(_service(log, healthy, batch_records=4))
    service = _service(log, sick, batch_records=4)
    while len(sick.calls) < call and service.step():
        pass
    sick.fail_next = 3

    for _ in range(10):
        run_to_rest(service)
        log.clock.advance(60)

    assert sick.points == healthy.points
    assert sick.versions == healthy.versions
    assert sick.bookmark == healthy.bookmark


def test_while_the_tracker_is_away_nothing_is_read_ahead(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    tracker.fail_next = 1
    service = _service(log, tracker)

    run_to_rest(service)
    tracker.fail_next = 1_000_000
    for _ in range(50):
        log.clock.advance(1)
        run_to_rest(service)

    assert tracker.points == {}
    assert tracker.bookmark is None
    assert set(tracker.calls) == {"start"}


def test_retries_back_off_and_one_warning_is_given(log: ProjectedLog, caplog: pytest.LogCaptureFixture) -> None:
    tracker = FakeTracker()
    tracker.fail_next = 1_000_000
    service = _service(log, tracker)

    with caplog.at_level(logging.WARNING):
        for _ in range(600):
            run_to_rest(service)
            log.clock.advance(1)

    # 1 + 2 + 4 + ... seconds, then one try a minute.
    assert 10 <= len(tracker.calls) <= 18
    assert [record.message for record in caplog.records] == ["tracker_unavailable"]


def test_a_deleted_experiment_stops_the_start_but_not_a_running_service(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    tracker.error = ConfigError("mlflow.experiment 'x' was deleted: restore it")
    tracker.fail_next = 1
    with pytest.raises(ConfigError, match="restore it"):
        run_to_rest(_service(log, tracker))

    service = _service(log, tracker)
    run_to_rest(service)
    log.full_step(4, at_s=40)
    tracker.fail_next = 2
    run_to_rest(service)
    log.clock.advance(1)
    run_to_rest(service)
    log.clock.advance(60)
    run_to_rest(service)

    assert tracker.curve("critic/rewards/mean")[-1][0] == 4


def test_a_replaced_run_gets_everything_again(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker)
    run_to_rest(service)
    whole = dict(tracker.points)
    # Somebody deletes the run: the tracker opens another one, which has no bookmark.
    tracker.points.clear()
    tracker.bookmark = None
    tracker.fail_next = 1
    log.full_step(4, at_s=40)

    run_to_rest(service)
    log.clock.advance(1)
    run_to_rest(service)

    assert whole.items() <= tracker.points.items()
    assert tracker.curve("critic/rewards/mean")[-1][0] == 4


def test_a_rebuild_gives_the_same_in_a_new_entry_that_takes_the_place_when_it_is_complete(log: ProjectedLog) -> None:
    log.end(3, at_s=99)
    tracker = FakeTracker()
    run_to_rest(_service(log, tracker))
    live = tracker.shown()
    service = _service(log, tracker, rebuild=True, batch_records=5)
    tracker.calls.clear()
    while not service.caught_up:
        assert not tracker.took_place
        service.step()
    assert not tracker.took_place
    service.close()

    assert tracker.took_place
    assert tracker.calls.count("log_version") > 4
    assert tracker.shown() == live


def test_a_rebuild_that_was_cut_off_does_not_take_the_place(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker, rebuild=True, batch_records=5)
    for _ in range(6):
        service.step()
    service.close()

    assert tracker.points
    assert not tracker.took_place


@pytest.mark.parametrize("bookmark", ["edited by hand", '{"ended":null,"ledger":9999,"policy":1,"totals":{}}'])
def test_a_bookmark_that_cannot_be_of_this_log_is_ignored(log: ProjectedLog, bookmark: str) -> None:
    tracker = FakeTracker()
    tracker.bookmark = bookmark
    run_to_rest(_service(log, tracker))

    assert tracker.curve("critic/rewards/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_an_unreadable_record_is_skipped_with_its_place(log: ProjectedLog, caplog: pytest.LogCaptureFixture) -> None:
    log.raw("demo.ledger", b"{broken")
    log.full_step(4, at_s=40)
    tracker = FakeTracker()
    service = _service(log, tracker)
    with caplog.at_level(logging.WARNING):
        run_to_rest(service)

    assert service.invalid_records == 1
    assert [record.message for record in caplog.records] == ["projection_skips_record"]
    assert tracker.curve("critic/rewards/mean")[-1][0] == 4


def test_a_step_does_not_wait_for_a_tracker_that_hangs(log: ProjectedLog) -> None:
    release = threading.Event()

    class HangingTracker(FakeTracker):
        def log_step(self, *args: object, **kwargs: object) -> None:
            assert release.wait(60)

    service = _service(log, HangingTracker(), background=in_thread)
    try:
        # If one of these waited, this test would never end: the tracker is released only afterwards.
        for _ in range(2_000):
            service.step()
    finally:
        release.set()
    service.close(timeout_s=60)


def test_nothing_is_asked_of_the_tracker_before_the_run_has_begun() -> None:
    log = ProjectedLog(empty=True)
    # A worker may be there before the trainer.
    log.policy(WorkerJoined(run=RUN, at_us=7, worker="g1", incarnation="i1", engine="hf", dtype="float32"))
    tracker = FakeTracker()
    service = _service(log, tracker)
    run_to_rest(service)
    assert (tracker.calls, service.has_begun) == ([], False)

    log.begin()
    run_to_rest(service)
    assert tracker.origin is not None
    assert tracker.origin.started_at_us == START_US
    assert sorted(tracker.versions) == [0]


def test_close_waits_no_longer_than_it_is_told(log: ProjectedLog, caplog: pytest.LogCaptureFixture) -> None:
    never: Future[str | None] = Future()
    service = _service(log, FakeTracker(), background=lambda work: never)
    while service.step():
        pass

    with caplog.at_level(logging.WARNING):
        service.close(timeout_s=0.01)

    assert [record.message for record in caplog.records] == ["tracker_not_closed"]


def test_work_in_a_thread_brings_its_error_back() -> None:
    def fails() -> str | None:
        raise TrackerUnavailable("locked")

    with pytest.raises(TrackerUnavailable, match="locked"):
        in_thread(fails).result(timeout=60)
    assert in_thread(lambda: "bookmark").result(timeout=60) == "bookmark"


def test_after_the_end_of_the_run_the_last_evaluation_is_waited_for_and_shown(log: ProjectedLog) -> None:
    tracker = FakeTracker()
    service = _service(log, tracker, await_evaluation_s=30.0)
    log.evaluation(2, 0.5)
    log.end(3, at_s=99)
    run_to_rest(service)
    assert not service.finished

    log.evaluation(3, 1.0, 0.0)
    run_to_rest(service)

    assert service.finished
    assert tracker.curve("evaluation/reward_mean") == [(2, 0.5), (3, 0.5)]
    assert tracker.curve("evaluation/greedy_reward_mean") == [(2, 0.5), (3, 0.5)]
    assert tracker.curve("evaluation/response_length_mean") == [(2, 3.0), (3, 3.0)]


def test_an_evaluation_that_does_not_come_is_waited_for_within_a_bound(log: ProjectedLog) -> None:
    service = _service(log, FakeTracker(), await_evaluation_s=30.0)
    log.end(3, at_s=99)
    run_to_rest(service)
    assert not service.finished

    log.clock.advance(30.0)

    assert service.finished
