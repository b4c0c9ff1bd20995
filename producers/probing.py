"""The probe: does the engine that generates reproduce the trainer's log-probabilities under these weights?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.ports import GenerationEngine
from schemas.checkpoint import PROBE_NAME
from schemas.errors import CheckpointInvalid, InvalidRecord
from schemas.probe_codec import ProbeSequence, decode_probe


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """max |engine - trainer| over the probe's tokens."""

    diff_new: float
    diff_old: float | None
    """under the weights held before; None when there were none"""


def run_probe(engine: GenerationEngine, directory: Path, version: int, held: int | None) -> ProbeResult:
    """Score the probe with the old weights, load the new ones, score again. Raises CheckpointError."""
    try:
        probe = decode_probe((directory / PROBE_NAME).read_bytes())
    except InvalidRecord as error:
        raise CheckpointInvalid(f"{PROBE_NAME} of version {version}: {error}") from error
    diff_old = None if held is None else _difference(engine, probe)
    engine.load(directory, version)
    return ProbeResult(diff_new=_difference(engine, probe), diff_old=diff_old)


def _difference(engine: GenerationEngine, probe: tuple[ProbeSequence, ...]) -> float:
    scores = engine.score([s.token_ids.tolist() for s in probe], [s.prompt_length for s in probe])
    worst = 0.0
    for sequence, score in zip(probe, scores, strict=True):
        if len(score) != len(sequence.logprobs):
            raise CheckpointInvalid(
                f"probe: {len(sequence.logprobs)} log-probabilities, the engine scored {len(score)}"
            )
        difference = float(np.max(np.abs(score - sequence.logprobs), initial=0.0))
        # NaN compares false with everything: it must not pass as a small difference.
        worst = max(worst, difference) if math.isfinite(difference) else math.inf
    return worst
