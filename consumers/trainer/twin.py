"""The policy as it was at one moment, in a model of its own: saved and probed while the policy trains on.

Its memory is used again at the next moment. Guarantees that a copy which was superseded meanwhile is never taken for
whole: whoever saves one asks for its probe last, and is refused then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.learner_step import Counters, Updater
from consumers.trainer.policy_forward import ForwardSettings
from consumers.trainer.probe_writer import probe_bytes
from consumers.trainer.ranks import OneRank, Ranks
from consumers.trainer.ranks_model import RankedModel
from schemas.errors import IllegalState
from schemas.trajectory import Trajectory


def may_have_a_twin(settings: LearnerSettings, ranks: Ranks) -> bool:
    """Whole weights, one process, a CPU: elsewhere a second model is not what is served, or costs what is scarce."""
    return ranks.count == 1 and settings.lora is None and settings.device == "cpu"


class Twin:
    """One of a learner, made at its first copy."""

    def __init__(self, model: RankedModel, settings: LearnerSettings, forward: ForwardSettings) -> None:
        # (a deep copy has no gradients, and ties what is tied)
        module = copy.deepcopy(model.policy.model).requires_grad_(False)
        self._policy = replace(model.policy, model=module)
        self._model = RankedModel(self._policy, forward, OneRank(), settings.parallel, trains=False)
        self._updater = Updater(settings, OneRank(), self._model, None, None, Counters())
        self._moment = 0

    def take(self, model: RankedModel, rows: Sequence[Trajectory]) -> tuple[dict[str, Tensor], Callable[[], bytes]]:
        """Become what the model is now: the weights by name, and what computes their probe on these rows, later and on
        any thread. Both hold until the next `take`; IllegalState from the probe after it."""
        self._moment += 1
        self._model.copy_from(model)
        moment = self._moment

        def probe() -> bytes:
            found = probe_bytes(self._policy.vocabulary_size, rows, self._updater.scored)
            if moment != self._moment:
                raise IllegalState("a copy of the learner was superseded while it was saved: one publication at a time")
            return found

        return self._model.whole_tensors(), probe
