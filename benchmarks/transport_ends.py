"""What a way of carrying groups between two processes is, for bench_transport: a sender, a receiver, a name, a codec.

A message is eight bytes (when it was sent, nanoseconds of the machine's monotonic clock) and the encoded group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FLUSH_LIMIT_S = 60.0
WAIT_S = 0.5
"""how long a receiver waits for a message, where the client can be told so"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a peer may use in one round."""

    name: str
    """new in every round: a run, a stream, a file"""
    bootstrap: str
    redis_port: int
    free_port: int
    directory: Path
    queue: Any


class Sender(Protocol):
    """One end."""

    def send(self, message: bytes) -> None:
        """Hand a message over; may wait for room."""

    def close(self) -> None:
        """Wait until all are delivered."""


class Receiver(Protocol):
    """The other end."""

    def poll(self) -> Sequence[bytes]:
        """What has arrived, after a short wait at most."""

    def close(self) -> None:
        """Let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way."""

    name: str
    codec: str
    """name in bench_codec"""
    module: str
    """that must be installed; "" for none"""
    keeps: str
    """what is left when both processes have died, in words"""
    sender: Callable[[Where], Sender]
    receiver: Callable[[Where], Receiver]
