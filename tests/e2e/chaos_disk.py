"""A checkpoint store with no room left: a small file system that is filled, or a limit on one process's files.

`small_disk` mounts a tmpfs where that is allowed (ENOSPC, as on a full disk). Elsewhere the trainer's RLIMIT_FSIZE is
lowered instead: its writes fail with EFBIG, a restarted trainer is free of it. `kind` says which one it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SIZE = "96m"
"""a store refuses to start a save that would leave less than 16 MiB to others"""
_CHUNK = b"\0" * (1 << 20)
_LIMIT_BYTES = 256 * 1024
"""above any log of the trainer, below the first file of a checkpoint"""


@dataclass(slots=True, kw_only=True)
class SmallDisk:
    """Where checkpoints lie in a run whose store gets full."""

    root: Path
    is_mounted: bool

    @property
    def kind(self) -> str:
        """In words."""
        return "full file system (tmpfs)" if self.is_mounted else "file size limit (RLIMIT_FSIZE)"

    @property
    def refusals(self) -> int:
        """Trainers that must end over it: a limit is gone with the process that had it."""
        return 2 if self.is_mounted else 1

    def refused(self, log_line: str) -> bool:
        """A trainer says that there was no room."""
        if self.is_mounted:
            return " service_failed " in log_line and "StoreFull" in log_line
        return "File too large" in log_line

    def fill(self, pid: int) -> None:
        """Leave no byte for the process."""
        if not self.is_mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LIMIT_BYTES, resource.RLIM_INFINITY))
            return
        descriptor = os.open(self._filler, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            for chunk in (_CHUNK, b"\0" * 4096, b"\0"):
                _write_until_full(descriptor, chunk)
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        """There is room again."""
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.root / ".filler"


@contextmanager
def small_disk(root: Path, *, mount: bool = True) -> Iterator[SmallDisk]:
    """A folder with a file system of its own where we may mount one."""
    root.mkdir(parents=True, exist_ok=True)
    is_mounted = mount and _run("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(root))
    try:
        yield SmallDisk(root=root, is_mounted=is_mounted)
    finally:
        if is_mounted:
            _run("umount", "--lazy", str(root))


def _write_until_full(descriptor: int, chunk: bytes) -> None:
    while True:
        try:
            os.write(descriptor, chunk)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return


def _run(*command: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, check=False, capture_output=True, timeout=20).returncode == 0
    return False
