"""Everything a report is made of, read once from the log of a run: one pass a topic, nothing kept that grows with text.

Order: policy, ledger, trajectories, heartbeats, evaluations. Whatever stands for `the run` beyond the log (audit,
summary, configuration, manifest) is handed to the report by its caller.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from consumers.offline.branches import BranchStart, branch_starts
from consumers.offline.export.ranges import missing_ranges
from consumers.offline.outcomes import Ends
from consumers.offline.report.ledger_reading import LedgerReading
from consumers.offline.report.policy_reading import PolicyReading
from consumers.offline.report.row_reading import RowReading
from consumers.offline.run_log import RunLog
from consumers.offline.wholeness import readable_transactions, refuse_newer, require_policy
from schemas.evaluation_codec import EvaluationRow
from schemas.policy_events import VersionPublished
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus
from schemas.topics import TopicName

_NEEDED = (TopicName.LEDGER, TopicName.PROMPTS, TopicName.TRAJECTORIES)
"""topics that are drawn from, beside policy, which must be whole"""
_AT_WORK = ("ready", "serving", "draining", "loading")


@dataclass(slots=True)
class Scores:
    """Rewards of one version's evaluation under one temperature."""

    rows: int = 0
    failed: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        """Of the rows that have a reward."""
        count = self.rows - self.failed
        return self.total / count if count else None


@dataclass(slots=True)
class Idle:
    """Heartbeats of one worker that could have generated."""

    times_us: array[int] = field(default_factory=lambda: array("q"))
    shares: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True, kw_only=True)
class RunReading:
    """The run as its log tells it."""

    run: str
    policy: PolicyReading
    ledger: LedgerReading
    rows: RowReading
    statuses: Mapping[int, VersionStatus]
    newest: int | None
    live: int | None
    newest_event: VersionPublished | None
    branches: tuple[BranchStart, ...]
    idle: Mapping[str, Idle]
    evaluations: Mapping[tuple[bool, int], Scores]
    """(greedy, version) -> scores"""
    prompts: Mapping[str, str]
    """group -> prompt text of the trajectories that are shown"""
    missing: tuple[str, ...] = ()
    """ranges that retention removed or that were cut off: what is drawn is of the rest"""


def read_run(run_log: RunLog, *, texts: bool = True) -> RunReading:
    """Read the log as it stands.

    RangeMissing when `policy` lost its beginning: which version was what cannot be told. IllegalState at a record of
    the ledger, or one that was trained, that a newer build wrote."""
    require_policy(run_log)
    fold = PolicyFold()
    policy = PolicyReading()
    for entry in run_log.policy(fold):
        policy.add(entry)
        if fold.live is not None:
            fold.forget_proofs_below(fold.live)
    ledger = LedgerReading()
    for transaction in readable_transactions(run_log):
        ledger.add(transaction)
    position = None if ledger.control is None else ledger.control.position
    newest_step = ledger.versions[-1] if texts and ledger.versions else None
    rows = RowReading(
        uses=ledger.uses, ends=Ends(position, ledger.control), started_us=policy.started_us or 0,
        newest_step=newest_step,
    )  # fmt: skip
    for record in run_log.trajectories():
        if record.error is not None and record.key in ledger.uses:  # others the trainer could not read either
            refuse_newer(str(record.error), f"{run_log.run}.trajectories[{record.partition}]@{record.offset}")
        rows.add(record)
    return RunReading(
        run=run_log.run,
        policy=policy,
        ledger=ledger,
        rows=rows,
        statuses={number: state.status for number, state in fold.versions.items()},
        newest=fold.newest,
        live=fold.live,
        newest_event=None if fold.newest is None else fold.versions[fold.newest].event,
        branches=branch_starts(fold),
        idle=_idle(run_log),
        evaluations=_evaluations(run_log),
        prompts=_prompts(run_log, rows),
        missing=tuple(gap.words for gap in missing_ranges(run_log, _NEEDED, position)),
    )


def _idle(run_log: RunLog) -> dict[str, Idle]:
    found: dict[str, Idle] = {}
    for beat in run_log.heartbeats():
        if beat.state in _AT_WORK:
            idle = found.setdefault(beat.worker, Idle())
            idle.times_us.append(beat.at_us)
            idle.shares.append(beat.idle_fraction)
    return found


def _evaluations(run_log: RunLog) -> dict[tuple[bool, int], Scores]:
    found: dict[tuple[bool, int], Scores] = {}
    for row in run_log.evaluations():
        scores = found.setdefault((_is_greedy(row), row.version), Scores())
        scores.rows += 1
        if row.reward is None or not math.isfinite(row.reward):
            scores.failed += 1
        else:
            scores.total += row.reward
    return found


def _is_greedy(row: EvaluationRow) -> bool:
    return row.temperature == 0


def _prompts(run_log: RunLog, rows: RowReading) -> dict[str, str]:
    best, worst = rows.texts()
    wanted = {text.group_id for text in (*best, *worst)}
    if not wanted:
        return {}
    asked = (entry.request for entry in run_log.requests())
    return {r.group_id: r.prompt_text for r in asked if r is not None and r.prompt_text and r.group_id in wanted}
