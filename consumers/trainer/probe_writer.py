"""Makes probe.arrow: sequences and their log-probabilities under the weights that are being saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from consumers.trainer.probe_selection import FIXED_PROMPT, fixed_sequences
from consumers.trainer.step_record import StepRecord
from consumers.trainer.tensors import RowData, sequence_data
from schemas.probe_codec import ProbeSequence, encode_probe
from schemas.trajectory import Trajectory

Score = Callable[[Sequence[RowData]], StepRecord]
"""rows -> their proximal log-probabilities, under the weights that the probe is of"""


def probe_bytes(vocabulary_size: int, rows: Sequence[Trajectory], score: Score) -> bytes:
    """The probe of the weights that `score` knows: of these rows, or of fixed sequences where there are none.

    At temperature 1, as engines score."""
    pairs = _pairs(vocabulary_size, rows)
    scored = score([sequence_data(pair, 1.0) for pair in pairs])
    return encode_probe(
        [
            ProbeSequence(
                token_ids=np.asarray(prompt + completion, dtype=np.int32),
                prompt_length=len(prompt),
                logprobs=scored.proximal[place],
            )
            for place, (prompt, completion) in enumerate(pairs)
        ]
    )


def _pairs(vocabulary_size: int, rows: Sequence[Trajectory]) -> list[tuple[list[int], list[int]]]:
    if not rows:
        return [(list(s[:FIXED_PROMPT]), list(s[FIXED_PROMPT:])) for s in fixed_sequences(vocabulary_size)]
    return [(row.prompt_token_ids.tolist(), row.token_ids.tolist()) for row in rows]
