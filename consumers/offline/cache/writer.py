"""Builds and extends the cache of trajectories beside a run.

Guarantees: files are written under a scratch name, synced and renamed once, the manifest after them, so a crash
leaves the cache as it was; a finished file never changes; one writer at a time. Memory is one batch. Growth costs
only what is new: the last file is taken up again when it is small, so that files do not multiply.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from consumers.offline.cache import (
    MANIFEST,
    CachedEdge,
    CachedFile,
    CachedPartition,
    CachedRefusal,
    CacheManifest,
    TrajectoryCache,
    checksum,
    file_batches,
    manifest_for,
    read_manifest,
    require_fit,
)
from consumers.offline.export.ranges import missing_ranges, require_whole
from consumers.offline.run_log import RecordKey, RunLog
from consumers.offline.trajectory_batches import ROWS, Edge, TrajectoryBatch, trajectory_batches
from schemas.errors import UsageError
from schemas.ledger import Position
from schemas.topics import TopicName, topic

FILE_BYTES = 256 * 1024 * 1024
"""A file is closed beyond this: what an interrupted build loses, and what one checksum covers."""
CACHED_ROWS = 2_048
"""Of a batch: below some 2,000 rows it costs more to open than to read."""
_SMALL_ROWS = 4 * CACHED_ROWS
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """A cache that holds the log up to its ends."""

    cache: TrajectoryCache
    rows_before: int
    """rows that were there already"""


def refresh(
    run_log: RunLog,
    directory: Path,
    *,
    position: Position | None = None,
    known_foreign: frozenset[RecordKey] = frozenset(),
    rebuild: bool = False,
    allow_missing: bool = False,
    file_bytes: int = FILE_BYTES,
    batch_rows: int = CACHED_ROWS,
) -> Refreshed:
    """Make the cache, or append what the log has beyond it. `rebuild` throws away what is there.

    `position`, `known_foreign`: of the ledger, see `missing_ranges` and `trajectory_batches`. RangeMissing when
    records are gone that the cache does not hold, unless `allow_missing`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _sole_writer(directory):
        manifest = None if rebuild else read_manifest(directory)
        if manifest is None:
            manifest = manifest_for(run_log)
        else:
            require_fit(directory, manifest, run_log)
        if not allow_missing:
            _require_connected(run_log, manifest, position)
        writer = _CacheWriter(directory, _with_begins(run_log, manifest), file_bytes)
        rows_before = manifest.rows
        try:
            start = writer.next_offsets()
            for batch in trajectory_batches(run_log, start=start, known_foreign=known_foreign, batch_rows=batch_rows):
                writer.add(batch)
            writer.finish(_ends(run_log))
        finally:
            writer.close()
        _remove_strangers(directory, writer.manifest)
        return Refreshed(cache=TrajectoryCache(directory, writer.manifest), rows_before=rows_before)


def _require_connected(run_log: RunLog, manifest: CacheManifest, position: Position | None) -> None:
    """Every record of the log so far is in the cache, or still in the log."""
    gaps = [
        gap
        for gap in missing_ranges(run_log, [TopicName.TRAJECTORIES], position)
        if gap.end > (manifest.partitions[gap.partition].next_offset if gap.partition in manifest.partitions else 0)
    ]
    require_whole(gaps, "A cache would be silent about them: accept that with --allow-missing")


def _with_begins(run_log: RunLog, manifest: CacheManifest) -> CacheManifest:
    """A partition is begun, or gone on with, at the first record that is there."""
    partitions = dict(manifest.partitions)
    for partition, first in run_log.beginnings(TopicName.TRAJECTORIES).items():
        held = partitions.get(partition)
        if held is None:
            partitions[partition] = CachedPartition(begin=first, next_offset=first)
        elif held.next_offset < first:
            partitions[partition] = held.model_copy(update={"next_offset": first})
    return manifest.model_copy(update={"partitions": partitions})


def _ends(run_log: RunLog) -> dict[int, int]:
    name = topic(run_log.run, TopicName.TRAJECTORIES)
    return {partition: end for (full, partition), end in run_log.ends.items() if full == name}


