"""Makes probe.arrow: sequences and their log-probabilities under the weights that are being saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from consumers.trainer.probe_selection import FIXED_PROMPT, MAX_SEQUENCES, ProbeCandidate, fixed_sequences, most_moved
from schemas.probe_codec import ProbeSequence, encode_probe

Pair = tuple[list[int], list[int]]
Score = Callable[[Sequence[Pair], Sequence[float]], list[npt.NDArray[np.float32]]]
"""(prompt, completion) pairs and their temperatures -> log-probabilities of the completions"""


def probe_bytes(vocabulary_size: int, candidates: Sequence[ProbeCandidate], score: Score) -> bytes:
    """The probe of the policy's present weights. Log-probabilities are at temperature 1, as engines score."""
    pairs, temperatures = _pairs(vocabulary_size, candidates)
    if len(candidates) > MAX_SEQUENCES:
        moved = score(pairs, temperatures)
        pairs = [pairs[place] for place in most_moved(candidates, moved)]
    scores = score(pairs, [1.0] * len(pairs))
    return encode_probe(
        [
            ProbeSequence(
                token_ids=np.asarray(prompt + completion, dtype=np.int32), prompt_length=len(prompt), logprobs=logprobs
            )
            for (prompt, completion), logprobs in zip(pairs, scores, strict=True)
        ]
    )


def _pairs(vocabulary_size: int, candidates: Sequence[ProbeCandidate]) -> tuple[list[Pair], list[float]]:
    if not candidates:
        fixed = fixed_sequences(vocabulary_size)
        return [(list(s[:FIXED_PROMPT]), list(s[FIXED_PROMPT:])) for s in fixed], [1.0] * len(fixed)
    rows = [candidate.row.trajectory for candidate in candidates]
    pairs = [(row.prompt_token_ids.tolist(), row.token_ids.tolist()) for row in rows]
    return pairs, [row.sampling.temperature for row in rows]
