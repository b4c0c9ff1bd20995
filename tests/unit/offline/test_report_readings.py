"""What a report adds up, against numbers made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from consumers.offline.outcomes import Ends
from consumers.offline.report.bins import Histogram, parts
from consumers.offline.report.figure import Lives
from consumers.offline.report.figures_versions import branches, versions
from consumers.offline.report.ledger_reading import LedgerReading, Use
from consumers.offline.report.policy_reading import STEPS, WHOLE
from consumers.offline.report.reading import read_run
from consumers.offline.report.row_reading import RowReading
from consumers.offline.report.steps import Steps
from consumers.offline.run_log import TrajectoryEntry
from infra.ports import Message
from schemas.evaluation_codec import EvaluationRow, encode_evaluation, evaluation_headers
from schemas.ledger import Decision
from schemas.topics import TopicName, topic
from tests.fakes.log_script import decoded, trajectory
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN
from tests.fakes.told_run import decided, reading_of, step, troubled

# ---------------------------------------------------------------------- bounded summaries


def test_a_histogram_widens_and_loses_nothing_whatever_the_order() -> None:
    values = [0.5, 3.0, 9.0, 100.0, 2.0]
    up, down = Histogram(1.0, bins=8), Histogram(1.0, bins=8)
    for value in sorted(values):
        up.add(value)
    for value in sorted(values, reverse=True):
        down.add(value)

    assert (16.0, [4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]) == (up.width, up.weights)
    assert (up.width, up.weights) == (down.width, down.weights)
    assert up.total == 5.0
    assert up.quantile(0.5) == 16.0
    assert up.quantile(0.95) == 112.0


def test_a_stretch_of_time_is_spread_over_the_bins_it_covers() -> None:
    busy = Histogram(1.0, bins=4)
    busy.add_span(0.5, 2.25)
    busy.add_span(3.0, 3.0)

    assert busy.weights == [0.5, 1.0, 0.25, 0.0]
    assert busy.filled() == 3


def test_values_below_zero_count_in_the_first_bin_and_are_told() -> None:
    ages = Histogram(1.0, bins=2)
    ages.add(-0.5)

    assert (ages.weights, ages.below_zero) == ([1.0, 0.0], 1)


def test_a_histogram_with_an_odd_number_of_bins_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bins"):
        Histogram(1.0, bins=3)


def test_many_versions_become_few_points_and_each_belongs_to_one() -> None:
    shown = parts(10_000, 240)

    assert len(shown) <= 240
    assert len(parts(250)) == 250
    assert [index for part in shown for index in part] == list(range(10_000))


# ---------------------------------------------------------------------- policy


def test_a_switch_is_divided_into_its_phases() -> None:
    policy = troubled().reading

    assert list(policy.switch_versions) == [0, 1, 3, 4]
    assert list(policy.phases[WHOLE])[:2] == [4.0, 4.0]
    assert [policy.phases[name][0] for name in STEPS] == [1.0, 2.0, 1.0]
    assert list(policy.phases["fetch"]) == [0.5] * 6
    assert "prove" not in policy.phases


def test_failed_loads_and_switches_and_lost_workers_are_told_in_order() -> None:
    policy = troubled().reading

    assert [trouble.what for trouble in policy.troubles] == [
        "load failed", "load failed", "switch failed", "worker taken out",
    ]  # fmt: skip
    assert policy.trouble_counts == {"load failed": 2, "switch failed": 1, "worker taken out": 1}
    assert policy.lives[2].failed_us is not None
    assert policy.lives[2].is_superseded
    assert policy.lives[0].retired_us is not None


def test_the_time_of_a_worker_is_divided_by_what_its_proofs_say() -> None:
    policy = troubled().reading
    width, shares = policy.lane_shares()["g0"]
    seconds = {state: sum(values) * width for state, values in shares.items()}

    # Four switches it proved, each with 0.5 s of fetching and 0.375 s of draining and loading.
    assert seconds["fetching"] == pytest.approx(4 * 0.5)
    assert seconds["loading"] == pytest.approx(4 * 0.375)
    assert sum(seconds.values()) == pytest.approx(policy.wall_s - 1.0)  # it joined one second after the start
    gone = sum(map(sum, policy.lane_shares()["g1"][1].values())) * width
    assert gone < sum(seconds.values())


def test_branches_are_stretches_of_versions_from_parent_to_child() -> None:
    teller = troubled()
    found = branches(teller.reading.lives, teller.fold.newest)

    assert [(b.first, b.last, b.from_version, b.from_branch, b.is_current) for b in found] == [
        (0, 3, None, None, False),
        (4, 5, 1, 0, True),
    ]


# ---------------------------------------------------------------------- ledger


def test_dropped_and_trained_rows_are_compared_in_length_and_reward() -> None:
    ledger = LedgerReading()
    ledger.add(
        step(
            1,
            [
                decided(Decision.TRAINED, tokens=4, reward=1.0, offset=0),
                decided(Decision.TRAINED, tokens=6, reward=0.0, offset=1),
                decided(Decision.DROPPED, "stale", tokens=20, reward=1.0, offset=2),
                decided(Decision.DROPPED, "stale", tokens=40, reward=0.5, offset=3),
                decided(Decision.REPLAYED, tokens=4, offset=0),
            ],
        )
    )

    stale = ledger.dropped["stale"]
    assert (ledger.trained.rows, ledger.trained.mean_length, ledger.trained.mean_reward) == (2, 5.0, 0.5)
    assert (stale.rows, stale.mean_length, stale.mean_reward) == (2, 30.0, 0.75)
    assert (ledger.replayed, ledger.lags, ledger.dropped_rows) == (1, {1: 3}, 2)
    assert (ledger.dropped_lengths.total, list(ledger.dropped_before)) == (2.0, [2])
    assert sorted(ledger.uses) == [(0, 0), (0, 1)]


def test_a_metric_that_a_step_lacks_is_a_gap_there() -> None:
    ledger = LedgerReading()
    ledger.add(step(1))
    ledger.add(step(2, actor__entropy=1.5))
    ledger.add(step(3))

    column = list(ledger.column("actor/entropy"))

    assert [math.isnan(value) for value in column] == [True, False, True]
    assert Steps(ledger).values("actor/entropy") == [None, 1.5, None]
    assert Steps(ledger).values("actor/grad_norm") == [None, None, None]


def test_a_part_of_many_steps_shows_their_mean_and_of_a_largest_the_largest() -> None:
    ledger = LedgerReading()
    for version, value in enumerate((1.0, 3.0, 5.0, 7.0), start=1):
        ledger.add(step(version, actor__entropy=value, policy_lag__max=value))
    steps = Steps(ledger, most=2)

    assert steps.values("actor/entropy") == [2.0, 6.0]
    assert steps.values("policy_lag/max") == [3.0, 7.0]
    assert steps.labels == ["versions 1-2", "versions 3-4"]
    assert "stands for 2 versions" in steps.note


# ---------------------------------------------------------------------- trajectories


def test_a_trajectory_is_joined_with_the_step_that_used_it() -> None:
    use = Use(version_in=5, version_out=6, consumed_us=3_000_000, rows=0b01)
    rows = RowReading(uses={(2, 7): use}, ends=Ends(None, None), started_us=0, newest_step=6)
    group = [
        trajectory(
            index=index, segments=((4, 1, 1), (5, 2, 2)), finished_at_us=1_000_000, text=f"text {index}",
            loss_mask=np.array([True, True, False]), logprobs=np.array([-0.5, -0.5, 0.0], dtype=np.float32),
        )
        for index in range(2)
    ]  # fmt: skip
    rows.add(TrajectoryEntry(partition=2, offset=7, rows=decoded(group), error=None, value_sha256="", appended_at_ms=0))

    assert rows.met == {(6, 0): 1, (6, 1): 1}
    assert (rows.rows, rows.ages.total, rows.ages.quantile(0.5)) == (2, 1.0, pytest.approx(2.0, abs=0.07))
    assert {worker: tokens.total for worker, tokens in rows.tokens.items()} == {"g0": 4.0}
    assert [text.text for text in rows.texts()[0]] == ["text 0"]


def test_the_readings_of_a_run_agree_with_its_summary(tmp_path: Path) -> None:
    reading = read_run(TinyRun(tmp_path).run_log())

    assert (reading.ledger.trained.rows, reading.rows.rows, reading.ledger.dropped["duplicate"].rows) == (12, 14, 2)
    assert reading.ledger.lags == {0: 8, 1: 4}
    assert list(reading.ledger.versions) == [1, 2, 3]
    assert reading.ledger.refused_records == 1
    assert reading.ledger.groups == {("trained", ""): 6, ("dropped", "lost"): 1, ("dropped", "run_ended"): 2}
    assert sum(tokens.total for tokens in reading.rows.tokens.values()) == 42
    assert reading.rows.met == {(1, 0): 4, (2, 1): 4, (3, 0): 4}
    assert (reading.newest, reading.live, reading.policy.wall_s) == (3, 3, 14.0)
    assert {worker: list(idle.shares) for worker, idle in reading.idle.items()} == {"g0": [0.25] * 3, "g1": [0.75] * 3}
    assert set(reading.prompts.values()) == {"one, two:"}


def test_evaluations_are_read_by_version_and_kind(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    rows = [
        EvaluationRow(
            version=2, task="t", prompt_id=f"p{i}", sample=0, temperature=0.0 if i < 3 else 1.0, reward=reward,
            reward_error=None, completion_tokens=3, finish_reason="stop", evaluated_at_us=0,
        )
        for i, reward in enumerate((1.0, 0.0, None, 1.0))
    ]  # fmt: skip
    value = encode_evaluation(rows)
    message = Message(
        topic=topic(RUN, TopicName.EVALUATIONS), key=b"2", value=value, headers=evaluation_headers(rows, value, "e")
    )
    run.log.append(message)

    found = read_run(run.run_log()).evaluations

    assert {key: (s.rows, s.failed, s.mean) for key, s in found.items()} == {
        (True, 2): (3, 1, 0.5),
        (False, 2): (1, 0, 1.0),
    }


def test_the_last_versions_show_when_each_was_published_in_a_switch_live_or_failed() -> None:
    teller = troubled()
    section = versions(reading_of(teller, LedgerReading()))
    lives = next(part for part in section.parts if isinstance(part, Lives))
    rows = {row.name: row for row in lives.rows}

    assert rows["1"].spans == {"published": (8.0, 9.0), "in a switch": (9.0, 12.0), "live": (12.0, 26.0)}
    assert rows["1"].marks == {"g0": 10.0, "g1": 11.0}
    assert rows["2"].spans == {"published": (13.0, 14.0), "in a switch": (14.0, 17.0)}
    assert rows["2"].failed_at == 17.0
    assert rows["5"].spans == {"published": (32.0, 33.0)}
