"""The local cache of a run's trajectories: uncompressed Arrow files that are mapped, not read.

A cache is used only for the log it was made from (first and last cached record of each partition are compared) and
only as the bytes that were written (a checksum per file, tested before its first batch is handed out). Reading
copies nothing: batches lie in the page cache. What the log has beyond the cache is appended by `cache_writer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import crc32c
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from consumers.offline.run_log import RunLog
from consumers.offline.trajectory_batches import ROWS, RefusedRow, edge_of
from schemas.errors import IllegalState, RangeMissing, UsageError
from schemas.topics import TopicName, topic
from schemas.trajectory_schema import TRAJECTORY

MANIFEST = "manifest.json"
FORMAT = 1
"""of the cache; another number is another layout: it is made anew"""
_CRC_PIECE = 8 * 1024 * 1024
REBUILD = "rebuild it with `driftlog export --cache --force`"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CachedEdge(_Part):
    """One record, to be known again by."""

    offset: int
    value_sha256: str


class CachedPartition(_Part):
    """What the cache holds of one partition: records `begin` ... `next_offset` - 1."""

    begin: int = 0
    next_offset: int
    first: CachedEdge | None = None
    """None: no record was there"""
    last: CachedEdge | None = None


class CachedRefusal(_Part):
    """A row or record that failed validation."""

    partition: int
    offset: int
    row: int | None
    code: str
    detail: str


class CachedFile(_Part):
    """One Arrow file."""

    name: Annotated[str, Field(pattern=r"^[0-9]{6}\.arrow$")]
    rows: int
    bytes: int
    crc32c: int
    """of the whole file: tells damage, not a forger"""


class CacheManifest(_Part):
    """What lies in a cache, and of which log."""

    format: int = FORMAT
    run: str
    rows_format: str
    """name/version of the trajectory columns"""
    vocabulary_size: int
    """limits that rows were judged by"""
    max_tokens: int
    partitions: dict[int, CachedPartition]
    files: tuple[CachedFile, ...]
    refused: tuple[CachedRefusal, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(file.rows for file in self.files)


def manifest_for(run_log: RunLog) -> CacheManifest:
    """Of an empty cache of this log."""
    return CacheManifest(
        run=run_log.run,
        rows_format=f"{TRAJECTORY.name}/{TRAJECTORY.version}",
        vocabulary_size=run_log.limits.vocabulary_size,
        max_tokens=run_log.limits.max_tokens,
        partitions={},
        files=(),
    )


class TrajectoryCache:
    """A cache that fits its log. Made by `open_cache` (or `cache_writer.refresh`)."""

    def __init__(self, directory: Path, manifest: CacheManifest) -> None:
        self.directory = directory
        self.manifest = manifest

    @property
    def next_offsets(self) -> Mapping[int, int]:
        """Partition -> every record below is in here."""
        return {partition: held.next_offset for partition, held in self.manifest.partitions.items()}

    @property
    def refused(self) -> Iterator[RefusedRow]:
        """Rows and records that failed validation."""
        return (RefusedRow(**entry.model_dump()) for entry in self.manifest.refused)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every row, columns of ROWS, as mapped record batches. IllegalState names a file that is damaged."""
        for file in self.manifest.files:
            yield from file_batches(self.directory, file)


def file_batches(directory: Path, file: CachedFile) -> Iterator[pa.RecordBatch]:
    """The batches of one file, after its size, checksum and schema were compared."""
    path = directory / file.name
    try:
        source = pa.memory_map(str(path), "r")
    except OSError as error:
        raise IllegalState(f"{path}: cannot be read ({error}); {REBUILD}") from error
    with source:
        if source.size() != file.bytes or checksum(source) != file.crc32c:
            raise IllegalState(f"{path}: not the bytes that were written ({file.bytes} with their checksum); {REBUILD}")
        reader = pa.ipc.open_file(source)
        if not reader.schema.equals(ROWS):
            raise IllegalState(f"{path}: other columns than its manifest says; {REBUILD}")
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def checksum(source: pa.NativeFile) -> int:
    """crc32c of a mapped file."""
    source.seek(0)
    found = 0
    while piece := source.read_buffer(_CRC_PIECE):
        found = crc32c.crc32c(piece, found)
    source.seek(0)
    return found


