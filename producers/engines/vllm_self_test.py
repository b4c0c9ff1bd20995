"""At the start: does a switch replace the weights in use, all the way to the output head, and back?

Weights are switched from A to B and back to A. B is A with its tokens renamed (every row of the embedding, and of
an output head of its own, one further down), so what B must say is known without a second model: a sentence spelt
with the new names is exactly as likely. A head that kept old rows, as a tied one does after a bare reload, fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from infra.logs import event
from infra.model import Policy
from producers.engines.vllm_core import VllmCore, log
from producers.engines.vllm_sampling import scoring_arguments
from producers.engines.vllm_weights import vocabulary_tensors
from schemas.errors import EngineLost

SEQUENCES = 2
TOKENS = 12
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


def self_test(core: VllmCore, policy: Policy, salt: Callable[[], str], label: str, dtype: str) -> None:
    """Raises EngineLost, with what was measured, when the numbers do not follow the weights. Weights are staged."""
    vocabulary, length = policy.vocabulary_size, min(TOKENS, core.max_tokens - 1)
    # Fixed sentences: what is measured depends on the weights alone.
    chance = random.Random(0)
    plain = [[chance.randrange(vocabulary) for _ in range(length)] for _ in range(SEQUENCES)]
    renamed = [[(token + 1) % vocabulary for token in ids] for ids in plain]

    first = _scores(core, plain)
    _switch(core, vocabulary_tensors(policy), label, salt())
    followed = _worst(_scores(core, renamed), first)
    moved = _worst(_scores(core, plain), first)
    _switch(core, (), label, salt())
    back = _worst(_scores(core, plain), first)

    problem = verdict(followed, moved, back, TOLERANCE[dtype])
    event(log, "switch_self_test", followed=followed, moved=moved, back=back, passed=problem is None)
    if problem is not None:
        raise EngineLost(
            f"vllm {core.version} does not switch this model's weights as it should: {problem}; use a release and a "
            "model that docs/vllm.md names, or generator.engine = hf"
        )


def verdict(followed: float, moved: float, back: float, tolerance: float) -> str | None:
    """What is wrong, or None. All are max |log-probability difference|: of the renamed sentences under B to A's, of
    the same sentences under B to A's, and of A after the round trip to A before."""
    if not followed <= tolerance:
        return f"after a switch log-probabilities are {followed:g} > {tolerance:g} from what those weights give"
    if not moved > 10 * tolerance:
        return f"a switch to other weights moves log-probabilities by {moved:g} only: old ones are still in use"
    if not back <= tolerance:
        return f"after switching back log-probabilities are {back:g} > {tolerance:g} from what they were"
    return None


def _switch(core: VllmCore, rotated: Sequence[str], label: str, salt: str) -> None:
    core.clear()
    core.swap(rotated)
    core.serve(label, salt)


def _scores(core: VllmCore, sequences: Sequence[Sequence[int]]) -> list[float]:
    return [value for ids in sequences for value in core.ask(ids, scoring_arguments()).prompt_logprobs]


def _worst(found: Sequence[float], expected: Sequence[float]) -> float:
    difference = np.abs(np.asarray(found) - np.asarray(expected)).max()
    return float(difference) if np.isfinite(difference) else float("inf")
