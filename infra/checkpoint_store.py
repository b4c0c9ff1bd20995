"""The CheckpointStore: immutable checkpoints on a local path or, through fsspec, an object store.

The only importer of fsspec. A save is seen whole or not at all (local: one rename; elsewhere: the manifest
is uploaded last); a fetch returns only what was verified file by file. Where objects cannot be created
exclusively, immutability rests on attempt ids being unique.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import fsspec

from infra import checkpoint_files as files
from infra.checkpoint_files import Address, StoreLimits
from infra.checkpoint_local import LocalTree
from infra.ports import SavedCheckpoint, Write
from schemas.checkpoint import MANIFEST_NAME, Manifest, ManifestFile, decode_manifest
from schemas.errors import (
    CheckpointError,
    CheckpointInvalid,
    CheckpointMissing,
    CheckpointRefused,
    ConfigError,
    IllegalState,
)
from schemas.ids import run_id

_CHUNK_BYTES = 8 << 20


class _Tree(Protocol):
    """What the store needs of the place where checkpoints lie; see LocalTree for the meaning of each."""

    def staging(self, address: Address) -> Path: ...
    def exists(self, address: Address) -> bool: ...
    def publish(self, staging: Path, address: Address) -> None: ...
    def discard(self, staging: Path, address: Address) -> None: ...
    def retrieve(self, address: Address, manifest_sha256: str) -> tuple[Path, Manifest]: ...
    def remove(self, address: Address) -> None: ...
    def attempts(self, run: str) -> Sequence[str]: ...
    def look_at(self, address: Address) -> tuple[str, bytes]: ...
    def free_bytes(self, address: Address) -> int | None: ...
    def size_hint(self, run: str) -> int: ...
    def collect(self, run: str, keep: Collection[str], *, older_than_s: float, at_most: int) -> Sequence[str]: ...


class FsspecCheckpointStore:
    """The CheckpointStore port. `root` is a path or an fsspec url; a remote one needs a `cache_dir` of its own."""

    def __init__(
        self,
        root: str,
        run: str,
        *,
        cache_dir: Path | None = None,
        limits: StoreLimits | None = None,
        fsync: bool = True,
        monotonic_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run = run_id(run)
        self._limits = limits or StoreLimits()
        self._fsync = fsync
        self._monotonic_s = monotonic_s
        self._tree: _Tree = _open_tree(root, cache_dir, self._limits, fsync=fsync)
        self._expected_bytes = 0

    def save(self, attempt_id: str, write: Write, manifest: Manifest) -> SavedCheckpoint:
        """Write one checkpoint; what `write` puts into the directory becomes visible whole, or never.

        StoreFull (nothing left behind); IllegalState when the attempt id was used before; CheckpointRefused
        for a file that no reader would accept.
        """
        address = Address(run=self._run, attempt_id=files.check_attempt_id(attempt_id))
        if (manifest.run, manifest.attempt_id) != (address.run, address.attempt_id):
            raise ValueError(f"manifest of {manifest.run}/{manifest.attempt_id} given for {address.directory}")
        if self._tree.exists(address):
            raise IllegalState(f"checkpoint attempt {address.directory} exists already: attempt ids are used once")
        staging: Path | None = None
        written_bytes, watch = 0, files.Stopwatch(self._monotonic_s)
        try:
            self._preflight(address)
            staging = self._tree.staging(address)
            with watch.phase("write"):
                finish = write(staging)
            entries = files.describe(staging, self._limits, watch, fsync=self._fsync, finish=finish)
            data = manifest.describing(entries).encode()
            with watch.phase("publish"):
                self._write_manifest(staging, data)
                self._tree.publish(staging, address)
        except BaseException as error:
            if staging is not None:
                written_bytes = _bytes_in(staging)
                self._tree.discard(staging, address)
            if files.disk_full(error):
                needed = max(written_bytes, self._expected_bytes)
                raise files.store_full(address.directory, needed, self._tree.free_bytes(address)) from error
            raise
        self._expected_bytes = sum(entry.bytes for entry in entries) + len(data)
        return SavedCheckpoint(
            manifest_uri=address.manifest_uri,
            manifest_sha256=hashlib.sha256(data).hexdigest(),
            bytes=self._expected_bytes,
            phase_s=watch.phase_s,
        )

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Manifest]:
        """A local directory that was verified just now. CheckpointMissing is worth another try, the others are not."""
        return self._tree.retrieve(files.parse_manifest_uri(manifest_uri), manifest_sha256)

    def delete(self, manifest_uri: str) -> None:
        """Remove a retired version of this run. Idempotent."""
        address = files.parse_manifest_uri(manifest_uri)
        if address.run != self._run:
            raise CheckpointRefused(
                f"{manifest_uri} belongs to run {address.run!r}; run {self._run!r} deletes only its own"
            )
        self._tree.remove(address)

    def attempts(self) -> Sequence[str]:
        """Attempt ids of complete directories of this run, sorted."""
        return self._tree.attempts(self._run)

    def look_at(self, attempt_id: str) -> tuple[str, Manifest]:
        """Where one of them lies, and its manifest as it lies there."""
        address = Address(run=self._run, attempt_id=files.check_attempt_id(attempt_id))
        place, data = self._tree.look_at(address)
        try:
            return place, decode_manifest(data)
        except CheckpointInvalid as error:
            raise CheckpointInvalid(f"{place}: {error}") from error

    def collect_garbage(
        self, keep_uris: Collection[str], *, grace_s: float, now_us: int, at_most: int
    ) -> Sequence[str]:
        """Remove what no event names; see the port for what stays."""
        keep = {files.parse_manifest_uri(uri).attempt_id for uri in keep_uris}
        return self._tree.collect(self._run, keep, older_than_s=now_us / 1e6 - grace_s, at_most=at_most)

    def _preflight(self, address: Address) -> None:
        """Refuse a save that cannot fit, before anything is written."""
        expected = self._expected_bytes or self._tree.size_hint(self._run)
        free = self._tree.free_bytes(address)
        if free is not None and expected and free < expected + self._limits.reserve_bytes:
            raise files.store_full(address.directory, expected + self._limits.reserve_bytes, free)
        self._expected_bytes = expected

    def _write_manifest(self, staging: Path, data: bytes) -> None:
        if len(data) > self._limits.max_manifest_bytes:
            raise CheckpointInvalid(
                f"{MANIFEST_NAME} would have {len(data)} bytes, at most {self._limits.max_manifest_bytes}"
            )
        path = staging / MANIFEST_NAME
        path.write_bytes(data)
        if self._fsync:
            files.fsync_path(path)


def _open_tree(root: str, cache_dir: Path | None, limits: StoreLimits, *, fsync: bool) -> _Tree:
    protocol = root.split("://", 1)[0] if "://" in root else "file"
    if protocol in ("file", "local"):
        return LocalTree(Path(root.split("://", 1)[-1]), limits, fsync=fsync)
    if protocol in ("http", "https", "ftp", "github", "hf") or "::" in root:
        raise ConfigError(
            f"checkpoint.root {root!r}: {protocol!r} is not a place for checkpoints; use a path, s3, gcs, abfs ..."
        )
    if cache_dir is None:
        raise ConfigError(f"checkpoint.root {root!r} is remote: checkpoint.cache_dir must be set")
    return _RemoteTree(root, cache_dir, limits)


class _RemoteTree:
    """Objects below a url. Visible means: manifest.json is there, and it was uploaded last."""

    def __init__(self, root: str, cache_dir: Path, limits: StoreLimits) -> None:
        try:
            self._fs: Any
            self._fs, self._base = fsspec.core.url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"checkpoint.root {root!r}: {error}") from error
        self._base = self._base.rstrip("/")
        self._cache = Path(os.path.realpath(cache_dir))
        self._limits = limits

    def staging(self, address: Address) -> Path:
        self._cache.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".upload-{address.attempt_id}-", dir=self._cache))

    def exists(self, address: Address) -> bool:
        return bool(self._names(self._url(address)))

    def publish(self, staging: Path, address: Address) -> None:
        names = sorted(path.name for path in staging.iterdir() if path.name != MANIFEST_NAME)
        with _remote(address.directory):
            self._fs.makedirs(self._url(address), exist_ok=True)
            for name in (*names, MANIFEST_NAME):
                self._fs.put_file(str(staging / name), self._url(address, name))
            self._fs.invalidate_cache()
        shutil.rmtree(staging, ignore_errors=True)

    def discard(self, staging: Path, address: Address) -> None:
        # The error that led here is what the caller must see; what this leaves is swept as garbage later.
        shutil.rmtree(staging, ignore_errors=True)
        try:
            self.remove(address)
        except CheckpointError:
            return

    def retrieve(self, address: Address, manifest_sha256: str) -> tuple[Path, Manifest]:
        target = self._cache / address.run / address.attempt_id
        if target.is_dir():
            try:
                manifest = files.verify(target, address, manifest_sha256, self._limits)
            except CheckpointError:
                shutil.rmtree(target, ignore_errors=True)  # a cache proves nothing: fetch it again
            else:
                os.utime(target)
                return target, manifest
        manifest = self._download(address, manifest_sha256, target)
        self._prune(target)
        return target, manifest

    def remove(self, address: Address) -> None:
        names = self._names(self._url(address))
        with _remote(address.directory):
            # The manifest first: without it the rest is invisible.
            for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
                self._fs.rm_file(self._url(address, name))
            self._fs.invalidate_cache()

    def attempts(self, run: str) -> Sequence[str]:
        found = []
        for name in self._names(f"{self._base}/{run}"):
            if MANIFEST_NAME in self._names(f"{self._base}/{run}/{name}"):
                found.append(name)
        return sorted(found)

    def look_at(self, address: Address) -> tuple[str, bytes]:
        return str(self._fs.unstrip_protocol(self._url(address))), self._manifest(address)

    def free_bytes(self, address: Address) -> int | None:
        """Of the staging disk: the store's own room is its owner's business."""
        return shutil.disk_usage(self._cache).free if self._cache.is_dir() else None

    def size_hint(self, run: str) -> int:
        return 0

    def collect(self, run: str, keep: Collection[str], *, older_than_s: float, at_most: int) -> Sequence[str]:
        removed: list[str] = []
        for leftover in sorted(self._cache.glob(".upload-*")):
            if len(removed) < at_most and leftover.stat().st_mtime < older_than_s:
                shutil.rmtree(leftover, ignore_errors=True)
                removed.append(leftover.name)
        for name in sorted(self._names(f"{self._base}/{run}")) if keep else []:
            address = Address(run=run, attempt_id=name)
            if len(removed) < at_most and name not in keep and self._last_written_s(address) < older_than_s:
                self.remove(address)
                removed.append(name)
        return removed

    def _download(self, address: Address, manifest_sha256: str, target: Path) -> Manifest:
        data = self._manifest(address)
        manifest = decode_manifest(data, manifest_sha256)
        files.check_manifest(manifest, address, self._limits)
        target.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(entry.bytes for entry in manifest.files) + self._limits.reserve_bytes
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise files.store_full(f"a local copy of {address.directory}", needed, free)
        staging = target.parent / f".tmp-{address.attempt_id}-{uuid.uuid4().hex[:12]}"
        staging.mkdir()
        try:
            for entry in manifest.files:
                with _remote(f"{address.directory}/{entry.name}"):
                    self._copy(self._url(address, entry.name), staging / entry.name, entry, address)
            (staging / MANIFEST_NAME).write_bytes(data)
            os.rename(staging, target)
        except BaseException as error:
            shutil.rmtree(staging, ignore_errors=True)
            if files.disk_full(error):
                raise files.store_full(
                    f"a local copy of {address.directory}", needed, shutil.disk_usage(target.parent).free
                ) from error
            raise
        return manifest

    def _manifest(self, address: Address) -> bytes:
        """One byte more than the limit at most: that much is never a manifest of ours."""
        with _remote(address.manifest_uri):
            self._fs.invalidate_cache()
            with self._fs.open(self._url(address, MANIFEST_NAME), "rb") as source:
                data: bytes = source.read(self._limits.max_manifest_bytes + 1)
        return data

    def _copy(self, url: str, path: Path, entry: ManifestFile, address: Address) -> None:
        """Download one file, hashing on the way, never more than the manifest says plus one byte."""
        digest, size = hashlib.sha256(), 0
        with self._fs.open(url, "rb") as source, path.open("xb") as sink:
            while size <= entry.bytes and (chunk := source.read(min(_CHUNK_BYTES, entry.bytes + 1 - size))):
                digest.update(chunk)
                sink.write(chunk)
                size += len(chunk)
        files.check_content(entry, size, digest.hexdigest(), address.directory)

    def _prune(self, newest: Path) -> None:
        """Keep the cache bounded: the most recently fetched entries of this run."""
        entries = [path for path in newest.parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
        entries.sort(key=lambda path: (path == newest, path.stat().st_mtime), reverse=True)
        for path in entries[max(1, self._limits.cache_entries) :]:
            shutil.rmtree(path, ignore_errors=True)

    def _names(self, url: str) -> Sequence[str]:
        """Names directly below a url; none when there is nothing. Names we would not have written are left out."""
        try:
            with _remote(url):
                self._fs.invalidate_cache()
                listed = [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in self._fs.ls(url, detail=False)]
        except CheckpointMissing:
            return []
        return [name for name in listed if files.is_plain_name(name)]

    def _last_written_s(self, address: Address) -> float:
        """Epoch seconds; infinity where the backend cannot tell: what cannot be dated is never swept."""
        newest = float("-inf")
        for name in self._names(self._url(address)):
            with _remote(address.directory):
                try:
                    stamp = self._fs.modified(self._url(address, name))
                except NotImplementedError:
                    return float("inf")
            newest = max(newest, stamp.timestamp() if isinstance(stamp, datetime) else float("inf"))
        return newest if newest != float("-inf") else float("inf")

    def _url(self, address: Address, name: str = "") -> str:
        return f"{self._base}/{address.directory}" + (f"/{name}" if name else "")


@contextmanager
def _remote(what: str) -> Iterator[None]:
    """The boundary to fsspec: each backend raises errors of its own library; they leave as checkpoint errors."""
    try:
        with files.reading(what):
            yield
    except (CheckpointError, NotImplementedError):
        raise
    except Exception as error:
        if files.disk_full(error):
            raise
        raise CheckpointMissing(f"{what}: the store does not answer: {type(error).__name__}: {error}") from error


def _bytes_in(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*")) if directory.is_dir() else 0
