"""The audit of a simulated run: the same code that `driftlog audit` runs, on the in-memory log."""

from __future__ import annotations

from collections.abc import Sequence

from consumers.offline.audit import AuditRules, audit
from consumers.offline.audit.report import Severity
from consumers.offline.run_log import RunLog
from consumers.trainer.step import AgeWeights
from infra.ports import EventReader
from schemas.trajectory_codec import TrajectoryLimits
from tests.fakes.tiny_policy import VOCABULARY
from tests.sim.services import RUN, mean_only
from tests.sim.world import World


def audit_errors(world: World) -> list[str]:
    """Every error of the audit, in words; none for a run that kept its guarantees."""
    client = world.log.client("audit")

    def open_reader(topics: Sequence[str]) -> EventReader:
        return client.reader({name: world.log.topics[name] for name in topics}, "beginning")

    plan = world.plan
    limits = TrajectoryLimits(vocabulary_size=VOCABULARY)
    log = RunLog(RUN, open_reader, clock=world.clock, pause=world.clock.advance, limits=limits)
    max_use = plan.replay.max_use if plan.replay.steps else 1
    rules = AuditRules(
        max_lag=plan.largest_lag,
        max_use=max_use,
        barrier=plan.barrier,
        weight=AgeWeights(max_lag=plan.max_lag, decay=plan.stale_decay).weight,
        advantages=mean_only,
    )
    report = audit(log, rules, world.store())
    errors = [f for f in report.findings if f.severity is Severity.ERROR]
    # Requests that a stranger wrote are errors by rule: nobody but the trainer may write there.
    foreign = [f for f in errors if f.check == "G1.request_record" and f.subject.startswith("prompts[")]
    if len(foreign) == getattr(world, "strangers", {}).get("prompts", 0):
        errors = [finding for finding in errors if finding not in foreign]
    return [f"{f.check.partition('.')[0]}: audit: {f.check}: {f.subject}: {f.message}" for f in errors]
