"""Checkpoints on a file system: a temporary directory beside the target, one rename, read-only ever after.

Guarantees: a directory under its final name is complete and on the disk; nothing under a final name is ever
written again; names that start with '.' are ours, invisible to readers, and swept after a grace time.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from infra.checkpoint_files import (
    Address,
    StoreLimits,
    fsync_path,
    is_plain_name,
    read_manifest,
    reading,
    verify,
)
from schemas.checkpoint import MANIFEST_NAME, Manifest
from schemas.errors import CheckpointRefused, IllegalState

_STAGING = ".tmp-"
_TRASH = ".trash-"


class LocalTree:
    """`<root>/<run>/<attempt id>/` on a local or network file system."""

    def __init__(self, root: Path, limits: StoreLimits, *, fsync: bool) -> None:
        # The root is the user's word and may be a link; below it no link is followed.
        self._root = Path(os.path.realpath(root))
        self._limits = limits
        self._fsync = fsync

    def staging(self, address: Address) -> Path:
        """A fresh, empty directory on the target's own file system, so that the rename is one step."""
        path = self._root / address.run / f"{_STAGING}{address.attempt_id}-{uuid.uuid4().hex[:12]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        return path

    def exists(self, address: Address) -> bool:
        """Something has that name, complete or not."""
        return os.path.lexists(self._directory(address))

    def publish(self, staging: Path, address: Address) -> None:
        """Make the finished staging directory visible under its final name, in one step."""
        for path in staging.iterdir():
            # Immutable from here on: an editor or a second trainer gets an error instead of our readers.
            path.chmod(path.stat().st_mode & ~0o222)
        if self._fsync:
            fsync_path(staging)
        target = self._directory(address)
        try:
            os.rename(staging, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise IllegalState(
                    f"checkpoint attempt {address.directory} exists already: attempt ids are used once"
                ) from error
            raise
        if self._fsync:
            fsync_path(target.parent)
            fsync_path(self._root)

    def discard(self, staging: Path, address: Address) -> None:
        """Forget an attempt that did not become a checkpoint."""
        shutil.rmtree(staging, ignore_errors=True)

    def retrieve(self, address: Address, manifest_sha256: str) -> tuple[Path, Manifest]:
        """The directory itself, verified."""
        directory = self._directory(address)
        with reading(address.directory):
            # Network clients cache directory contents; listing the parents makes them look again.
            os.listdir(self._root)
            os.listdir(directory.parent)
        if os.path.realpath(directory) != str(directory):
            raise CheckpointRefused(f"{address.directory} is reached through a symbolic link, which is not followed")
        return directory, verify(directory, address, manifest_sha256, self._limits)

    def remove(self, address: Address) -> None:
        """Remove a directory; a reader never sees half of it under its name. Idempotent."""
        directory = self._directory(address)
        if directory.is_symlink():
            raise CheckpointRefused(f"{address.directory} is a symbolic link; remove it by hand")
        trash = directory.parent / f"{_TRASH}{address.attempt_id}-{uuid.uuid4().hex[:12]}"
        try:
            os.rename(directory, trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def attempts(self, run: str) -> Sequence[str]:
        """Attempt ids of complete directories."""
        return sorted(path.name for path in self._directories(run) if (path / MANIFEST_NAME).is_file())

    def look_at(self, address: Address) -> tuple[str, bytes]:
        """Path of the directory, bytes of its manifest."""
        directory = self._directory(address)
        with reading(address.manifest_uri):
            return str(directory), read_manifest(directory / MANIFEST_NAME, address, self._limits)

    def free_bytes(self, address: Address) -> int | None:
        """Free for us on the target's file system."""
        probe = self._root / address.run
        return shutil.disk_usage(probe if probe.is_dir() else self._root).free if self._root.is_dir() else None

    def size_hint(self, run: str) -> int:
        """Bytes of the newest complete checkpoint: the best guess for the next one's size; 0 when there is none."""
        complete = [path for path in self._directories(run) if (path / MANIFEST_NAME).is_file()]
        newest = max(complete, key=lambda path: path.stat().st_mtime, default=None)
        return sum(path.stat().st_size for path in newest.iterdir()) if newest is not None else 0

    def collect(self, run: str, keep: Collection[str], *, older_than_s: float, at_most: int) -> Sequence[str]:
        """Remove up to `at_most` leftovers, and directories not in `keep`, last written before that (epoch seconds).

        One that cannot be removed does not keep the others; its OSError is raised in the end."""
        removed: list[str] = []
        failure: OSError | None = None
        for path in sorted((self._root / run).iterdir()) if (self._root / run).is_dir() else []:
            leftover = path.name.startswith((_STAGING, _TRASH))
            unnamed = bool(keep) and is_plain_name(path.name) and path.name not in keep
            if len(removed) >= at_most or not (leftover or unnamed) or path.is_symlink() or not path.is_dir():
                continue
            if _last_written_s(path) >= older_than_s:
                continue
            try:
                shutil.rmtree(path) if leftover else self.remove(Address(run=run, attempt_id=path.name))
            except OSError as error:
                failure = failure or error
            else:
                removed.append(path.name)
        if failure is not None:
            raise failure
        return removed

    def _directory(self, address: Address) -> Path:
        return self._root / address.run / address.attempt_id

    def _directories(self, run: str) -> Iterator[Path]:
        if not (self._root / run).is_dir():
            return
        for path in (self._root / run).iterdir():
            if is_plain_name(path.name) and path.is_dir() and not path.is_symlink():
                yield path


def _last_written_s(directory: Path) -> float:
    """The newest change below: a save that is still running must look young."""
    try:
        return max(path.lstat().st_mtime for path in (directory, *directory.rglob("*")))
    except FileNotFoundError:  # somebody else sweeps at the same time: not ours to judge
        return float("inf")
