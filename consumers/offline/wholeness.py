"""One clear message where a question cannot be answered: records that retention removed, records of a newer build."""

from __future__ import annotations

from collections.abc import Generator

from consumers.offline.export.ranges import missing_ranges, require_whole
from consumers.offline.run_log import LedgerTransaction, RunLog
from schemas.errors import IllegalState
from schemas.topics import TopicName

NEEDED = frozenset({TopicName.POLICY, TopicName.LEDGER})
"""topics that must be whole: each event is legal or void by those before it, each Position follows from the last"""
NO_WAY_OUT = "Nothing can be told for certain without it: restore the topic"


def require_policy_and_ledger(run_log: RunLog) -> None:
    """RangeMissing when retention removed something of them."""
    require_whole(missing_ranges(run_log, NEEDED, None), NO_WAY_OUT)


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