def read_manifest(directory: Path) -> CacheManifest | None:
    """None: there is no cache. IllegalState: there is one that this build cannot use."""
    path = directory / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return CacheManifest.model_validate_json(text)
    except ValidationError as error:
        raise IllegalState(
            f"{path}: not a manifest of this build ({error.error_count()} errors, first: {error.errors()[0]['msg']}); "
            f"{REBUILD}"
        ) from error


def open_cache(directory: Path, run_log: RunLog) -> TrajectoryCache:
    """The cache, when it fits the log and holds all of it. UsageError: it lacks records, or there is none."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise UsageError(f"no cache in {directory}: make one with `driftlog export --cache`")
    require_fit(directory, manifest, run_log)
    name = topic(run_log.run, TopicName.TRAJECTORIES)
    for (full, partition), end in sorted(run_log.ends.items()):
        held = manifest.partitions.get(partition)
        if full == name and end > (0 if held is None else held.next_offset):
            raise UsageError(
                f"{directory} ends at record {0 if held is None else held.next_offset} of {name}[{partition}], the log "
                f"at {end}: bring it up to date with `driftlog export --cache`"
            )
    return TrajectoryCache(directory, manifest)


def require_fit(directory: Path, manifest: CacheManifest, run_log: RunLog) -> None:
    """IllegalState unless the cache was made from this very log, by these rules."""
    blank = manifest_for(run_log)
    for field in ("format", "run", "rows_format", "vocabulary_size", "max_tokens"):
        if getattr(manifest, field) != getattr(blank, field):
            raise IllegalState(
                f"{directory} is a cache with {field} {getattr(manifest, field)}, not {getattr(blank, field)}: not of "
                f"this log; {REBUILD}"
            )
    name = topic(run_log.run, TopicName.TRAJECTORIES)
    beginnings = run_log.beginnings(TopicName.TRAJECTORIES)
    wanted: dict[int, list[CachedEdge]] = {}
    for partition, held in sorted(manifest.partitions.items()):
        end = run_log.ends.get((name, partition), 0)
        if held.next_offset > end:
            raise IllegalState(
                f"{name}[{partition}] ends at {end}, the cache {directory} holds records up to {held.next_offset - 1}: "
                f"records {end}-{held.next_offset - 1} were truncated, or the topic was made anew (or another "
                f"command has just extended the cache: try again); {REBUILD}"
            )
        edges = [edge for edge in (held.first, held.last) if edge is not None]
        retained = [edge for edge in edges if edge.offset >= beginnings[partition]]
        if edges and not retained:
            raise RangeMissing(
                f"{name}[{partition}]: records {held.begin}-{beginnings[partition] - 1} are no longer in the log "
                f"(retention), so nothing shows that the cache {directory} was made from it: move it away to keep it, "
                f"or {REBUILD} --allow-missing",
                {(name, partition): beginnings[partition]},
            )
        wanted[partition] = retained
    _require_edges(directory, run_log, wanted)


def _require_edges(directory: Path, run_log: RunLog, wanted: Mapping[int, list[CachedEdge]]) -> None:
    """Two short looks at the log: at the first retained edge of every partition, then at the last."""
    name = topic(run_log.run, TopicName.TRAJECTORIES)
    for which in (0, -1):
        edges = {partition: held[which] for partition, held in wanted.items() if held}
        found = _records_at(run_log, {partition: edge.offset for partition, edge in edges.items()})
        for partition, edge in edges.items():
            record = found.get(partition)
            if record != CachedEdge(offset=edge.offset, value_sha256=edge.value_sha256):
                raise IllegalState(
                    f"{name}[{partition}]@{edge.offset} is not the record that the cache {directory} was made from: "
                    f"the topic was made anew, or the cache is another run's; {REBUILD}"
                )


def _records_at(run_log: RunLog, offsets: Mapping[int, int]) -> dict[int, CachedEdge]:
    """The first record at or behind an offset, of each of these partitions that has one."""
    name = topic(run_log.run, TopicName.TRAJECTORIES)
    idle = {partition: end for (full, partition), end in run_log.ends.items() if full == name}
    found: dict[int, CachedEdge] = {}
    records = run_log.records(TopicName.TRAJECTORIES, {**idle, **offsets})
    try:
        while len(found) < len(offsets) and (record := next(records, None)) is not None:
            if record.partition not in found:
                edge = edge_of(record)
                found[record.partition] = CachedEdge(offset=edge.offset, value_sha256=edge.value_sha256)
    finally:
        records.close()
    return found
