"""The Arrow cache: it holds the log, grows with it, and is never used for another log or with other bytes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from consumers.offline.cache import MANIFEST, open_cache, writer
from consumers.offline.cache.writer import Refreshed, refresh
from consumers.offline.run_log import RunLog
from consumers.offline.trajectory_batches import trajectory_batches
from schemas.errors import IllegalState, RangeMissing, UsageError
from schemas.topics import TopicName, topic
from schemas.trajectory_validate import TrajectoryLimits
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

NAME = topic(RUN, TopicName.TRAJECTORIES)


def _table(log: RunLog) -> pa.Table:
    return _sorted(pa.Table.from_batches([batch.rows for batch in trajectory_batches(log)]))


def _sorted(table: pa.Table) -> pa.Table:
    return table.sort_by([("partition", "ascending"), ("offset", "ascending"), ("row", "ascending")])


def _cached(done: Refreshed) -> pa.Table:
    return _sorted(pa.Table.from_batches(list(done.cache.batches())))


def _grow(run: TinyRun, number: int) -> None:
    run.append_group(run.rows(f"tiny/p{number:06d}/e0/a0", "g0", 3))


def test_a_cache_holds_what_the_log_holds(tmp_path: Path) -> None:
    log = TinyRun(tmp_path / "store").run_log()

    done = refresh(log, tmp_path / "cache")

    assert _cached(done).equals(_table(log))
    assert [r.code for r in done.cache.refused] == ["no_schema_header"]
    assert open_cache(tmp_path / "cache", log).manifest == done.cache.manifest
    assert done.cache.next_offsets == dict.fromkeys(range(4), 2)


def test_batches_outlive_the_reading_and_the_file(tmp_path: Path) -> None:
    log = TinyRun(tmp_path / "store").run_log()
    refresh(log, tmp_path / "cache")
    batches = list(open_cache(tmp_path / "cache", log).batches())

    for path in (tmp_path / "cache").glob("*.arrow"):
        path.unlink()

    assert _sorted(pa.Table.from_batches(batches)).equals(_table(log))


def test_what_the_log_grew_by_is_appended_and_small_files_are_taken_up(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store", end=False)
    refresh(run.run_log(), tmp_path / "cache")
    for number in range(4, 8):
        _grow(run, number)
        done = refresh(run.run_log(), tmp_path / "cache")
        assert done.rows_before == done.cache.manifest.rows - 2

    assert _cached(done).equals(_table(run.run_log()))
    assert [path.name for path in (tmp_path / "cache").glob("*.arrow")] == [done.cache.manifest.files[0].name]
    assert len(list(done.cache.batches())) == 2


def test_nothing_new_changes_no_file(tmp_path: Path) -> None:
    log = TinyRun(tmp_path / "store").run_log()
    refresh(log, tmp_path / "cache")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}

    done = refresh(log, tmp_path / "cache")

    assert done.rows_before == done.cache.manifest.rows == 14
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()} == before


def test_a_build_that_was_interrupted_goes_on_from_its_last_whole_file(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    record = run.records(TopicName.TRAJECTORIES)[-1]
    Forge(run).rewrite(record, headers=(("arrow-schema", b"trajectory/2.0"),))
    with pytest.raises(IllegalState, match="upgrade the reader"):
        refresh(run.run_log(), tmp_path / "cache", file_bytes=1, batch_rows=4)
    assert not (tmp_path / "cache" / ".writing.arrow").exists()
    Forge(run).rewrite(record, headers=record.headers)

    done = refresh(run.run_log(), tmp_path / "cache")

    assert done.rows_before == 12
    assert _cached(done).equals(_table(run.run_log()))


def test_a_crash_before_the_manifest_leaves_the_cache_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun(tmp_path / "store", end=False)
    before = run.run_log()
    refresh(before, tmp_path / "cache")
    _grow(run, 4)
    replace = os.replace

    def dies(source: Path, target: Path) -> None:
        if target.name == MANIFEST:
            raise OSError("the machine is gone")
        replace(source, target)

    monkeypatch.setattr(writer.os, "replace", dies)
    with pytest.raises(OSError, match="gone"):
        refresh(run.run_log(), tmp_path / "cache")
    monkeypatch.undo()

    assert _sorted(pa.Table.from_batches(list(open_cache(tmp_path / "cache", before).batches()))).equals(_table(before))
    done = refresh(run.run_log(), tmp_path / "cache")
    assert _cached(done).equals(_table(run.run_log()))
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1


def test_a_cache_behind_its_log_says_how_to_bring_it_up_to_date(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store", end=False)
    refresh(run.run_log(), tmp_path / "cache")
    _grow(run, 4)

    with pytest.raises(UsageError, match=r"ends at record 2 of tiny.trajectories\[\d\].*driftlog export --cache"):
        open_cache(tmp_path / "cache", run.run_log())


def test_without_a_cache_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no cache in .*driftlog export --cache"):
        open_cache(tmp_path / "cache", TinyRun(tmp_path / "store").run_log())


@pytest.mark.parametrize("at", [100, -100])
def test_a_flipped_byte_is_found_before_the_first_batch(tmp_path: Path, at: int) -> None:
    log = TinyRun(tmp_path / "store").run_log()
    cache = refresh(log, tmp_path / "cache").cache
    path = tmp_path / "cache" / cache.manifest.files[0].name
    value = bytearray(path.read_bytes())
    value[at] ^= 1
    path.write_bytes(bytes(value))

    with pytest.raises(IllegalState, match=r"000000.arrow: not the bytes that were written .* --cache --force"):
        next(cache.batches())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    cache = refresh(TinyRun(tmp_path / "store").run_log(), tmp_path / "cache").cache
    (tmp_path / "cache" / "000000.arrow").unlink()

    with pytest.raises(IllegalState, match=r"000000.arrow: cannot be read .*--force"):
        next(cache.batches())


def test_a_manifest_of_another_build_is_refused(tmp_path: Path) -> None:
    log = TinyRun(tmp_path / "store").run_log()
    refresh(log, tmp_path / "cache")
    path = tmp_path / "cache" / MANIFEST
    content = json.loads(path.read_text())

    path.write_text(json.dumps(content | {"more": 1}))
    with pytest.raises(IllegalState, match=r"not a manifest of this build .*--force"):
        open_cache(tmp_path / "cache", log)
    path.write_text(json.dumps(content | {"format": 0}))
    with pytest.raises(IllegalState, match="a cache with format 0, not 1"):
        open_cache(tmp_path / "cache", log)


def test_a_file_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    log = TinyRun(tmp_path / "store").run_log()
    refresh(log, tmp_path / "cache")
    path = tmp_path / "cache" / MANIFEST
    path.write_text(path.read_text().replace("000000.arrow", "../000000.arrow"))

    with pytest.raises(IllegalState, match="not a manifest of this build"):
        open_cache(tmp_path / "cache", log)


def test_rows_judged_by_other_limits_are_not_used(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    refresh(run.run_log(), tmp_path / "cache")
    strict = RunLog(RUN, run.open_reader, clock=run.clock, limits=TrajectoryLimits(vocabulary_size=50))

    with pytest.raises(IllegalState, match="a cache with vocabulary_size 2147483648, not 50"):
        refresh(strict, tmp_path / "cache")


@pytest.mark.parametrize("which", [0, -1])
def test_the_cache_of_another_log_is_never_used(tmp_path: Path, which: int) -> None:
    run = TinyRun(tmp_path / "store")
    refresh(run.run_log(), tmp_path / "cache")
    record = [r for r in run.records(TopicName.TRAJECTORIES) if r.partition == 0][which]
    Forge(run).flip_byte(record, -1)

    words = rf"tiny.trajectories\[0\]@{record.offset} is not the record that the cache .* made anew.*--cache --force"
    with pytest.raises(IllegalState, match=words):
        open_cache(tmp_path / "cache", run.run_log())
    with pytest.raises(IllegalState, match=words):
        refresh(run.run_log(), tmp_path / "cache")
    assert refresh(run.run_log(), tmp_path / "cache", rebuild=True).rows_before == 0


def test_a_truncated_topic_is_one_message(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    refresh(run.run_log(), tmp_path / "cache")
    del run.log.partition(NAME, 1).entries[1:]

    with pytest.raises(
        IllegalState, match=r"tiny.trajectories\[1\] ends at 1, the cache .* up to 1: records 1-1 were trunc"
    ):
        refresh(run.run_log(), tmp_path / "cache")


def test_a_cache_outlives_retention_while_its_last_records_are_there(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store", end=False)
    whole = _table(run.run_log())
    refresh(run.run_log(), tmp_path / "cache")
    run.log.drop_before(NAME, 0, 1)

    done = refresh(run.run_log(), tmp_path / "cache")

    assert _cached(done).equals(whole)


def test_a_cache_that_nothing_in_the_log_vouches_for_is_not_used(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    refresh(run.run_log(), tmp_path / "cache")
    run.log.drop_before(NAME, 2, 2)

    with pytest.raises(
        RangeMissing, match=r"tiny.trajectories\[2\]: records 0-1 are no longer in the log .*move it away"
    ):
        refresh(run.run_log(), tmp_path / "cache")


def test_records_lost_to_retention_are_named_before_a_cache_is_made_without_them(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store")
    run.log.drop_before(NAME, 2, 1)

    with pytest.raises(RangeMissing, match=r"tiny.trajectories\[2\]: records 0-0 are no longer .*--allow-missing"):
        refresh(run.run_log(), tmp_path / "cache")
    done = refresh(run.run_log(), tmp_path / "cache", allow_missing=True)
    assert done.cache.manifest.partitions[2].begin == 1
    assert done.cache.manifest.rows == 12


def test_a_gap_between_the_cache_and_the_log_is_named(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "store", end=False)
    refresh(run.run_log(), tmp_path / "cache")
    partition, offset = run.append_group(run.rows("tiny/p000004/e0/a0", "g0", 3))
    run.log.drop_before(NAME, partition, offset + 1)

    with pytest.raises(RangeMissing, match=rf"tiny.trajectories\[{partition}\]: records 0-{offset} are no longer"):
        refresh(run.run_log(), tmp_path / "cache")


def test_two_commands_do_not_write_one_cache(tmp_path: Path) -> None:
    log = TinyRun(tmp_path / "store").run_log()
    refresh(log, tmp_path / "cache")
    with (tmp_path / "cache" / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is being written by another command"):
            refresh(log, tmp_path / "cache")