class _CacheWriter:
    """Appends batches; the manifest on disk moves on only with whole files."""

    def __init__(self, directory: Path, manifest: CacheManifest, file_bytes: int) -> None:
        self.manifest = manifest
        self._directory = directory
        self._file_bytes = file_bytes
        self._partitions = dict(manifest.partitions)
        self._refused = list(manifest.refused)
        self._files = list(manifest.files)
        self._sink: Any = None
        self._writer: Any = None
        self._rows = 0
        self._changed = False

    def next_offsets(self) -> dict[int, int]:
        """Where to read on."""
        return {partition: held.next_offset for partition, held in self._partitions.items()}

    def add(self, batch: TrajectoryBatch) -> None:
        """Append the rows of one batch."""
        self._changed = True
        if batch.rows.num_rows:
            self._open().write_batch(batch.rows)
            self._rows += batch.rows.num_rows
        for partition, (first, last) in batch.edges.items():
            self._partitions[partition] = _moved(self._partitions[partition], first, last)
        self._refused += [
            CachedRefusal(partition=r.partition, offset=r.offset, row=r.row, code=r.code, detail=r.detail)
            for r in batch.refused
        ]
        if self._sink is not None and self._sink.tell() >= self._file_bytes:
            self._end_file()

    def finish(self, ends: Mapping[int, int]) -> None:
        """Everything below these offsets was added."""
        for partition, end in ends.items():
            held = self._partitions[partition]
            if held.next_offset != end:
                self._partitions[partition] = held.model_copy(update={"next_offset": end})
                self._changed = True
        if self._changed or not (self._directory / MANIFEST).exists():
            self._end_file()

    def close(self) -> None:
        """Forget a file that was not ended."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._scratch().unlink(missing_ok=True)
            self._writer = self._sink = None

    def _open(self) -> Any:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._scratch()), "wb")
            self._writer = pa.ipc.new_file(self._sink, ROWS)
            if self._files and self._files[-1].rows < _SMALL_ROWS:
                # Taken up again whole: many small files would cost more to open than to read.
                small = self._files.pop()
                for batch in _merged(file_batches(self._directory, small)):
                    self._writer.write_batch(batch)
                self._rows = small.rows
        return self._writer

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._files.append(self._named())
            self._writer = self._sink = None
            self._rows = 0
        manifest = self.manifest.model_copy(
            update={
                "partitions": dict(sorted(self._partitions.items())),
                "files": tuple(self._files),
                "refused": tuple(self._refused),
            }
        )
        scratch = self._directory / f".{MANIFEST}"
        scratch.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, self._directory / MANIFEST)
        self.manifest = manifest

    def _named(self) -> CachedFile:
        scratch = self._scratch()
        with pa.memory_map(str(scratch), "r") as source:
            size, found = source.size(), checksum(source)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        # Never a name that a reader may hold mapped: a file that is taken up again comes back under the next number.
        taken = [int(path.stem) for path in self._directory.glob("[0-9]*.arrow")]
        name = f"{max(taken, default=-1) + 1:06d}.arrow"
        os.replace(scratch, self._directory / name)
        return CachedFile(name=name, rows=self._rows, bytes=size, crc32c=found)

    def _scratch(self) -> Path:
        return self._directory / ".writing.arrow"


def _moved(held: CachedPartition, first: Edge, last: Edge) -> CachedPartition:
    return CachedPartition(
        begin=held.begin,
        next_offset=last.offset + 1,
        first=held.first or CachedEdge(offset=first.offset, value_sha256=first.value_sha256),
        last=CachedEdge(offset=last.offset, value_sha256=last.value_sha256),
    )


def _merged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches as large ones."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= CACHED_ROWS:
            yield pa.concat_batches(held)
            held, rows = [], 0
    if held:
        yield pa.concat_batches(held)


def _remove_strangers(directory: Path, manifest: CacheManifest) -> None:
    """Files of an earlier state. A reader that has one mapped keeps its pages."""
    named = {file.name for file in manifest.files}
    for path in directory.glob("[0-9]*.arrow"):
        if path.name not in named:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _sole_writer(directory: Path) -> Iterator[None]:
    with (directory / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{directory} is being written by another command; try again when it is done") from None
        yield
