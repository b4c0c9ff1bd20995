"""Makes probe.arrow: sequences and their log-probabilities under the weights that are being saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from consumers.trainer.probe_selection import FIXED_PROMPT, fixed_sequences
from schemas.probe_codec import ProbeSequence, encode_probe
from schemas.trajectory import Trajectory

Pair = tuple[list[int], list[int]]
Score = Callable[[Sequence[Pair]], list[npt.NDArray[np.float32]]]
"""(prompt, completion) pairs -> log-probabilities of the completions at temperature 1, as engines score"""


def probe_bytes(vocabulary_size: int, rows: Sequence[Trajectory], score: Score) -> bytes:
    """The probe of the policy's present weights: of these rows, or of fixed sequences where there are none."""
    pairs = _pairs(vocabulary_size, rows)
    return encode_probe(
        [
            ProbeSequence(
                token_ids=np.asarray(prompt + completion, dtype=np.int32), prompt_length=len(prompt), logprobs=logprobs
            )
            for (prompt, completion), logprobs in zip(pairs, score(pairs), strict=True)
        ]
    )


def _pairs(vocabulary_size: int, rows: Sequence[Trajectory]) -> list[Pair]:
    if not rows:
        return [(list(s[:FIXED_PROMPT]), list(s[FIXED_PROMPT:])) for s in fixed_sequences(vocabulary_size)]
    return [(row.prompt_token_ids.tolist(), row.token_ids.tolist()) for row in rows]
