"""What a checkpoint directory may hold, and the proof that it holds it: names, sizes, hashes, addresses.

Addresses and manifests come from a topic and are untrusted: nothing is opened before its name was checked,
nothing is returned before its size and sha256 were. Knows files only; where they lie is in checkpoint_local
and checkpoint_store.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from schemas.checkpoint import MANIFEST_NAME, Manifest, ManifestFile, decode_manifest
from schemas.errors import (
    CheckpointError,
    CheckpointInvalid,
    CheckpointMissing,
    CheckpointRefused,
    StoreFull,
)
from schemas.ids import run_id

# Weights, numbers and text; nothing that a library would execute on loading (no .bin, .pt, .pkl, .py).
ALLOWED_SUFFIXES = (".safetensors", ".json", ".arrow", ".txt", ".jinja")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_ATTEMPT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Network file systems show a directory late, or hold a stale handle; both go away by trying again.
_COMES_LATE = (errno.ENOENT, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of one store."""

    max_bytes: int = 1 << 40
    """of one checkpoint, all files; 80 GB of optimizer state for a 7B model is normal"""
    max_files: int = 4_096
    max_manifest_bytes: int = 16 << 20
    reserve_bytes: int = 16 << 20
    """free space that a save must leave for everybody else on the disk"""
    cache_entries: int = 4
    """fetched checkpoints kept in the local cache of a remote store"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A manifest uri taken apart."""

    run: str
    attempt_id: str

    @property
    def directory(self) -> str:
        """`<run>/<attempt id>`, relative to the store root."""
        return f"{self.run}/{self.attempt_id}"

    @property
    def manifest_uri(self) -> str:
        """As it stands in VersionPublished."""
        return f"{self.directory}/{MANIFEST_NAME}"


def parse_manifest_uri(uri: str) -> Address:
    """Take `<run>/<attempt id>/manifest.json` apart; everything else is CheckpointRefused.

    This is the rule that keeps addresses from a topic inside the store root: a fixed shape with a narrow
    alphabet leaves no room for schemes, absolute paths, `..`, percent-encoding, NUL or back-slashes.

    >>> parse_manifest_uri("demo/a1/manifest.json").attempt_id
    'a1'
    """
    parts = uri.split("/")
    if len(parts) != 3 or parts[2] != MANIFEST_NAME:
        raise CheckpointRefused(
            f"checkpoint address {uri[:200]!r}: expected <run>/<attempt id>/{MANIFEST_NAME}, relative to the root"
        )
    try:
        run_id(parts[0])
        check_attempt_id(parts[1])
    except ValueError as error:
        raise CheckpointRefused(f"checkpoint address {uri[:200]!r}: {error}") from error
    return Address(run=parts[0], attempt_id=parts[1])


def check_attempt_id(attempt_id: str) -> str:
    """An attempt id is one plain path component; a leading dot is ours alone (temporary names)."""
    if not _ATTEMPT_ID.fullmatch(attempt_id):
        raise ValueError(
            f"attempt id {attempt_id[:200]!r}: use letters, digits, '.', '_', '-', at most 128, no dot in front"
        )
    return attempt_id


def is_plain_name(name: str) -> bool:
    """A name this store could have written as a directory or a file; everything else there is not ours to touch."""
    return _FILE_NAME.fullmatch(name) is not None


def check_file_name(name: str) -> str:
    """A file of a checkpoint: no folder, an allowed suffix; CheckpointRefused names it."""
    if not _FILE_NAME.fullmatch(name) or not name.endswith(ALLOWED_SUFFIXES):
        raise CheckpointRefused(
            f"checkpoint file {name[:200]!r}: only plain names that end in {', '.join(ALLOWED_SUFFIXES)}"
        )
    return name


def check_manifest(manifest: Manifest, address: Address, limits: StoreLimits) -> None:
    """The manifest belongs to this address and asks for nothing that may not be read."""
    if (manifest.run, manifest.attempt_id) != (address.run, address.attempt_id):
        found = f"{manifest.run}/{manifest.attempt_id}"
        raise CheckpointInvalid(f"{address.manifest_uri} is the manifest of {found}: directories were mixed up")
    names = [check_file_name(entry.name) for entry in manifest.files]
    if len(set(names)) != len(names) or MANIFEST_NAME in names:
        raise CheckpointInvalid(f"{address.manifest_uri} lists a file twice, or itself")
    _check_totals(address.directory, [entry.bytes for entry in manifest.files], limits)


