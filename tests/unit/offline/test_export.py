"""An export holds the log: whole, joined, once, and never in silence about what is missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from consumers.offline.cache.writer import refresh
from consumers.offline.export import TABLES, ExportOptions, ExportReport, export
from consumers.offline.export.scores import spool_scores
from consumers.offline.export.trajectories import TRAJECTORIES
from consumers.offline.outcomes import first_outcomes
from consumers.offline.trajectory_batches import trajectory_batches
from schemas.errors import IllegalState, UsageError
from schemas.ledger import Decision
from schemas.topics import TopicName, topic
from tests.fakes.tiny_export import PROXIMAL, add_scores, append_raw_rows, append_scores
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

NAME = topic(RUN, TopicName.TRAJECTORIES)
Rows = list[dict[str, Any]]


def _export(run: TinyRun, out: Path, **options: Any) -> ExportReport:
    return export(run.run_log(), out, ExportOptions(**options), now_us=7, build="test")


def _read(out: Path, table: str) -> Rows:
    path = out / table if table == "trajectories" else out / f"{table}.parquet"
    rows: Rows = pq.read_table(path).to_pylist()
    return rows


def _by_id(rows: Rows) -> dict[str, dict[str, Any]]:
    return {row["trajectory_id"]: row for row in rows if row["decision"] == "trained"}


# ---------------------------------------------------------------------- what is in it


def test_each_trajectory_is_one_row_with_its_decision(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    outcomes = first_outcomes(run.run_log())
    run_rows = {
        (entry.partition, entry.offset, row.row): row.trajectory
        for entry in run.run_log().trajectories()
        for row in entry.rows
    }

    report = _export(run, tmp_path / "out")

    rows = _read(tmp_path / "out", "trajectories")
    assert report.tables["trajectories"] == {"rows": 14, "files": 2}
    assert {(r["partition"], r["offset"], r["row"]) for r in rows} == set(run_rows)
    for row in rows:
        place = (row["partition"], row["offset"], row["row"])
        found, trajectory = outcomes[place], run_rows[place]
        assert trajectory is not None
        assert row["token_ids"] == trajectory.token_ids.tolist()
        assert (row["decision"], row["reason"]) == (found.decision.decision.value, found.decision.reason)
        assert (row["policy_lag"], row["weight"]) == (found.decision.policy_lag, found.decision.weight)
        assert (row["advantage"], row["use_count"]) == (found.decision.advantage, found.decision.use_count)
        assert row["trained_at_version"] == (found.version if row["decision"] == "trained" else None)
        assert row["version"] == row["newest_version"] == trajectory.segments[0].version
        assert (row["prompt_tokens"], row["completion_tokens"], row["sampled_tokens"]) == (2, 3, 3)


def test_scores_of_the_first_use_are_joined_and_summed_up(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    ids = add_scores(run, version=2)
    append_scores(run, ids[0].rpartition("/")[0], [ids[0]], 5, (-9.0, -9.0, -9.0))
    append_scores(run, "tiny/p000004/e0/a0", ["tiny/p000004/e0/a0/0"], 2, (-1.0, float("inf")))

    _export(run, tmp_path / "out")

    every = _read(tmp_path / "out", "trajectories")
    rows = _by_id(every)
    assert {one for one, row in rows.items() if row["proximal_logprobs"] is not None} == set(ids)
    duplicates = [r for r in every if r["decision"] == "dropped"]
    assert {r["trajectory_id"] for r in duplicates} <= set(ids)
    assert [r["proximal_logprobs"] for r in duplicates] == [None, None]
    for one in ids:
        assert rows[one]["proximal_logprobs"] == list(PROXIMAL)
        assert rows[one]["reference_logprobs"] == [value - 1 for value in PROXIMAL]
        assert (rows[one]["mean_log_ratio"], rows[one]["max_abs_log_ratio"]) == (0.125, 0.25)
    assert not list((tmp_path / "out").glob(".*"))


def test_masked_tokens_count_for_no_ratio(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store", versions=0, end=False)

    def masked(number: int, columns: dict[str, Any]) -> None:
        columns["loss_mask"] = np.array([False, True, True])
        columns["logprobs"] = np.array([0.0, -0.25, -1.0], dtype=np.float32)

    append_raw_rows(run, run.rows("tiny/p000004/e0/a0", "g0", 0), masked)
    append_scores(run, "tiny/p000004/e0/a0", ["tiny/p000004/e0/a0/1"], 2, PROXIMAL)
    spool, problems = spool_scores(run.run_log(), tmp_path)
    (batch,) = trajectory_batches(run.run_log())

    mean, largest, proximal, _ = spool.join(batch.rows, np.array([True, True]))
    spool.close()

    assert (mean.to_pylist(), largest.to_pylist()) == ([None, 0.0625], [None, 0.125])
    assert proximal.to_pylist() == [None, list(PROXIMAL)]
    assert problems == []


def test_replays_are_counted_in_the_join_and_listed_in_decisions(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    again = next(decision for version, decision in Forge(run).trained() if version == 1)

    def replayed(rows: list[Any]) -> list[Any]:
        return [*rows, dataclasses.replace(again, decision=Decision.REPLAYED, use_count=2)]

    Forge(run).edit_decisions(3, replayed)

    _export(run, tmp_path / "out")

    assert again.trajectory_id is not None
    row = _by_id(_read(tmp_path / "out", "trajectories"))[again.trajectory_id]
    assert (row["use_count"], row["trained_at_version"]) == (2, 1)
    listed = [d for d in _read(tmp_path / "out", "decisions") if d["trajectory_id"] == again.trajectory_id]
    assert [(d["decision"], d["version"], d["use_count"]) for d in listed] == [("trained", 1, 1), ("replayed", 3, 2)]


def test_the_other_tables_hold_their_topics(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    decided = [d for t in run.run_log().transactions() for d in t.decisions]

    _export(run, tmp_path / "out")

    assert len(_read(tmp_path / "out", "decisions")) == len(decided)
    assert [(s["version_in"], s["version"], s["groups"]) for s in _read(tmp_path / "out", "steps")] == [
        (0, 1, 2),
        (1, 2, 2),
        (2, 3, 2),
    ]
    metrics = {(m["version"], m["name"]): m["value"] for m in _read(tmp_path / "out", "step_metrics")}
    assert metrics[2, "age_seconds/max"] == 4.0
    policy = _read(tmp_path / "out", "policy")
    assert [p["offset"] for p in policy] == [r.offset for r in run.records(TopicName.POLICY)]
    assert all(p["counts"] and json.loads(p["event"])["type"] == p["type"] for p in policy)
    groups = {g["group_id"]: g for g in _read(tmp_path / "out", "groups")}
    assert (groups["tiny/p000001/e0/a0"]["decision"], groups["tiny/p000001/e0/a0"]["reason"]) == ("dropped", "lost")
    assert groups["tiny/p000003/e0/a0"]["rows"] == 2  # the second claim's rows are no part of it
    assert (groups["tiny/p000003/e0/a0"]["reward_mean"], groups["tiny/p000003/e0/a0"]["reward_std"]) == (1.0, 1.0)
    requests = _read(tmp_path / "out", "requests")
    assert sorted(r["group_id"] for r in requests) == sorted(groups)
    assert (requests[0]["prompt_text"], requests[0]["prompt_token_ids"]) == ("one, two:", [1, 2])
    workers = _read(tmp_path / "out", "workers")
    assert [(w["worker"], w["sequence"]) for w in workers] == [("g0", 3), ("g1", 3)]
    assert [(r["row"], r["code"]) for r in _read(tmp_path / "out", "refused")] == [(None, "no_schema_header")]


def test_void_and_unreadable_events_are_listed_as_such(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    records = run.records(TopicName.POLICY)
    Forge(run).rewrite(records[-1], value=b"{}")
    Forge(run).remove(records[2])

    _export(run, tmp_path / "out", tables=("policy",))

    odd = [p for p in _read(tmp_path / "out", "policy") if not p["counts"]]
    assert odd
    assert all(p["problem"] for p in odd)
    assert odd[-1]["event"] is None


# ---------------------------------------------------------------------- options


def test_tokens_and_texts_are_left_out_on_demand(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    add_scores(run, version=1)

    _export(run, tmp_path / "out", tokens=False, text=False)

    names = set(pq.read_table(tmp_path / "out" / "trajectories").column_names)
    gone = {"prompt_token_ids", "token_ids", "logprobs", "loss_mask", "proximal_logprobs", "reference_logprobs", "text"}
    assert set(TRAJECTORIES.names) - names == gone
    assert not {"prompt_token_ids", "prompt_text"} & set(
        pq.read_table(tmp_path / "out" / "requests.parquet").column_names
    )
    assert _by_id(_read(tmp_path / "out", "trajectories"))["tiny/p000000/e0/a0/0"]["mean_log_ratio"] == 0.125


@pytest.mark.parametrize("table", TABLES)
def test_each_table_can_be_asked_for_alone(tmp_path: Path, table: str) -> None:
    run = TinyRun(tmp_path / "store")
    _export(run, tmp_path / "whole")

    report = _export(run, tmp_path / "out", tables=(table,))

    companions = {"steps": {"step_metrics"}, "trajectories": {"refused"}}.get(table, set())
    assert set(report.tables) == {table} | companions
    expected = _read(tmp_path / "whole", table)
    found = _read(tmp_path / "out", table)
    assert [str(row) for row in found] == [str(row) for row in expected]


def test_an_unknown_table_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--tables rollouts: known are trajectories,decisions"):
        ExportOptions(tables=("rollouts",))


def test_an_export_from_the_cache_is_the_one_from_the_log(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    add_scores(run, version=2)
    _export(run, tmp_path / "direct")
    log = run.run_log()

    cached = export(
        log,
        tmp_path / "cached",
        ExportOptions(),
        now_us=7,
        build="test",
        cache=lambda index: refresh(log, tmp_path / "cache", position=index.position).cache,
    )

    assert cached.to_dict() == json.loads((tmp_path / "direct" / "manifest.json").read_text())
    for table in (*TABLES, "refused", "step_metrics"):
        assert str(_read(tmp_path / "cached", table)) == str(_read(tmp_path / "direct", table))


# ---------------------------------------------------------------------- while the run goes on


def test_what_is_undecided_is_said_and_what_comes_later_is_not_in_it(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store", end=False)
    run.append_group(run.rows("tiny/p000004/e0/a0", "g0", 3))
    log = run.run_log()
    run.append_group(run.rows("tiny/p000005/e0/a0", "g0", 3))

    report = export(log, tmp_path / "out", ExportOptions(), now_us=7, build="test")

    assert report.tables["trajectories"]["rows"] == 16
    assert report.undecided == {"groups": 4, "trajectories undecided": 2, "trajectories after_end": 0}
    assert "not decided yet (the run is under way): 4 groups, 2 trajectories undecided" in report.lines()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["is_ended"] is False
    assert sum(ends["end"] for name, ends in manifest["topics"].items() if NAME in name) == 9


def test_rows_behind_the_end_of_the_run_are_marked(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    run.append_group(run.rows("tiny/p000007/e0/a0", "g0", 3))

    report = _export(run, tmp_path / "out")

    assert report.undecided["trajectories after_end"] == 2
    late = [r for r in _read(tmp_path / "out", "trajectories") if r["decision"] == "after_end"]
    assert [(r["weight"], r["use_count"], r["reason"]) for r in late] == [(None, None, None)] * 2


def test_a_run_that_has_only_begun_can_be_exported(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store", versions=0, end=False)

    report = _export(run, tmp_path / "out")

    assert report.tables["trajectories"] == {"rows": 0, "files": 1}
    assert _read(tmp_path / "out", "trajectories") == []


# ---------------------------------------------------------------------- the folder


def test_an_existing_folder_is_replaced_only_by_force_and_only_when_it_is_an_export(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    out = tmp_path / "out"
    _export(run, out, tables=("steps",))

    with pytest.raises(UsageError, match="exists: choose another --out, or replace it with --force"):
        _export(run, out, tables=("policy",))
    _export(run, out, tables=("policy",), force=True)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "policy.parquet"]
    (out / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="is not an export of driftlog"):
        _export(run, out, force=True)
    assert (out / "policy.parquet").exists()


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    Forge(run).flip_byte(run.records(TopicName.LEDGER)[-1], 5)

    with pytest.raises(IllegalState, match=r"tiny.ledger\[0\]@\d+: .*Nothing was skipped.*--allow-missing"):
        _export(run, tmp_path / "exports" / "out")

    assert list((tmp_path / "exports").iterdir()) == []
