"""Which sequences a checkpoint is recognised by: those whose log-probability the last step must have moved most.

A probe that cannot tell the new weights from the old proves little, so rows are ranked by the movement to be expected,
which costs no forward pass. Before the first step there is nothing to rank: fixed token sequences stand in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from consumers.trainer.batch import BatchRow
from schemas.trajectory import Trajectory

MAX_SEQUENCES = 8

FIXED_SEQUENCES = 4
FIXED_TOKENS = 12
FIXED_PROMPT = 4


def probe_rows(rows: Sequence[BatchRow], proximal: Sequence[npt.NDArray[np.float32]]) -> tuple[Trajectory, ...]:
    """At most MAX_SEQUENCES, each token sequence once, those first that the step pushed hardest.

    The gradient of a token's log-probability by the logits grows with 1 - p, so a row's push is
    |advantage| x weight x the sum of 1 - p over the tokens that count, p under the weights before the step
    (`proximal`: their logarithms [T] by row, at the row's temperature)."""

    if not rows:
        return ()
    # All rows end to end: (1 - p) of each token that counts, added up by row.
    logprobs_N = np.concatenate(proximal).astype(np.float64)
    mask_N = np.concatenate([row.trajectory.loss_mask for row in rows])
    starts = np.cumsum([0, *[len(row.trajectory.loss_mask) for row in rows[:-1]]])
    open_B = np.add.reduceat(mask_N * (1.0 - np.exp(np.minimum(logprobs_N, 0.0))), starts)
    pushes = [abs(row.advantage) * row.weight * open_ for row, open_ in zip(rows, open_B.tolist(), strict=True)]
    chosen: dict[tuple[bytes, bytes], Trajectory] = {}
    for place in sorted(range(len(rows)), key=lambda place: (-pushes[place], place)):
        if len(chosen) == MAX_SEQUENCES:
            break
        chosen.setdefault(_identity(rows[place].trajectory), rows[place].trajectory)
    return tuple(chosen.values())


def fixed_sequences(vocabulary_size: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences that depend on the vocabulary size alone; the first FIXED_PROMPT tokens are the prompt."""

    def token(sequence: int, place: int) -> int:
        digest = hashlib.sha256(f"probe/{sequence}/{place}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % vocabulary_size

    return tuple(tuple(token(sequence, place) for place in range(FIXED_TOKENS)) for sequence in range(FIXED_SEQUENCES))


def _identity(trajectory: Trajectory) -> tuple[bytes, bytes]:
    return trajectory.prompt_token_ids.tobytes(), trajectory.token_ids.tobytes()