@dataclass(slots=True)
class Stopwatch:
    """Seconds by phase, added up; phases may run beside one another on threads of their own."""

    now_s: Callable[[], float]
    phase_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts for this phase."""
        started_s = self.now_s()
        try:
            yield
        finally:
            self.phase_s[name] = self.phase_s.get(name, 0.0) + self.now_s() - started_s


def describe(
    directory: Path, limits: StoreLimits, watch: Stopwatch, *, fsync: bool, finish: Callable[[], None] | None = None
) -> tuple[ManifestFile, ...]:
    """Hash every file of a directory, sorted by name; with `fsync` each is on the disk afterwards.

    Hashing runs beside the fsync: both take as long as the disk, and neither needs the other. So does `finish`, which
    writes what is still missing; a file that is there already is finished, and CheckpointRefused when it changes.
    """
    paths = _checked_files(directory, limits)
    with ThreadPoolExecutor(max_workers=1) as pool:
        synced = [pool.submit(_synced, path, watch) for path in paths if fsync]
        if finish is not None:
            early = {path: _written_at(path) for path in paths}
            with watch.phase("write"):
                finish()
            changed = [path.name for path, at in early.items() if _written_at(path) != at]
            if changed:
                raise CheckpointRefused(f"checkpoint files {changed} were written again after they were finished")
            paths = _checked_files(directory, limits)
            synced += [pool.submit(_synced, path, watch) for path in paths if fsync and path not in early]
        with watch.phase("hash"):
            entries = tuple(_hashed(path) for path in paths)
        for future in synced:
            future.result()
    return entries


def _written_at(path: Path) -> tuple[int, int, int] | None:
    """What is another one after any writing; None for a file that is gone."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _checked_files(directory: Path, limits: StoreLimits) -> list[Path]:
    """Its files by name; CheckpointRefused for one that no reader would accept."""
    paths = sorted(directory.iterdir(), key=lambda path: path.name)
    for path in paths:
        check_file_name(path.name)
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointRefused(f"checkpoint file {path.name!r} is not a regular file")
        if path.name == MANIFEST_NAME:
            raise CheckpointRefused(f"{MANIFEST_NAME} is written by the store, not by its callers")
    _check_totals(directory.name, [path.stat().st_size for path in paths], limits)
    return paths


def verify(directory: Path, address: Address, manifest_sha256: str, limits: StoreLimits) -> Manifest:
    """Read the manifest and every file it lists; return it only when all of them match.

    CheckpointMissing when something is not there (yet), CheckpointInvalid naming the file that is wrong.
    """
    with reading(address.manifest_uri):
        manifest = decode_manifest(read_manifest(directory / MANIFEST_NAME, address, limits), manifest_sha256)
    check_manifest(manifest, address, limits)
    for entry in manifest.files:
        with reading(f"{address.directory}/{entry.name}"):
            _check_file(directory / entry.name, entry, address)
    with reading(address.directory):
        strangers = (
            {path.name for path in directory.iterdir()} - {entry.name for entry in manifest.files} - {MANIFEST_NAME}
        )
    # A deleted file that is still open on NFS shows up as .nfs*; anything else might be picked up by a loader.
    strangers = {name for name in strangers if not name.startswith(".nfs")}
    if strangers:
        raise CheckpointInvalid(
            f"{address.directory} holds files that its manifest does not list: {sorted(strangers)[:5]}"
        )
    return manifest


def read_manifest(path: Path, address: Address, limits: StoreLimits) -> bytes:
    """The bytes of a manifest file, never through a symbolic link, never more than the limit."""
    with _open_regular(path) as (file, size):
        if size > limits.max_manifest_bytes:
            raise CheckpointInvalid(f"{address.manifest_uri} has {size} bytes, at most {limits.max_manifest_bytes}")
        return _read_all(file, size)


def check_content(entry: ManifestFile, size: int, sha256: str, where: str) -> None:
    """Compare what was read with what the manifest says."""
    if size != entry.bytes:
        raise CheckpointInvalid(f"{where}/{entry.name} has {size} bytes, its manifest says {entry.bytes}")
    if sha256 != entry.sha256:
        raise CheckpointInvalid(
            f"{where}/{entry.name} has sha256 {sha256[:12]}..., its manifest says {entry.sha256[:12]}..."
        )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an OSError into the checkpoint error that says whether trying again can help."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointRefused(f"{what} is a symbolic link, which is not followed") from error
        if error.errno in _COMES_LATE or isinstance(error, FileNotFoundError):
            raise CheckpointMissing(f"{what} is not there (yet): {error.strerror or error}") from error
        raise CheckpointInvalid(f"{what} cannot be read: {error}") from error


def disk_full(error: BaseException) -> bool:
    """Whether this, or what caused it, is "no space left": some libraries wrap it in an error of their own."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _DISK_FULL:
            return True
        if not isinstance(seen, CheckpointError) and ("os error 28" in str(seen) or "No space left" in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def store_full(where: str, needed_bytes: int, free_bytes: int | None) -> StoreFull:
    """The message for no room: needed and free."""
    free = f"{free_bytes:,} bytes are free" if free_bytes is not None else "how much is free is not known"
    return StoreFull(
        f"no room for {where}: needs at least {needed_bytes:,} bytes, {free}; nothing was left behind. "
        "Free space, or keep fewer versions"
    )


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_totals(where: str, sizes: Sequence[int], limits: StoreLimits) -> None:
    if len(sizes) > limits.max_files:
        raise CheckpointInvalid(f"{where} has {len(sizes)} files, at most {limits.max_files}")
    if min(sizes, default=0) < 0 or sum(sizes) > limits.max_bytes:
        raise CheckpointInvalid(
            f"{where} has {sum(sizes):,} bytes, at most {limits.max_bytes:,}; raise the store's limit if that is meant"
        )


def _synced(path: Path, watch: Stopwatch) -> None:
    with watch.phase("fsync"):
        fsync_path(path)


def _hashed(path: Path) -> ManifestFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ManifestFile(name=path.name, bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def _check_file(path: Path, entry: ManifestFile, address: Address) -> None:
    with _open_regular(path) as (descriptor, size):
        check_content(entry, size, entry.sha256, address.directory)  # the size first: no hashing of what cannot match
        with os.fdopen(os.dup(descriptor), "rb") as file:
            check_content(entry, size, hashlib.file_digest(file, "sha256").hexdigest(), address.directory)


@contextmanager
def _open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a regular file; a link, a pipe or a device is refused before anything is read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointRefused(f"{path.name} is not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read(size + 1)
