"""The processes of one trainer under torchrun, as the learner sees them: who am I, how many, what is exchanged.

Rank 0 is the trainer: Kafka, the store and the transaction are its alone. The others wait for its commands and
compute their share. This module holds the port and the single process; torch.distributed is in ranks_torch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from schemas.errors import ConfigError

Parallel = Literal["ddp", "fsdp"]


class Ranks(Protocol):
    """Exchange between the ranks. Every method but `send` and `receive` is called by all of them, in one order.

    RankLost when a rank is gone or does not answer within the stated limit; nothing waits longer.
    """

    @property
    def rank(self) -> int:
        """0 is the trainer."""
        ...

    @property
    def count(self) -> int:
        """Ranks in all."""
        ...

    def send(self, command: bytes) -> None:
        """Rank 0: give the others their next command."""
        ...

    def receive(self) -> bytes:
        """Other ranks: the next command, however long the trainer has nothing to do; RankLost when it is gone."""
        ...

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        ...

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place."""
        ...

    def gather(self, value: bytes) -> list[bytes]:
        """The bytes of every rank, in order of rank."""
        ...

    def close(self) -> None:
        """Leave. Safe to call twice."""
        ...


class OneRank:
    """No torchrun: nothing to exchange."""

    rank = 0
    count = 1

    def send(self, command: bytes) -> None:
        """Nobody listens."""

    def receive(self) -> bytes:
        """Only other ranks receive."""
        raise AssertionError("a single rank waits for nobody")

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of one."""
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The maximum of one."""
        return tensor

    def gather(self, value: bytes) -> list[bytes]:
        """The bytes of one."""
        return [value]

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where torchrun put this process; the defaults are a process of its own."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """on this machine; chooses the accelerator"""
    attempt: str = "0"
    """how often torchrun has started the ranks before; its store keeps what earlier ones wrote"""


def placement(environment: Mapping[str, str]) -> Placement:
    """What torchrun says in RANK, WORLD_SIZE and LOCAL_RANK. ConfigError when they contradict each other.

    >>> placement({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}).rank
    1
    >>> placement({})
    Placement(rank=0, count=1, local_rank=0, attempt='0')
    """
    if "WORLD_SIZE" not in environment:
        return Placement()
    try:
        found = Placement(
            rank=int(environment["RANK"]),
            count=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {error}; start with torchrun"
        ) from error
    if not 0 <= found.rank < found.count:
        raise ConfigError(f"RANK={found.rank} is not below WORLD_SIZE={found.count}; start with torchrun")
    return found


def deal(lengths: list[int], count: int) -> list[list[int]]:
    """Row indices of each rank: dealt by length, so that ranks have nearly equal work. Every row exactly once.

    >>> deal([5, 9, 1, 7], 2)
    [[2, 3], [0, 1]]
    """
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    return [order[rank::count] for rank in range(count)]
