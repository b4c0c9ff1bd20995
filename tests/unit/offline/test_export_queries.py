"""The page of queries: each runs on an export and answers; every column of every table is on the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from consumers.offline.export import ExportOptions, export
from consumers.offline.export import tables as tables
from consumers.offline.export.trajectories import PARTITION_KEY, TRAJECTORIES
from tests.fakes.tiny_export import add_scores
from tests.fakes.tiny_run import TinyRun

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "queries.md").read_text(encoding="utf-8")
QUERIES = dict(re.findall(r"^### (\d+)\. [^\n]*\n.*?```sql\n(.*?)```", PAGE, re.S | re.M))
SCHEMAS = {
    "trajectories": [PARTITION_KEY, *TRAJECTORIES.names],
    "decisions": tables.DECISION_ROWS.names,
    "groups": tables.GROUPS.names,
    "requests": tables.REQUESTS.names,
    "steps": tables.STEPS.names,
    "step_metrics": tables.STEP_METRICS.names,
    "policy": tables.POLICY.names,
    "workers": tables.WORKERS.names,
    "refused": tables.REFUSED.names,
}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    folder = tmp_path_factory.mktemp("queries")
    run = TinyRun(folder / "store")
    add_scores(run, version=2)
    export(run.run_log(), folder / "out", ExportOptions(), now_us=0, build="test")
    views = re.search(r"```sql\n-- views\n(.*?)```", PAGE, re.S)
    assert views is not None
    with duckdb.connect() as opened:
        opened.execute(views.group(1).replace("demo-parquet", str(folder / "out")))
        yield opened


def _ask(connection: duckdb.DuckDBPyConnection, number: int) -> Rows:
    found = connection.execute(QUERIES[str(number)])
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def test_the_page_holds_ten_queries() -> None:
    assert list(QUERIES) == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("table", SCHEMAS)
def test_the_page_names_every_column_of_a_table(table: str) -> None:
    section = PAGE.partition("## The columns")[2].partition(f"### {table}\n")[2].partition("\n##")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]

    assert sorted(SCHEMAS[table]) == sorted(name for cell in first_cells for name in re.findall(r"`(\w+)`", cell))


def test_query_1_compares_dropped_with_trained(connection: duckdb.DuckDBPyConnection) -> None:
    rows = _ask(connection, 1)

    assert [(r["decision"], r["reason"], r["trajectories"]) for r in rows] == [
        ("trained", "", 12),
        ("dropped", "duplicate", 2),
    ]
    assert (rows[0]["tokens_mean"], rows[0]["tokens_p95"], rows[0]["reward_mean"]) == (3.0, 3.0, 1.0)


def test_query_2_shows_rewards_by_worker(connection: duckdb.DuckDBPyConnection) -> None:
    rows = _ask(connection, 2)

    assert [(r["worker_id"], r["trajectories"], r["failed_share"], r["truncated_share"]) for r in rows] == [
        ("g0", 6, 0.0, 0.0),
        ("g1", 8, 0.0, 0.0),
    ]
    assert rows[0]["reward_mean"] == 1.0


def test_query_3_shows_ratios_by_lag(connection: duckdb.DuckDBPyConnection) -> None:
    rows = _ask(connection, 3)

    assert [(r["policy_lag"], r["trajectories"]) for r in rows] == [(1, 4)]
    assert rows[0]["log_ratio_mean"] == pytest.approx(0.125)
    assert rows[0]["log_ratio_abs_max"] == pytest.approx(0.25)


def test_query_4_lists_prompts_that_were_never_trained(connection: duckdb.DuckDBPyConnection) -> None:
    assert _ask(connection, 4) == [
        {"prompt_id": "prompt-6", "attempts": 1, "reasons": ["run_ended"]},
        {"prompt_id": "prompt-7", "attempts": 1, "reasons": ["run_ended"]},
    ]


def test_query_5_counts_tokens_by_version(connection: duckdb.DuckDBPyConnection) -> None:
    assert _ask(connection, 5) == [
        {"sampled_by": 0, "tokens": 30, "tokens_trained": 24},
        {"sampled_by": 2, "tokens": 12, "tokens_trained": 12},
    ]


def test_query_6_finds_the_most_off_policy_trajectories(connection: duckdb.DuckDBPyConnection) -> None:
    rows = _ask(connection, 6)

    assert len(rows) == 4
    assert (rows[0]["sampled_by"], rows[0]["trained_at_version"], rows[0]["policy_lag"]) == (0, 2, 1)


def test_query_7_follows_the_reward_of_prompts(connection: duckdb.DuckDBPyConnection) -> None:
    rows = {r["prompt_id"]: r for r in _ask(connection, 7)}

    assert len(rows) == 6
    assert rows["prompt-0"] == {
        "prompt_id": "prompt-0",
        "times": 1,
        "first_reward": 0.5,
        "last_reward": 0.5,
        "first_version": 1,
        "last_version": 1,
    }


def test_query_8_measures_the_wait(connection: duckdb.DuckDBPyConnection) -> None:
    rows = _ask(connection, 8)

    assert [r["trained_at_version"] for r in rows] == [1, 2, 3]
    assert all(r["waited_s_max"] >= r["waited_s_p50"] >= r["to_log_s_p50"] == 1.0 for r in rows)


def test_query_9_counts_groups_without_variance(connection: duckdb.DuckDBPyConnection) -> None:
    assert _ask(connection, 9) == [{"task": "tiny", "groups": 6, "zero_variance_share": 0.0, "all_rewarded_share": 0.0}]


def test_query_10_shows_switch_latencies(connection: duckdb.DuckDBPyConnection) -> None:
    assert _ask(connection, 10) == [
        {"worker": worker, "switches": 4, "seconds_p50": 0.0, "seconds_max": 0.0, "slowest_phase_s": 0.1}
        for worker in ("g0", "g1")
    ]
