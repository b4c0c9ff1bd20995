"""Ranks over torch.distributed: gloo between CPUs, nccl between accelerators. Nothing is pickled.

Guarantees bounded waits: a collective ends within timeout_s, and a rank that waits for a command notices within
that time that the trainer is gone (it counts its beats), however long the trainer is idle.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from consumers.trainer.ranks import Placement
from schemas.errors import RankLost

BEAT_S = 1.0
"""between two signs of life of rank 0"""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02
"""between two looks for a command: bounds what an idle rank adds to a step"""


class TorchRanks:
    """One process of a group. Build it in every rank; building waits for all of them, at most timeout_s."""

    def __init__(
        self,
        *,
        store: Any,
        rank: int,
        count: int,
        device: str,
        timeout_s: float,
        beat_s: float = BEAT_S,
        attempt: str = "0",
    ) -> None:
        """`store`: a torch.distributed store that all ranks reach, as from `rendezvous`. `attempt`: a word of its own
        for each start of the ranks: torchrun's store outlives them, and old keys would be taken for new ones."""
        self.rank, self.count = rank, count
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._beat_s = beat_s
        self._control = PrefixStore(f"driftlog/{attempt}/command", store)
        self._number = 0
        self._stopped = threading.Event()
        self._beats: threading.Thread | None = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        backend = "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl"
        with _named("joining the other ranks"):
            dist.init_process_group(
                backend,
                store=PrefixStore(f"driftlog/{attempt}/group", store),
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=timeout_s),
            )
        if rank == 0:
            # A connection of its own: the thread must not wait for a call of the main thread.
            beats = PrefixStore(f"driftlog/{attempt}/command", store.clone())
            beats.set("beat", "0")
            self._beats = threading.Thread(target=self._beat, args=(beats,), name="rank-beats", daemon=True)
            self._beats.start()

    def send(self, command: bytes) -> None:
        """Announce the command, then broadcast it."""
        self._number += 1
        with _named("sending a command"):
            self._control.set(f"{self._number}", str(len(command)))
            if self._number > 2:
                self._control.delete_key(f"{self._number - 2}")  # all ranks took part in a later exchange
            if command:
                dist.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8), src=0)

    def receive(self) -> bytes:
        """Wait for the announcement, looking for a sign of life in between."""
        self._number += 1
        key = f"{self._number}"
        with _named("waiting for the trainer"):
            self._wait(key)
            size = int(self._control.get(key))
            payload = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.broadcast(payload, src=0)
        return payload.numpy().tobytes()

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce, sum."""
        with _named("adding up"):
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce, maximum."""
        with _named("taking the maximum"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather(self, value: bytes) -> list[bytes]:
        """All-gather of sizes, then of padded bytes."""
        with _named("gathering"):
            sizes = torch.zeros(self.count, dtype=torch.int64)
            sizes[self.rank] = len(value)
            dist.all_reduce(sizes)
            width = int(sizes.max())
            if width == 0:
                return [b""] * self.count
            own = torch.zeros(width, dtype=torch.uint8)
            own[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else own[:0]
            found = [torch.empty(width, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(found, own)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(found, sizes, strict=True)]

    def close(self) -> None:
        """Stop the beats and leave the group."""
        self._stopped.set()
        if self._beats is not None:
            self._beats.join(timeout=2 * self._beat_s)
            self._beats = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def _wait(self, key: str) -> None:
        """Look for the key, ever less often. Not the store's own wait: each of its time-outs is logged as a fault."""
        beat, quiet_s, pause_s = b"", 0.0, FIRST_PAUSE_S
        while not self._control.check([key]):
            seen = self._control.get("beat") if self._control.check(["beat"]) else b""
            quiet_s = quiet_s + pause_s if seen == beat else 0.0
            beat = seen
            if quiet_s >= self._timeout_s:
                raise RankLost(
                    f"rank {self.rank}: the trainer (rank 0) gave no sign of life for {quiet_s:g} s; the supervisor "
                    "starts all ranks again, and the run resumes from its last committed version"
                )
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _beat(self, store: Any) -> None:
        number = 0
        while not self._stopped.wait(self._beat_s):
            number += 1
            try:
                store.set("beat", str(number))
            except RuntimeError:
                return  # the store is gone, and with it everybody who would listen


def ranks_from_environment(
    here: Placement, *, device: str, timeout_s: float, rendezvous: Callable[..., Any] = torch_rendezvous
) -> TorchRanks:
    """Join the group that torchrun describes in MASTER_ADDR and MASTER_PORT."""
    with _named("meeting the other ranks"):
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    return TorchRanks(
        store=store, rank=here.rank, count=here.count, device=device, timeout_s=timeout_s, attempt=here.attempt
    )


@contextlib.contextmanager
def _named(doing: str) -> Iterator[None]:
    """torch.distributed says RuntimeError for everything: a peer that is gone, a time-out, a broken connection."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0][:300]
        raise RankLost(
            f"another rank is gone or does not answer ({doing}: {first}); every rank ends, the supervisor starts them "
            "again, and the run resumes from its last committed version"
        ) from error
