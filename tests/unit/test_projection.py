"""The fold of policy and ledger into what a tracker shows."""

from __future__ import annotations

import pytest

from consumers.projection import Projection
from consumers.projection_rows import Bookmark, EndRow, Row, StepRow, VersionRow, decode_bookmark, merge_versions
from schemas.errors import InvalidRecord
from schemas.policy_events import VersionActivated, VersionFailed, VersionRetired
from tests.fakes.projected_log import RUN, ProjectedLog, dropped, trained
from tests.fakes.virtual_clock import START_US


def _fold(log: ProjectedLog, bookmark: Bookmark | None = None) -> tuple[list[Row], Projection]:
    projection = Projection(RUN, bookmark)
    return [row for record in log.records() for row in projection.apply(record)], projection


def _tags(rows: list[Row], version: int) -> dict[str, str]:
    merged: dict[str, str] = {}
    for row in rows:
        if isinstance(row, VersionRow) and row.version == version:
            merged |= row.tags
    return merged


def _curve(rows: list[Row], name: str) -> list[tuple[int, float]]:
    return sorted((row.step, row.metrics[name]) for row in rows if isinstance(row, StepRow) and name in row.metrics)


def test_a_version_shows_where_it_came_from_and_what_it_was_trained_on() -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=10)
    rows, _ = _fold(log)

    tags = _tags(rows, 1)
    assert tags["depth"] == "1"
    assert tags["checkpoint_uri"] == "demo/a1/manifest.json"
    assert tags["manifest_sha256"] == f"{1:064x}"
    assert tags["batch_digest"] == f"{1:064x}"
    assert tags["live_at"] == "2027-01-15T08:00:11.500000Z"
    assert tags["state"] == "live"
    assert {row.parent for row in rows if isinstance(row, VersionRow) and row.version == 1} == {0}


def test_a_switch_shows_how_long_it_took() -> None:
    log = ProjectedLog()
    log.publish(1, at_s=10)
    log.switch(1, at_s=12)
    rows, _ = _fold(log)

    assert _curve(rows, "switch/publish_to_live_seconds") == [(1, 2.5)]
    assert _curve(rows, "switch/seconds") == [(1, 0.5)]
    assert _curve(rows, "switch/acks") == [(1, 1.0)]


def test_versions_that_a_switch_jumped_over_are_superseded() -> None:
    log = ProjectedLog()
    log.switch(0, at_s=1)
    for version in (1, 2, 3):
        log.publish(version, at_s=version)
    log.switch(3, at_s=5)
    rows, _ = _fold(log)

    assert [_tags(rows, version)["state"] for version in range(4)] == ["was_live", "superseded", "superseded", "live"]


def test_a_retired_and_a_failed_version_say_why() -> None:
    log = ProjectedLog()
    log.switch(0, at_s=1)
    log.full_step(1, at_s=2)
    log.policy(VersionRetired(run=RUN, at_us=START_US, version=0, rule="keep=1"))
    rows, _ = _fold(log)

    assert _tags(rows, 0)["state"] == "retired"
    assert _tags(rows, 0)["retired_by"] == "keep=1"


def test_a_void_event_changes_nothing() -> None:
    log = ProjectedLog()
    log.publish(1, at_s=1)
    log.policy(VersionActivated(run=RUN, at_us=START_US, switch="old", version=1, acks=(1,)))
    log.policy(VersionFailed(run=RUN, at_us=START_US, switch="old", version=1, reason="late coordinator"))
    rows, _ = _fold(log)

    assert _tags(rows, 1)["state"] == "published"
    assert "live_at" not in _tags(rows, 1)


def test_drops_are_counted_by_reason_per_step_and_in_total() -> None:
    log = ProjectedLog()
    log.decisions(dropped(1, 5, "incomplete"), dropped(1, 6, "invalid:bad_length"))
    log.settle(at_s=1)
    log.full_step(1, at_s=2)
    log.full_step(2, at_s=3)
    rows, _ = _fold(log)

    assert _curve(rows, "ledger/trajectory/dropped/incomplete") == [(1, 1.0)]
    assert _curve(rows, "ledger/trajectory/dropped/invalid:bad_length") == [(1, 1.0)]
    assert _curve(rows, "ledger/trajectory/dropped/stale") == [(1, 1.0), (2, 1.0)]
    assert _curve(rows, "ledger_total/trajectory/dropped/stale") == [(1, 1.0), (2, 2.0)]
    assert _curve(rows, "ledger_total/trajectory/trained") == [(1, 2.0), (2, 4.0)]


def test_lag_of_what_was_trained_leaves_out_what_was_dropped() -> None:
    log = ProjectedLog()
    log.decisions(trained(1, 0, lag=0), trained(1, 1, lag=1), dropped(1, 2, "stale", lag=9))
    log.step(1, at_s=1, metrics={})
    rows, _ = _fold(log)

    assert _curve(rows, "ledger/policy_lag_mean") == [(1, 0.5)]
    assert _curve(rows, "ledger/policy_lag_max") == [(1, 1.0)]


def test_a_non_finite_metric_is_counted_and_named_never_a_number() -> None:
    log = ProjectedLog()
    log.step(1, at_s=1, metrics={"actor/lr": 1e-3}, nonfinite=("actor/ppo_kl", "actor/entropy"))
    log.step(2, at_s=2, metrics={"actor/lr": 1e-3})
    rows, _ = _fold(log)

    assert _curve(rows, "nonfinite_metrics") == [(1, 2.0), (2, 0.0)]
    assert _tags(rows, 1)["nonfinite"] == "actor/entropy,actor/ppo_kl"
    assert "nonfinite" not in _tags(rows, 2)


