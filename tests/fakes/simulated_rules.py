"""What a simulated run decides by, for a reanalysis of it."""

from __future__ import annotations

from consumers.offline.reanalyse.judge import ReanalysisRules
from consumers.trainer.admission import AdmissionRules
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.selection import SelectionRules
from consumers.trainer.step import AgeWeights
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_policy import TOKENIZER_DIGEST
from tests.sim.services import mean_only


def simulated_rules(run: SimulatedRun, max_lag: int) -> ReanalysisRules:
    """As tests/sim/services.py decides."""
    return ReanalysisRules(
        selection=SelectionRules(
            groups_per_step=2, order="issue", min_group=2, filter_zero_variance=False,
            admission=AdmissionRules(max_lag=max_lag, barrier=True, tokenizer_digest=TOKENIZER_DIGEST),
        ),
        group_size=run.world.plan.group_size,
        age_weights=AgeWeights(max_lag=max_lag),
        advantages=mean_only,
        learner=LearnerSettings(),
        fingerprint={},
    )  # fmt: skip
