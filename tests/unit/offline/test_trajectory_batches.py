"""Large batches hold what the row-by-row reading holds: the same rows, the same refusals, in whole records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from consumers.offline.run_log import RunLog
from consumers.offline.trajectory_batches import ROWS, trajectory_batches
from schemas.arrow_stream import Column, Format, write_rows
from schemas.errors import IllegalState
from schemas.topics import TopicName
from schemas.trajectory_codec import batch_row_hashes
from schemas.trajectory_schema import TRAJECTORY, to_row
from tests.fakes.tiny_export import append_raw_rows
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun

Place = tuple[int, int, int]


def _expected(log: RunLog) -> tuple[dict[Place, str], set[tuple[Any, ...]]]:
    """Hashes of the rows that are fine, and the refusals, as the reading row by row has them."""
    rows, refused = {}, set()
    for entry in log.trajectories():
        if entry.error is not None:
            refused.add((entry.partition, entry.offset, None, entry.error.code))
        for row in entry.rows:
            if row.trajectory is None:
                refused.add((entry.partition, entry.offset, row.row, row.code))
            else:
                rows[entry.partition, entry.offset, row.row] = row.row_sha256
    return rows, refused


def _found(log: RunLog, **options: Any) -> tuple[dict[Place, str], set[tuple[Any, ...]]]:
    rows: dict[Place, str] = {}
    refused = set()
    for batch in trajectory_batches(log, **options):
        assert batch.rows.schema.equals(ROWS)
        places = zip(*[batch.rows.column(name).to_pylist() for name in ("partition", "offset", "row")], strict=True)
        rows |= dict(zip(places, batch_row_hashes(batch.rows), strict=True))
        refused |= {(r.partition, r.offset, r.row, r.code) for r in batch.refused}
    return rows, refused


def _odd_run(tmp_path: Path) -> TinyRun:
    run = TinyRun(tmp_path, end=False)

    def spoil(number: int, columns: dict[str, Any]) -> None:
        if number == 1:
            columns["logprobs"] = np.array([-1, np.nan, -1], dtype=np.float32)

    append_raw_rows(run, run.rows("tiny/p000004/e0/a0", "g0", 3), spoil)
    both = [*run.rows("tiny/p000005/e0/a0", "g0", 3), *run.rows("tiny/p000006/e0/a0", "g0", 3)]
    append_raw_rows(run, both, lambda number, columns: None)
    append_raw_rows(run, run.rows("tiny/p000007/e0/a0", "g0", 3), lambda number, columns: columns.update(reward=None))
    return run


@pytest.mark.parametrize("batch_rows", [1, 5, 2_048])
def test_batches_hold_the_rows_and_refusals_of_the_reading_row_by_row(tmp_path: Path, batch_rows: int) -> None:
    log = _odd_run(tmp_path).run_log()
    expected = _expected(log)

    assert _found(log, batch_rows=batch_rows) == expected
    assert {code for *_, code in expected[1]} == {"no_schema_header", "nan_logprob", "several_groups"}


def test_a_batch_is_closed_by_bytes_before_it_is_full(tmp_path: Path) -> None:
    log = TinyRun(tmp_path).run_log()

    assert [batch.rows.num_rows + len(batch.refused) for batch in trajectory_batches(log, batch_bytes=1)] == [
        len(entry.rows) or 1 for entry in log.trajectories()
    ]


def test_batches_say_how_far_they_reach_and_can_go_on_from_there(tmp_path: Path) -> None:
    log = TinyRun(tmp_path).run_log()
    first = next(iter(trajectory_batches(log, batch_rows=4)))

    rest = list(trajectory_batches(log, start=first.next_offsets))

    assert first.rows.num_rows == 4
    assert sum(batch.rows.num_rows for batch in rest) == 10
    assert rest[-1].next_offsets == dict.fromkeys(range(4), 2)


def test_columns_of_a_later_minor_version_and_foreign_child_names_are_read(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    rows = run.rows("tiny/p000004/e0/a0", "g0", 3)
    odd = [
        Column(name=c.name, type=pa.list_(pa.field("element", pa.int32())), doc="") if c.name == "token_ids" else c
        for c in TRAJECTORY.columns
    ]
    later = Format("trajectory", 1, 1, "TrajectoriesCompleted", [*odd, Column(name="new", type=pa.utf8(), doc="")])
    value = write_rows(later, [(*to_row(t), "more") for t in rows])
    headers = later.headers(rows=2, value=value, source="later", at_us=1, event_id="later")
    run._append_trajectories(b"later", value, headers)
    log = run.run_log()

    assert _found(log) == _expected(log)
    assert len(_expected(log)[0]) == 16


def _of_version_2(run: TinyRun) -> tuple[int, int]:
    record = run.records(TopicName.TRAJECTORIES)[-1]
    Forge(run).say_schema(record, b"trajectory/2.0")
    return record.partition, record.offset


def test_an_unknown_schema_version_stops_the_reading_with_one_message(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    partition, offset = _of_version_2(run)

    with pytest.raises(IllegalState) as caught:
        list(trajectory_batches(run.run_log()))

    assert f"tiny.trajectories[{partition}]@{offset}: header arrow-schema is 'trajectory/2.0'" in str(caught.value)
    assert "this build knows trajectory/1.x; upgrade the reader; nothing was skipped" in str(caught.value)


def test_a_schema_version_that_the_trainer_refused_is_a_refusal(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    place = _of_version_2(run)

    batches = list(trajectory_batches(run.run_log(), known_foreign=frozenset([place])))

    assert [r.code for batch in batches for r in batch.refused] == ["no_schema_header", "schema_version"]