def test_headline_metrics_stand_at_the_version_and_only_there() -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=1, reward=0.75)
    rows, _ = _fold(log)

    at_version = [row.metrics for row in rows if isinstance(row, VersionRow) and row.metrics]
    assert at_version == [{"critic/rewards/mean": 0.75}]
    assert _curve(rows, "critic/rewards/mean") == []
    assert _curve(rows, "actor/lr") == [(1, 1e-3)]
    assert _curve(rows, "time/train_seconds") == [(1, 0.25)]


@pytest.mark.parametrize("cut", range(1, 30))
def test_going_on_from_a_bookmark_gives_what_one_fold_gives(cut: int) -> None:
    log = ProjectedLog()
    log.switch(0, at_s=0)
    log.full_step(1, at_s=1)
    log.decisions(dropped(9, 0, "lost"))
    log.settle(at_s=2)
    log.full_step(2, at_s=3)
    log.end(2, at_s=9)
    whole, _ = _fold(log)
    # The two topics come in turns, as from a broker.
    records = sorted(log.reader().poll(1_000), key=lambda record: (record.offset, record.topic))

    # A crash after `cut` records: what was shown then, and what the next process shows.
    projection = Projection(RUN)
    first = [row for record in records[:cut] for row in projection.apply(record)]
    bookmark = decode_bookmark(projection.bookmark().encode())
    second, resumed = _fold(log, bookmark)

    def as_set(rows: list[Row]) -> set[str]:
        return {repr(row) for row in rows}

    assert as_set(first) | as_set(second) == as_set(whole)
    assert resumed.complete


def test_a_run_is_complete_when_both_topics_say_so() -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=1)
    rows, projection = _fold(log)
    assert not projection.complete

    log.decisions(dropped(9, 0, "run_ended"))
    log.end(1, at_s=5)
    rows, projection = _fold(log)

    assert projection.complete
    assert [row for row in rows if isinstance(row, EndRow)] == [EndRow(status="finished", at_us=START_US + 5_000_000)]
    assert _curve(rows, "ledger_total/trajectory/dropped/run_ended") == [(1, 1.0)]


@pytest.mark.parametrize("topic", ["demo.policy", "demo.ledger"])
def test_an_unreadable_record_is_an_error_and_the_next_one_is_read(topic: str) -> None:
    log = ProjectedLog()
    log.raw(topic, b"{broken")
    log.full_step(1, at_s=1)
    projection = Projection(RUN)
    rows: list[Row] = []
    errors = []
    for record in log.reader().poll(1_000):
        try:
            rows += projection.apply(record)
        except InvalidRecord as error:
            errors.append(error)

    assert len(errors) == 1
    assert projection.invalid_records == 1
    assert _tags(rows, 1)["state"] == "live"
    assert _curve(rows, "actor/lr") == [(1, 1e-3)]


def test_reason_codes_from_rows_cannot_grow_the_counters_without_bound() -> None:
    log = ProjectedLog()
    for index in range(300):
        log.decisions(dropped(1, index, f"invalid:code_{index}"))
    log.step(1, at_s=1, metrics={})
    _, projection = _fold(log)

    totals = projection.bookmark().totals
    assert len(totals) <= 201
    assert sum(totals.values()) == 300


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"policy": 1}', '{"policy":1,"ledger":1,"totals":{},"ended":"x"}']
)
def test_a_text_that_is_no_bookmark_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a bookmark"):
        decode_bookmark(text)


def test_a_record_of_another_topic_is_a_mistake_of_ours() -> None:
    log = ProjectedLog()
    log.log.create_topic("demo.scores", 1)
    log.raw("demo.scores", b"x")
    record = log.log.client("p").reader({"demo.scores": 1}, "beginning").poll(1)[0]

    with pytest.raises(ValueError, match=r"does not read demo\.scores"):
        Projection(RUN).apply(record)


def test_rows_of_one_version_become_one_with_the_latest_tags() -> None:
    step = StepRow(step=1, metrics={"a": 1.0}, at_us=5)
    rows: list[Row] = [
        VersionRow(version=1, parent=0, tags={"state": "published", "depth": "1"}, at_us=1),
        step,
        VersionRow(version=1, parent=None, tags={"batch": "x"}, metrics={"r": 0.5}, at_us=2),
        VersionRow(version=2, parent=1, tags={"state": "published"}, at_us=3),
        VersionRow(version=1, parent=0, tags={"state": "live"}, at_us=4),
    ]

    assert merge_versions(rows) == [
        VersionRow(
            version=1, parent=0, tags={"state": "live", "depth": "1", "batch": "x"}, metrics={"r": 0.5}, at_us=2
        ),
        VersionRow(version=2, parent=1, tags={"state": "published"}, at_us=3),
        step,
    ]


def test_rows_with_metrics_of_two_times_stay_apart() -> None:
    rows: list[Row] = [
        VersionRow(version=1, parent=0, tags={}, metrics={"r": 0.5}, at_us=1),
        VersionRow(version=1, parent=0, tags={}, metrics={"r": 0.6}, at_us=2),
        VersionRow(version=1, parent=0, tags={"state": "live"}, at_us=3),
    ]

    assert [(len(row.tags), row.at_us) for row in merge_versions(rows) if isinstance(row, VersionRow)] == [
        (0, 1),
        (1, 2),
    ]
