"""Errors of the maths, of torch and of other ranks as errors of this project; and what all ranks must agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from consumers.objective.shapes import ObjectiveError
from consumers.trainer.ranks import Ranks
from schemas.errors import CheckpointInvalid, DriftlogError, RankLost, StepFailed, StepRefused

T = TypeVar("T")


@contextlib.contextmanager
def named_errors(ranks: Ranks, doing: str) -> Iterator[None]:
    """StepRefused for the maths, StepFailed for memory, RankLost for anything torch says among several ranks."""
    try:
        yield
    except ObjectiveError as error:
        raise StepRefused(f"{doing}: {error}") from error
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0][:300]
        if ranks.count > 1:
            # The others are, or soon will be, in an exchange that this rank cannot take part in any more.
            raise RankLost(f"rank {ranks.rank} of {ranks.count} failed while {doing}: {first}") from error
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in first:
            raise StepFailed(f"{doing}: out of memory: {first}; lower trainer.micro_batch_tokens") from error
        raise


def agreed(ranks: Ranks, read: Callable[[], T]) -> T:
    """What this rank has read; where any rank could not, all raise here, before anything else is exchanged."""
    found: list[T] = []
    fault: DriftlogError | None = None
    try:
        found.append(read())
    except DriftlogError as error:
        fault = error
    faults = [text.decode() for text in ranks.gather(str(fault or "").encode()) if text]
    if fault is not None:
        raise fault
    if faults:
        raise CheckpointInvalid(f"another rank cannot read it: {faults[0]}")
    return found[0]
