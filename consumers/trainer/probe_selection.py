"""Which sequences a checkpoint is recognised by: those whose log-probability the last step moved most.

A probe that cannot tell the new weights from the old proves little, so rows are ranked by movement.
Before the first step there is nothing to rank: fixed token sequences stand in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from consumers.trainer.batch import BatchRow
from schemas.trajectory import Trajectory

MAX_SEQUENCES = 8
MAX_CANDIDATES = 32
"""rows whose movement is measured, in one more forward pass: a quarter of the batch at most, as a pass over all of a
small batch of a real model would be a third of its training step; up to MAX_SEQUENCES are taken without it"""

FIXED_SEQUENCES = 4
FIXED_TOKENS = 12
FIXED_PROMPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCandidate:
    """A row of the last step, and what the weights before the step said of it."""

    row: BatchRow
    proximal: npt.NDArray[np.float32]
    """[T] at the row's temperature"""


def probe_candidates(
    rows: Sequence[BatchRow], proximal: Sequence[npt.NDArray[np.float32]]
) -> tuple[ProbeCandidate, ...]:
    """The rows the step pushed hardest (|advantage| x weight x tokens), each token sequence once."""

    def push(place: int) -> float:
        row = rows[place]
        return abs(row.advantage) * row.weight * float(row.trajectory.loss_mask.sum())

    limit = max(MAX_SEQUENCES, min(MAX_CANDIDATES, len(rows) // 4))
    chosen: dict[tuple[bytes, bytes], int] = {}
    for place in sorted(range(len(rows)), key=lambda place: (-push(place), place)):
        if len(chosen) == limit:
            break
        chosen.setdefault(_identity(rows[place].trajectory), place)
    return tuple(ProbeCandidate(row=rows[place], proximal=proximal[place]) for place in chosen.values())


def most_moved(candidates: Sequence[ProbeCandidate], current: Sequence[npt.NDArray[np.float32]]) -> tuple[int, ...]:
    """Places of the candidates with the largest |current - proximal| at any token, largest first."""
    moved = [float(np.abs(now - candidate.proximal).max()) for candidate, now in zip(candidates, current, strict=True)]
    return tuple(sorted(range(len(moved)), key=lambda place: (-moved[place], place))[:MAX_SEQUENCES])


def fixed_sequences(vocabulary_size: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences that depend on the vocabulary size alone; the first FIXED_PROMPT tokens are the prompt."""

    def token(sequence: int, place: int) -> int:
        digest = hashlib.sha256(f"probe/{sequence}/{place}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % vocabulary_size

    return tuple(tuple(token(sequence, place) for place in range(FIXED_TOKENS)) for sequence in range(FIXED_SEQUENCES))


def _identity(trajectory: Trajectory) -> tuple[bytes, bytes]:
    return trajectory.prompt_token_ids.tobytes(), trajectory.token_ids.tobytes()
