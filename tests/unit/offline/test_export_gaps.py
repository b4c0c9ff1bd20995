"""What an export cannot read it says in one message, or lists when that is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from consumers.offline.export import ExportOptions, ExportReport, export
from schemas.errors import IllegalState, RangeMissing
from schemas.topics import TopicName, topic
from tests.fakes.tiny_export import add_scores
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


@pytest.mark.parametrize(
    ("name", "partition"),
    [(TopicName.TRAJECTORIES, 2), (TopicName.POLICY, 0), (TopicName.PROMPTS, 3), (TopicName.LEDGER, 0)],
)
def test_records_lost_to_retention_are_one_message(tmp_path: Path, name: TopicName, partition: int) -> None:
    run = TinyRun(tmp_path / "store")
    full = topic(RUN, name)
    run.log.drop_before(full, partition, 1)

    with pytest.raises(RangeMissing) as caught:
        _export(run, tmp_path / "out")

    assert str(caught.value) == (
        f"{full}[{partition}]: records 0-0 are no longer in the log (retention). "
        "Export what is left with --allow-missing"
    )


def test_gaps_that_are_accepted_stand_in_the_manifest(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    run.log.drop_before(NAME, 2, 1)

    report = _export(run, tmp_path / "out", allow_missing=True)

    assert report.missing == ["tiny.trajectories[2]: records 0-0 are no longer in the log (retention)"]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["missing"] == report.missing
    assert report.tables["trajectories"]["rows"] == 12
    assert f"missing: {report.missing[0]}" in report.lines()


def test_a_truncated_topic_is_one_message(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    del run.log.partition(NAME, 1).entries[1:]

    with pytest.raises(RangeMissing, match=r"tiny.trajectories\[1\]: records 1-1 were decided .* topic ends at 1"):
        _export(run, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "schema", "known"),
    [
        (TopicName.TRAJECTORIES, b"trajectory/2.0", "trajectory/1.x"),
        (TopicName.LEDGER, b"decisions/2.0", "decisions/1.x"),
        (TopicName.PROMPTS, b"prompt/2.0", "prompt/1.x"),
        (TopicName.SCORES, b"scores/2.0", "scores/1.x"),
    ],
)
def test_an_unknown_schema_version_is_one_message(tmp_path: Path, name: TopicName, schema: bytes, known: str) -> None:
    run = TinyRun(tmp_path / "store")
    add_scores(run, version=1)
    record = Forge(run).newer(name, schema)

    with pytest.raises(IllegalState) as caught:
        _export(run, tmp_path / "out")

    said = str(caught.value)
    assert f"{topic(RUN, name)}[{record.partition}]@{record.offset}: " in said
    assert f"{schema.decode()!r}, this build knows {known}; upgrade the reader" in said


def test_unreadable_records_that_are_accepted_stand_in_the_manifest(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    record = run.records(TopicName.PROMPTS)[0]
    Forge(run).rewrite(record, value=b"?")

    report = _export(run, tmp_path / "out", allow_missing=True)

    assert len(report.unreadable) == 1
    assert report.unreadable[0].startswith(f"tiny.prompts[{record.partition}]@{record.offset}: ")
    strangers = [g for g in _read(tmp_path / "out", "groups") if g["prompt_id"] is None]
    assert [g["group_id"] for g in strangers] == [record.key.decode() if record.key else ""]
