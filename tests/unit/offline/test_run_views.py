"""Samples, summary and status of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consumers.offline.samples import samples
from consumers.offline.status import status
from consumers.offline.summary import summarise, write_summary
from schemas import policy_events as ev
from schemas.errors import IllegalState
from schemas.topics import TopicName
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

# ---------------------------------------------------------------------- samples


def test_the_best_samples_of_a_version_come_first_with_text_and_decision(tmp_path: Path) -> None:
    found = samples(TinyRun(tmp_path).run_log(), version=2, limit=2)

    assert [sample.reward for sample in found] == [2.0, 2.0]
    assert {sample.decision for sample in found} == {"trained"}
    assert found[0].prompt_text == "one, two:"
    assert found[0].text == f"answer 0 of {found[0].trajectory_id.rpartition('/')[0]}"
    assert found[0].version == 2
    assert json.dumps(found[0].to_dict())
    assert "[trained]" in found[0].line()


def test_the_worst_samples_of_the_run_include_dropped_ones(tmp_path: Path) -> None:
    found = samples(TinyRun(tmp_path).run_log(), order="worst", limit=100)

    assert len(found) == 14
    assert found[0].reward == 0.0
    assert found[-1].reward == 3.0
    assert {(s.decision, s.reason) for s in found} == {("trained", ""), ("dropped", "duplicate")}


def test_samples_that_are_not_decided_yet_are_pending(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    run.append_group(run.rows("tiny/p000004/e0/a0", "g0", 3, reward=9.0))

    best = samples(run.run_log(), limit=1)[0]

    assert (best.reward, best.decision, best.version) == (9.0, "pending", None)


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        samples(TinyRun(tmp_path).run_log(), limit=0)


# ---------------------------------------------------------------------- summary


def test_the_summary_of_a_run_adds_up(tmp_path: Path) -> None:
    summary = summarise(
        TinyRun(tmp_path).run_log(),
        audit_findings=0,
        audit_notices=2,
        greedy_success_before=0.25,
        greedy_success_after=0.75,
    )

    assert summary.trajectories_trained + sum(summary.dropped.values()) == summary.trajectories_in_log == 14
    assert (summary.undecided, summary.refused_records, summary.groups_trained) == (0, 1, 6)
    assert (summary.versions_published, summary.versions_trained, summary.versions_live) == (4, 3, 4)
    assert summary.dropped == {"duplicate": 2}
    assert summary.dropped_groups == {"lost": 1, "run_ended": 2}
    assert summary.policy_lag_histogram == {0: 8, 1: 4}
    assert summary.max_policy_lag_trained == 1
    assert (summary.success_first, summary.success_last, summary.complete_groups) == (0.5, 1.5, 6)
    assert (summary.tokens_generated, summary.tokens_trained) == (42, 36)
    assert (summary.wall_s, summary.trainer_idle_fraction, summary.generator_idle_fraction) == (14.0, 0.5, 0.5)
    assert (summary.age_seconds_mean, summary.age_seconds_max) == (2.0, 5.0)
    assert (summary.audit_findings, summary.audit_notices) == (0, 2)
    assert (summary.greedy_success_before, summary.greedy_success_after) == (0.25, 0.75)


def test_rows_behind_the_end_count_for_nothing(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.append_group(run.rows("tiny/p000006/e0/a0", "g0", 3))

    summary = summarise(run.run_log())

    assert (summary.trajectories_in_log, summary.after_end, summary.complete_groups) == (14, 2, 6)


def test_a_run_under_way_counts_what_is_not_decided(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    run.append_group(run.rows("tiny/p000005/e0/a0", "g0", 3))

    summary = summarise(run.run_log())

    assert (summary.ended, summary.undecided, summary.trajectories_in_log) == (False, 2, 16)


def test_a_run_that_does_not_add_up_has_no_summary(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    trained = {row.trajectory_id for _, row in Forge(run).trained()}
    Forge(run).edit_decisions(1, lambda rows: [row for row in rows if row.trajectory_id != min(map(str, trained))])

    with pytest.raises(IllegalState, match=r"14 trajectories in the log, but 11 trained and 2 dropped"):
        summarise(run.run_log())


def test_a_record_refused_as_a_whole_is_no_trajectory_even_if_it_decodes_here(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    poison = next(r for r in run.records(TopicName.TRAJECTORIES) if r.key == b"poison")
    good = next(r for r in run.records(TopicName.TRAJECTORIES) if r.key != b"poison")
    Forge(run).rewrite(poison, value=good.value, headers=good.headers)

    assert summarise(run.run_log()).trajectories_in_log == 14


def test_the_summary_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "tiny" / "summary.json"
    summary = summarise(TinyRun(tmp_path).run_log())

    write_summary(summary, path)

    assert json.loads(path.read_text()) == summary.to_dict()
    assert json.loads(path.read_text())["policy_lag_histogram"] == {"0": 8, "1": 4}
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]


# ---------------------------------------------------------------------- status


def test_the_status_of_a_run_under_way_says_what_the_trainer_waits_for(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    run.clock.advance(2.0)

    found = status(run.run_log(), now_us=run.clock.now_us())

    assert (found.state, found.newest_version, found.live_version, found.steps) == ("running", 3, 3, 3)
    assert [(w.worker, w.standing, w.state) for w in found.workers] == [
        ("g0", "admitted", "serving"),
        ("g1", "admitted", "serving"),
    ]
    assert found.workers[0].heartbeat_age_s == 2.0
    assert found.open_groups == 4
    assert found.lag_histogram == {"0": 8, "1": 4}
    assert (found.dropped, found.dropped_groups) == ({"duplicate": 2}, {"lost": 1})
    assert found.tokens_per_s == 10.0
    assert found.steps_per_minute == 15.0
    assert found.health == {"ess": 0.9, "entropy": 1.5, "clip_fraction": 0.1, "kl": 0.01, "trainer_idle": 0.5}
    assert "claimed by g1" in found.waiting_for[0]
    assert "claimed by nobody" in found.waiting_for[1]
    assert "the trainer waits for group tiny/" in found.text()
    assert json.loads(found.to_json())["open_groups"] == 4


def test_groups_that_lie_in_the_log_are_not_waited_for(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    before = status(run.run_log(), now_us=run.clock.now_us())
    run.append_group(run.rows(run.open_groups()[0], "g0", 3))

    found = status(run.run_log(), now_us=run.clock.now_us())

    assert found.trajectories_waiting == 2
    assert len(found.waiting_for) == len(before.waiting_for) - 1


def test_an_ended_run_waits_for_nothing(tmp_path: Path) -> None:
    found = status(TinyRun(tmp_path).run_log(), now_us=0)

    assert (found.state, found.open_groups, found.waiting_for) == ("ended", 0, ())


def test_without_workers_the_trainer_waits_for_one(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    for worker in ("g0", "g1"):
        run.append_event(ev.WorkerLeft(run=RUN, at_us=1, worker=worker, incarnation="i1", reason="signal"))

    assert status(run.run_log(), now_us=0).waiting_for == ("a worker: none is there",)


def test_an_open_switch_is_told(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    Forge(run).remove(Forge(run).policy_records(ev.VersionActivated)[-1])
    Forge(run).remove(Forge(run).policy_records(ev.VersionLoaded)[-1])

    found = status(run.run_log(), now_us=0)

    assert found.open_switch == "to version 3 (1 of 2 proven), waits for g1"
    assert "switch: to version 3" in found.text()
