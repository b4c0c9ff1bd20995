"""The Parquet files of an export: bounded memory and open files, how columns are encoded, and who else reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped]
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from consumers.offline.export import ExportOptions, export, parquet
from consumers.offline.export.parquet import PartitionedTable, parquet_options
from consumers.offline.export.trajectories import TRAJECTORIES
from tests.fakes.tiny_export import PROXIMAL, add_scores
from tests.fakes.tiny_run import TinyRun


def _batch(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"a": list(range(rows)), "x": [[0.5, 0.25]] * rows}, schema=_SCHEMA)


_SCHEMA = pa.schema([pa.field("a", pa.int64()), pa.field("x", pa.list_(pa.float32()))])


def _write(root: Path, order: Sequence[int], rows: int = 10) -> PartitionedTable:
    table = PartitionedTable(root, "version", _SCHEMA)
    for number in order:
        table.add(number, _batch(rows))
    table.close()
    return table


def test_partitions_in_any_order_keep_few_files_open_and_lose_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(parquet, "_OPEN_FILES", 2)

    table = _write(tmp_path, [0, 1, 2, 0, 0, 5, 1])

    assert (table.rows, table.partitions, table.files) == (70, 4, 6)
    assert pq.read_table(tmp_path).num_rows == 70
    assert sorted(path.name for path in (tmp_path / "version=0").iterdir()) == [
        "part-0000.parquet",
        "part-0001.parquet",
    ]


def test_what_is_held_back_is_bounded_over_all_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_HELD_BYTES", 1_000)

    table = PartitionedTable(tmp_path, "version", _SCHEMA)
    for number in range(100):
        table.add(number % 10, _batch(10))
        assert sum(table._bytes.values()) <= 1_000
    table.close()

    assert pq.read_table(tmp_path).num_rows == 1_000


def test_log_probabilities_are_split_by_byte_and_strings_go_through_dictionaries(tmp_path: Path) -> None:
    options = parquet_options(TRAJECTORIES)
    assert {"logprobs.list.element", "proximal_logprobs.list.element"} == {
        one for one in options["use_byte_stream_split"] if not one.startswith("reference")
    }
    run = TinyRun(tmp_path / "store")
    add_scores(run, version=1)

    export(run.run_log(), tmp_path / "out", ExportOptions(), now_us=0, build="test")

    group = pq.ParquetFile(tmp_path / "out/trajectories/version=0/part-0000.parquet").metadata.row_group(0)
    encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    for name in ("logprobs.list.element", "proximal_logprobs.list.element", "reference_logprobs.list.element"):
        assert "BYTE_STREAM_SPLIT" in encodings[name]
    for name in ("worker_id", "decision", "token_ids.list.element", "reward_parts.key_value.key"):
        assert "RLE_DICTIONARY" in encodings[name], name
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(an export, the trajectories that were trained into version 2, with scores)."""
    folder = tmp_path_factory.mktemp("exported")
    run = TinyRun(folder / "store")
    ids = add_scores(run, version=2)
    export(run.run_log(), folder / "out", ExportOptions(), now_us=0, build="test")
    return folder / "out", sorted(ids)


def test_pandas_reads_an_export(exported: tuple[Path, list[str]]) -> None:
    out, ids = exported

    rows = pd.read_parquet(out / "trajectories")
    steps = pd.read_parquet(out / "steps.parquet")

    trained = rows[(rows.decision == "trained") & (rows.trained_at_version == 2)].sort_values("trajectory_id")
    assert len(rows) == 14
    assert trained.trajectory_id.tolist() == ids
    assert [values.tolist() for values in trained.proximal_logprobs] == [list(PROXIMAL)] * len(ids)
    assert trained.mean_log_ratio.tolist() == [0.125] * len(ids)
    assert str(rows.requested_at.dt.tz) == "UTC"
    assert steps.version.tolist() == [1, 2, 3]


def test_polars_reads_an_export(exported: tuple[Path, list[str]]) -> None:
    out, ids = exported

    rows = pl.scan_parquet(out / "trajectories")
    trained = rows.filter(pl.col("decision") == "trained", pl.col("trained_at_version") == 2).sort("trajectory_id")
    found = trained.select("trajectory_id", "proximal_logprobs", "mean_log_ratio").collect()
    by_version = rows.group_by("version").len().sort("version").collect()

    assert found["trajectory_id"].to_list() == ids
    assert found["proximal_logprobs"].to_list() == [list(PROXIMAL)] * len(ids)
    assert found["mean_log_ratio"].to_list() == [0.125] * len(ids)
    assert by_version["len"].sum() == 14
    assert rows.collect_schema()["requested_at"] == pl.Datetime("us", "UTC")
