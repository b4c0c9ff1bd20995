"""Makes probe.arrow: sequences and their log-probabilities under the weights that are being saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from consumers.trainer.policy_forward import ForwardSettings, score_rows
from consumers.trainer.probe_selection import FIXED_PROMPT, ProbeCandidate, fixed_sequences, most_moved
from consumers.trainer.tensors import pack_sequences
from infra.model import Policy
from schemas.probe_codec import ProbeSequence, encode_probe

Pair = tuple[list[int], list[int]]


def probe_bytes(policy: Policy, candidates: Sequence[ProbeCandidate], forward: ForwardSettings, device: str) -> bytes:
    """The probe of the policy's present weights. Log-probabilities are at temperature 1, as engines score."""
    pairs, temperatures = _pairs(policy, candidates)
    if candidates:
        moved = _score(policy.model, pairs, temperatures, forward, device)
        pairs = [pairs[place] for place in most_moved(candidates, moved)]
    scores = _score(policy.model, pairs, [1.0] * len(pairs), forward, device)
    return encode_probe(
        [
            ProbeSequence(
                token_ids=np.asarray(prompt + completion, dtype=np.int32), prompt_length=len(prompt), logprobs=logprobs
            )
            for (prompt, completion), logprobs in zip(pairs, scores, strict=True)
        ]
    )


def _pairs(policy: Policy, candidates: Sequence[ProbeCandidate]) -> tuple[list[Pair], list[float]]:
    if not candidates:
        fixed = fixed_sequences(policy.vocabulary_size)
        return [(list(s[:FIXED_PROMPT]), list(s[FIXED_PROMPT:])) for s in fixed], [1.0] * len(fixed)
    rows = [candidate.row.trajectory for candidate in candidates]
    pairs = [(row.prompt_token_ids.tolist(), row.token_ids.tolist()) for row in rows]
    return pairs, [row.sampling.temperature for row in rows]


def _score(
    model: Any, pairs: Sequence[Pair], temperatures: Sequence[float], forward: ForwardSettings, device: str
) -> list[npt.NDArray[np.float32]]:
    tensors = pack_sequences(pairs, temperatures, device)
    scores = score_rows(model, tensors, forward)[0].cpu().numpy()
    return [scores[place, : len(completion)].copy() for place, (_, completion) in enumerate(pairs)]
