"""One clear message where a question cannot be answered: records that retention removed or that were cut off, records
of a newer build; and when and by which rule the weights of a version were removed."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from consumers.offline.export.ranges import missing_ranges, require_whole
from consumers.offline.run_log import LedgerTransaction, RunLog
from schemas.errors import IllegalState
from schemas.headers import rfc3339
from schemas.ledger import Position
from schemas.policy_events import VersionRetired
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName, topic

NEEDED = frozenset({TopicName.POLICY, TopicName.LEDGER})
"""topics that must be whole: each event is legal or void by those before it, each Position follows from the last"""
NO_WAY_OUT = "Nothing can be told for certain without it: restore the topic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """What removed the weights of a version."""

    at_us: int
    rule: str

    @property
    def words(self) -> str:
        """One clause."""
        return f"its weights were removed at {rfc3339(self.at_us)} by rule {self.rule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRead:
    """The whole policy topic, folded."""

    fold: PolicyFold
    retired: Mapping[int, Retirement]
    """version -> why its weights are gone"""


def read_policy(run_log: RunLog) -> PolicyRead:
    """RangeMissing when retention removed something of the topic."""
    require_policy(run_log)
    fold = PolicyFold()
    retired = {
        entry.event.version: Retirement(at_us=entry.event.at_us, rule=entry.event.rule)
        for entry in run_log.policy(fold)
        if isinstance(entry.event, VersionRetired) and entry.is_legal
    }
    return PolicyRead(fold=fold, retired=retired)


def require_policy(run_log: RunLog) -> None:
    """RangeMissing when retention removed something of it."""
    require_whole(missing_ranges(run_log, {TopicName.POLICY}, None), NO_WAY_OUT)


def require_policy_and_ledger(run_log: RunLog) -> None:
    """RangeMissing when retention removed something of them."""
    require_whole(missing_ranges(run_log, NEEDED, None), NO_WAY_OUT)


def require_policy_up_to(run_log: RunLog, read_up_to: int) -> None:
    """IllegalState when the topic ends before what the trainer has read of it."""
    name = topic(run_log.run, TopicName.POLICY)
    end = run_log.ends.get((name, 0), 0)
    if read_up_to > end:
        raise IllegalState(
            f"{name}[0] ends at {end}, and the trainer has read it up to {read_up_to}: it was truncated or made anew. "
            f"{NO_WAY_OUT}"
        )


def require_rows_up_to(run_log: RunLog, position: Position | None, way_out: str) -> None:
    """RangeMissing when `trajectories` ends before where the trainer stood; retention at its beginning is no matter."""
    found = missing_ranges(run_log, {TopicName.TRAJECTORIES}, position)
    require_whole([gap for gap in found if gap.is_truncated], way_out)


def require_decisions(run_log: RunLog, way_out: str) -> None:
    """Policy and ledger are whole and readable, and no topic ends before what the trainer has read of it.

    Reads the ledger once. Rows that retention removed are the caller's to count."""
    require_policy_and_ledger(run_log)
    position: Position | None = None
    for transaction in readable_transactions(run_log):
        if transaction.control is not None:
            require_policy_up_to(run_log, transaction.control.policy_read_up_to)
            position = transaction.control.position
    require_rows_up_to(run_log, position, way_out)


def readable_transactions(run_log: RunLog) -> Generator[LedgerTransaction, None, None]:
    """The ledger; IllegalState at the first record that a newer build wrote."""
    for transaction in run_log.transactions():
        for problem in transaction.problems:
            refuse_newer(problem.message, f"{run_log.run}.ledger[0]@{problem.offset}")
        yield transaction


def refuse_newer(problem: str, place: str) -> None:
    """IllegalState for a record of a schema version that this build does not know: it is no damage."""
    if "schema_version:" in problem:
        raise IllegalState(f"{place}: {problem}. Use the build that wrote it")
