"""Excerpts of the ledger and topic ranges, a block of steps at a time."""

from __future__ import annotations

import csv
import io
from itertools import pairwise

import pytest

from consumers import projection_blocks
from consumers.projection import Projection
from consumers.projection_blocks import range_text
from consumers.projection_rows import BlockRow, Bookmark, decode_bookmark
from infra.tracker_port import RangeRead
from schemas.ledger import PartitionProgress, Position
from tests.fakes.projected_log import RUN, ProjectedLog, dropped, trained


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection_blocks, "BLOCK_STEPS", 3)


def _log(steps: int) -> ProjectedLog:
    log = ProjectedLog()
    for version in range(1, steps + 1):
        log.full_step(version, at_s=version)
    return log


def _blocks(log: ProjectedLog, bookmark: Bookmark | None = None) -> tuple[list[BlockRow], Projection]:
    projection = Projection(RUN, bookmark)
    rows = [row for record in log.records() for row in projection.apply(record)]
    return [row for row in rows if isinstance(row, BlockRow)], projection


def _table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_blocks_follow_each_other_without_a_gap_and_the_rest_is_the_open_file() -> None:
    log = _log(8)
    blocks, projection = _blocks(log)

    assert [[row["version"] for row in _table(block.text)] for block in blocks] == [["1", "2", "3"], ["4", "5", "6"]]
    assert [block.read.partitions for block in blocks] == [{0: (0, 12)}, {0: (12, 24)}]
    assert [block.read.records for block in blocks] == [12, 12]
    assert len({block.name for block in blocks} | {block.path for block in blocks}) == 4
    path, text = projection.open_file() or ("", "")
    assert [row["version"] for row in _table(text)] == ["7", "8"]
    assert path not in {block.path for block in blocks}


def test_a_line_says_what_was_decided_and_where_it_stands() -> None:
    log = ProjectedLog()
    log.decisions(trained(1, 0, lag=0), trained(1, 1, lag=2), trained(1, 2, lag=2), dropped(1, 3, "stale", lag=3))
    log.settle(at_s=1)
    log.decisions(dropped(1, 4, "lost"))
    log.step(1, at_s=2, metrics={})
    _, projection = _blocks(log)

    (line,) = _table((projection.open_file() or ("", ""))[1])
    assert line == {
        "version": "1", "parent": "0", "at": "2027-01-15T08:00:02.000000Z", "groups": "1", "trajectories": "2",
        "trained": "3", "replayed": "0", "dropped": "2", "dropped_by_reason": "lost:1 stale:1",
        "groups_dropped_by_reason": "", "policy_lag_histogram": "0:1 2:2", "ledger_offsets": "0-3",
        "trajectories_read": "0:[0,4)",
    }  # fmt: skip


def test_the_end_of_a_run_closes_its_block_and_an_extension_begins_another() -> None:
    log = _log(2)
    log.decisions(dropped(9, 0, "run_ended"))
    log.end(2, at_s=9)
    log.start_again(at_s=10)
    log.step(3, at_s=11, metrics={})
    blocks, projection = _blocks(log)

    (block,) = blocks
    assert [row["version"] for row in _table(block.text)] == ["1", "2", "end"]
    assert _table(block.text)[-1]["dropped_by_reason"] == "run_ended:1"
    path, text = projection.open_file() or ("", "")
    assert [row["version"] for row in _table(text)] == ["3"]
    assert path != block.path
    assert not projection.complete


@pytest.mark.parametrize("cut", range(1, 15))
def test_a_fold_that_goes_on_from_a_bookmark_writes_the_same_files_and_ranges(cut: int) -> None:
    log = _log(7)
    whole, folded = _blocks(log)
    projection = Projection(RUN)
    ledger = [record for record in log.records() if record.topic == "demo.ledger"]
    first = [row for record in ledger[:cut] for row in projection.apply(record) if isinstance(row, BlockRow)]
    second, resumed = _blocks(log, decode_bookmark(projection.bookmark().encode()))

    assert {block.path: block for block in [*first, *second]} == {block.path: block for block in whole}
    assert resumed.open_file() == folded.open_file()
    assert all(a.path < b.path for a, b in pairwise(whole))


def test_records_that_were_left_undecided_are_carried_into_the_next_range() -> None:
    blocks = projection_blocks.Blocks("demo.trajectories")
    undecided = Position(
        open_groups=(), next_request=0, prompt_cursor=0,
        partitions={0: PartitionProgress(next_offset=9, undecided=(4, 7)), 1: PartitionProgress(next_offset=3)},
    )  # fmt: skip
    blocks.passed(undecided, 5)
    after = undecided.model_copy(
        update={"partitions": {0: PartitionProgress(next_offset=12), 1: PartitionProgress(next_offset=3)}}
    )

    read = blocks.range_of_step(after)

    assert read == RangeRead(topic="demo.trajectories", partitions={0: (9, 12), 1: (3, 3)}, carried={0: (4, 7)})
    assert range_text(read) == "0:[9,12) 1:[3,3) carried 0:4+7"
    assert read.records == 3
