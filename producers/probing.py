"""The probes: does the engine that generates stand for these weights, and for nothing older?

The first one scores given tokens against the trainer's log-probabilities. Scoring goes past a prefix cache, so it
cannot see keys and values that outlived the load. The second one generates behind prefixes that were cached before
the load, and holds the log-probabilities of what comes out to what the engine scores for the same tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from infra.logs import event
from infra.ports import GenerationEngine
from schemas.checkpoint import PROBE_NAME
from schemas.errors import CheckpointInvalid, DriftlogError, InvalidRecord
from schemas.probe_codec import ProbeSequence, decode_probe

log = logging.getLogger(__name__)

GENERATED_TOKENS = 4
"""behind each prefix; the first is computed from cached keys alone, the others from cached and new ones"""


PHASES = ("probe_old", "engine_load", "probe_new")
"""parts of a load, in their order"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the probes measured, as differences of log-probabilities."""

    diff_new: float
    """max |engine - trainer| over the probe's tokens"""
    diff_old: float | None
    """the same under the weights held before; None when there were none"""
    diff_generated: float | None = None
    """max |generated - scored|; None where the engine caches no prefixes"""
    failure: str = ""
    """the engine could not be probed after the load, and why"""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """probe_old, engine_load, probe_new"""

    def problem(self, tolerance: float) -> str | None:
        """Why this is no proof, or None."""
        if self.failure:
            return self.failure
        if not self.diff_new <= tolerance:
            before = "" if self.diff_old is None else f", and by {self.diff_old:g} under the weights before"
            return f"probe differs by {self.diff_new:g} > {tolerance:g} (generator.probe_tolerance){before}"
        if self.diff_generated is not None and not self.diff_generated <= tolerance:
            return (
                f"generated tokens come from old cached keys: their log-probabilities differ by "
                f"{self.diff_generated:g} > {tolerance:g} from the scores of the same tokens; clear the prefix cache"
            )
        return None


class GeneratedProbe:
    """The second probe. State: the prefixes that the engine may have cached under older weights."""

    def __init__(self, *, always: bool = False) -> None:
        """always: also where the engine says that it caches no prefixes."""
        self._always = always
        self._loaded = False
        self._warm: list[list[int]] = []

    def before_load(self, engine: GenerationEngine, probe: Sequence[ProbeSequence]) -> None:
        """Have the engine cache the probe's prefixes under the weights that are about to go.

        After a load that died half way there is nothing to generate with: what was warmed before it stays the test.
        """
        block = self._block(engine)
        if not block or not self._loaded or engine.weights_touched():
            return
        prefixes = [_prefix(sequence, block) for sequence in probe]
        try:
            engine.generate_greedily(prefixes, GENERATED_TOKENS)
        except DriftlogError as error:
            # Weights that give no finite numbers are a reason to load others, not to refuse them.
            event(log, "probe_not_warmed", level=logging.WARNING, reason=str(error))
            return
        self._warm = prefixes

    def after_load(self, engine: GenerationEngine, probe: Sequence[ProbeSequence]) -> float | None:
        """max |generated - scored| behind the warm prefixes; None where nothing is cached."""
        self._loaded = True
        block = self._block(engine)
        if not block:
            return None
        prefixes = self._warm or [_prefix(sequence, block) for sequence in probe]
        generated = engine.generate_greedily(prefixes, GENERATED_TOKENS)
        whole = [[*prefix, *tokens.tolist()] for prefix, (tokens, _) in zip(prefixes, generated, strict=True)]
        scores = engine.score(whole, [len(prefix) for prefix in prefixes])
        return _worst(scores, [logprobs for _, logprobs in generated], "generated tokens")

    def _block(self, engine: GenerationEngine) -> int:
        return engine.prefix_block() or (1 if self._always else 0)


def run_probe(
    engine: GenerationEngine,
    directory: Path,
    version: int,
    held: int | None,
    generated: GeneratedProbe,
    monotonic_s: Callable[[], float] = time.perf_counter,
) -> ProbeResult:
    """Probe with the old weights, load the new ones, probe again. Raises CheckpointError."""
    try:
        probe = decode_probe((directory / PROBE_NAME).read_bytes())
    except InvalidRecord as error:
        raise CheckpointInvalid(f"{PROBE_NAME} of version {version}: {error}") from error
    laps_s = [monotonic_s()]
    diff_old = None if held is None else _difference(engine, probe)
    generated.before_load(engine, probe)
    laps_s.append(monotonic_s())
    engine.load(directory, version)
    laps_s.append(monotonic_s())
    try:
        diff_new = _difference(engine, probe)
        diff_generated = generated.after_load(engine, probe)
        laps_s.append(monotonic_s())
        phases = {name: laps_s[place + 1] - laps_s[place] for place, name in enumerate(PHASES)}
        return ProbeResult(diff_new=diff_new, diff_old=diff_old, diff_generated=diff_generated, phase_s=phases)
    except DriftlogError as error:
        # The old weights are gone: this must not look like a load that died before it touched anything.
        return ProbeResult(diff_new=math.inf, diff_old=diff_old, failure=f"cannot be probed after the load: {error}")


def _difference(engine: GenerationEngine, probe: tuple[ProbeSequence, ...]) -> float:
    scores = engine.score([s.token_ids.tolist() for s in probe], [s.prompt_length for s in probe])
    return _worst(scores, [s.logprobs for s in probe], "probe")


def _worst(scores: Sequence[npt.NDArray[np.float32]], expected: Sequence[npt.NDArray[np.float32]], what: str) -> float:
    worst = 0.0
    for score, logprobs in zip(scores, expected, strict=True):
        if len(score) != len(logprobs):
            raise CheckpointInvalid(f"{what}: {len(logprobs)} log-probabilities, the engine scored {len(score)}")
        difference = float(np.max(np.abs(score - logprobs), initial=0.0))
        # NaN compares false with everything: it must not pass as a small difference.
        worst = max(worst, difference) if math.isfinite(difference) else math.inf
    return worst


def _prefix(sequence: ProbeSequence, block: int) -> list[int]:
    """The sequence but for its last tokens, so that what is generated fits wherever the sequence did. A cache holds
    whole blocks: a shorter prefix is said again until it fills one, with a token to spare."""
    ids: list[int] = sequence.token_ids.tolist()
    prefix = ids[: max(1, len(ids) - GENERATED_TOKENS)]
    return prefix if len(prefix) > block else (prefix * (1 + block // len(prefix)))[: block + 1]
