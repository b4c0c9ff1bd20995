"""Whether ledger and `trajectories` hold what a plan needs: asked before anything is trained, one message each."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing

from consumers.offline.export.ranges import missing_ranges, require_whole
from consumers.offline.replay.plan import ReplayPlan, is_made_by_a_step
from consumers.offline.run_log import LedgerTransaction, RunLog
from consumers.offline.wholeness import NO_WAY_OUT, readable_transactions, require_rows_up_to
from schemas.errors import IllegalState
from schemas.ledger import Decision, Position, StepCompleted, Subject
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName, topic


def require_steps(run_log: RunLog, fold: PolicyFold, plan: ReplayPlan) -> str:
    """RangeMissing or IllegalState, unless the ledger can be read and has every step of the plan, and its rows are not
    cut off. Rows that retention removed are left to whoever reads them.

    Returns words on a newest version whose step was not in the ledger yet when it was read; "" when all are there."""
    planned = {n for n in fold.versions if plan.first <= n <= plan.last and is_made_by_a_step(fold, n)}
    cut = missing_ranges(run_log, {TopicName.LEDGER}, None)
    may_be_partial = bool(cut)  # the first transaction that is left may have lost its beginning
    found: set[int] = set()
    first_whole: int | None = None
    beyond: int | None = None
    position: Position | None = None
    with closing(readable_transactions(run_log)) as transactions:
        for transaction in transactions:
            control = transaction.control
            if control is None:
                continue
            if isinstance(control, StepCompleted) and not may_be_partial:
                first_whole = control.version_out if first_whole is None else first_whole
                if control.version_out > plan.last:
                    _require_published(run_log, fold, control.version_out)
                    break
                if control.version_out in planned:
                    found.add(control.version_out)
                    position = control.position
                    if beyond is None and _names_rows_beyond_the_end(run_log, transaction):
                        beyond = control.version_out
            may_be_partial = False
    missing = sorted(planned - found)
    if missing and cut:
        way_out = "no later one is whole" if first_whole is None else f"ask for versions from {first_whole} on"
        require_whole(cut, f"The steps of {_words(missing)} are gone with them: {way_out}")
    if beyond is not None:
        way_out = "restore the topic" + (f", or ask for versions up to {beyond - 1}" if beyond > plan.first else "")
        require_rows_up_to(run_log, position, f"Version {beyond} was trained on some of them: {way_out}")
    if missing == [fold.newest] and not fold.ended:  # policy is read after the ledger: it may be a transaction ahead
        return f"version {fold.newest} was published while the ledger was read: ask again for it"
    if missing:
        raise IllegalState(
            f"{topic(run_log.run, TopicName.LEDGER)} holds no step that made {_words(missing)}, which policy says was "
            "published: run `driftlog audit`"
        )
    return ""


def _require_published(run_log: RunLog, fold: PolicyFold, version: int) -> None:
    """Where the plan ends the run ended too, or policy knows what came next: it is read after the ledger."""
    if version not in fold.versions:
        full = topic(run_log.run, TopicName.POLICY)
        raise IllegalState(
            f"{full}[0] ends at {run_log.ends.get((full, 0), 0)} without version {version}, whose step is in the "
            f"ledger: it was truncated or made anew. {NO_WAY_OUT}"
        )


def _names_rows_beyond_the_end(run_log: RunLog, transaction: LedgerTransaction) -> bool:
    """A row of the batch, or of one of its groups."""
    full = topic(run_log.run, TopicName.TRAJECTORIES)
    trained = {row.group_id for row in transaction.decisions if row.decision is not Decision.DROPPED}
    return any(
        row.subject is Subject.TRAJECTORY
        and row.group_id in trained
        and row.partition is not None
        and row.offset is not None
        and row.offset >= run_log.ends.get((full, row.partition), 0)
        for row in transaction.decisions
    )


def _words(versions: Collection[int]) -> str:
    listed = sorted(versions)
    if len(listed) > 2 and listed[-1] - listed[0] == len(listed) - 1:
        return f"versions {listed[0]}-{listed[-1]}"
    return f"version{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
