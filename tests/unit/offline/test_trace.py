"""A life told from the log: trajectory, group, version, worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consumers.offline.trace import trace
from schemas import policy_events as ev
from schemas.errors import IllegalState, UsageError
from schemas.topics import TopicName, topic
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

AGAIN, LOST = "tiny/p000001/e0/a1", "tiny/p000001/e0/a0"


def test_a_trajectory_is_told_from_request_to_version(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)

    told = trace(run.run_log(), f"{AGAIN}/0")
    facts = json.loads(told.to_json())

    assert facts["request"]["position"] == 4
    assert facts["request"]["attempt"] == 1
    row = facts["rows"][0]
    assert (row["worker"], row["incarnation"], row["reward"]) == ("g1", "i1", 2.0)
    assert row["segments"][0]["version"] == 0
    assert row["segments"][0]["proof"]["probe_diff_old"] == 0.3
    decision = row["decisions"][0]
    assert (decision["decision"], decision["version"], decision["policy_lag"]) == ("trained", 2, 1)
    assert (decision["weight"], decision["advantage"], decision["age_s"]) == (1.0, 1.0, 2.0)
    for words in (
        "request 4 at prompts[4]@0",
        "claimed by worker g1",
        "proof policy@",
        "trained into version 2",
        "lag 1",
    ):
        assert words in told.text()


def test_a_trajectory_with_two_claims_shows_both_rows_and_their_ends(tmp_path: Path) -> None:
    told = trace(TinyRun(tmp_path).run_log(), "tiny/p000003/e0/a0/0")

    ends = [row["decisions"][0]["decision"] for row in told.facts["rows"]]
    assert ends == ["trained", "dropped"]
    assert "dropped: duplicate" in told.text()


def test_a_group_that_was_lost_says_so(tmp_path: Path) -> None:
    told = trace(TinyRun(tmp_path).run_log(), "tiny/p000001/e0/a0")

    assert told.kind == "group"
    assert "no row of it is in the log" in told.text()
    assert "the group is dropped: lost" in told.text()


def test_a_group_lists_its_rows_and_what_became_of_them(tmp_path: Path) -> None:
    told = trace(TinyRun(tmp_path).run_log(), AGAIN)

    assert [row["outcome"] for row in told.facts["rows"]] == ["trained into version 2"] * 2


def test_a_version_shows_parent_batch_proofs_and_time_live(tmp_path: Path) -> None:
    told = trace(TinyRun(tmp_path).run_log(), "2")

    assert (told.facts["parent"], told.facts["status"]) == (1, "was_live")
    assert told.facts["step"]["groups"] == ["tiny/p000003/e0/a0", AGAIN]
    assert told.facts["step"]["dropped"] == {"duplicate": 2}
    assert [proof["worker"] for proof in told.facts["proofs"]] == ["g0", "g1"]
    assert told.facts["live"]["followed_by"] == 3
    assert "live" in told.text()
    assert "for 4.000 s until version 3" in told.text()


def test_version_0_was_made_by_no_step_and_a_failed_switch_shows(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    failed = ev.LoadFailed(
        run=RUN,
        at_us=1,
        switch=None,
        worker="g0",
        incarnation="i1",
        version=0,
        reason="disk",
        weights_touched=False,
    )
    run.append_event(failed)

    told = trace(run.run_log(), "0")

    assert "made by no training step" in told.text()
    assert "LoadFailed at policy@" in told.text()


def test_a_worker_shows_its_events_and_what_became_of_its_work(tmp_path: Path) -> None:
    told = trace(TinyRun(tmp_path).run_log(), "g1")

    assert told.facts["trajectories"] == {"trained": 6, "duplicate": 2}
    assert told.facts["last_heartbeat"]["version"] == 3
    assert "VersionLoaded incarnation i1 version 2" in told.text()


def test_a_void_event_of_a_worker_is_marked(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    run.append_event(ev.WorkerLeft(run=RUN, at_us=1, worker="g0", incarnation="old", reason="late"))

    assert "VOID: not a current incarnation" in trace(run.run_log(), "g0").text()


def test_an_altered_row_still_shows_both_its_row_and_the_decision_without_one(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    Forge(run).edit_decision(f"{AGAIN}/0", offset=70)

    text = trace(run.run_log(), f"{AGAIN}/0").text()

    assert "not decided" in text
    assert "decided without a row in the log: trained into version 2" in text


@pytest.mark.parametrize("subject", ["tiny/p000001", "p1", "prompt:prompt-1", "prompt-1"])
def test_a_prompt_shows_every_attempt_its_decision_and_its_rewards(tmp_path: Path, subject: str) -> None:
    told = trace(TinyRun(tmp_path).run_log(), subject)
    facts = json.loads(told.to_json())

    assert (facts["kind"], facts["prompt"], facts["prompt_id"]) == ("prompt", [1], "prompt-1")
    first, second = facts["attempts"]
    assert (first["group_id"], first["rewards"], first["decisions"][0]["reason"]) == (LOST, [], "lost")
    assert (second["group_id"], second["rewards"], second["mean_reward"]) == (AGAIN, [2.0, 0.0], 1.0)
    assert (second["decisions"][0]["version"], second["sampled_by_versions"]) == (2, [0])
    assert second["rows"] == {"trained": 2}
    for words in ("asked for 2 times in 1 passes", "dropped: lost", "trained into version 2", "rewards 2, 0, mean 1"):
        assert words in told.text()


def test_a_prompt_that_is_open_is_not_decided(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    group = run.open_groups()[0]

    assert "not decided" in trace(run.run_log(), group.removesuffix("/e0/a0")).text()


def test_what_retention_removed_is_told_with_the_rest(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.log.drop_before(topic(RUN, TopicName.TRAJECTORIES), 2, 1)

    told = trace(run.run_log(), AGAIN)

    assert told.facts["missing"] == ["tiny.trajectories[2]: records 0-0 are no longer in the log (retention)"]
    assert "note: tiny.trajectories[2]: records 0-0" in told.text()


def test_a_record_of_a_newer_build_is_told_and_a_ledger_of_one_is_refused(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    for name, schema in ((TopicName.TRAJECTORIES, b"trajectory/2.0"), (TopicName.LEDGER, b"decisions/2.0")):
        records = [r for r in run.records(name) if r.header("arrow-schema") is not None]
        record = next((r for r in records if r.key == AGAIN.encode()), records[0])
        if name is TopicName.LEDGER:
            assert "'trajectory/2.0', this build knows trajectory/1.x; upgrade" in trace(run.run_log(), AGAIN).text()
        Forge(run).say_schema(record, schema)

    with pytest.raises(IllegalState, match=r"tiny.ledger\[0\]@\d+: .*'decisions/2.0', this build knows decisions/1.x"):
        trace(run.run_log(), AGAIN)


@pytest.mark.parametrize("subject", ["tiny/p000077/e0/a0/0", "tiny/p000077/e0/a0", "77", "nobody", "p77"])
def test_what_the_log_does_not_know_is_a_usage_error(tmp_path: Path, subject: str) -> None:
    with pytest.raises(UsageError, match=subject):
        trace(TinyRun(tmp_path).run_log(), subject)
