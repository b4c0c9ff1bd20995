"""G1 for requests and groups: whatever was issued is decided once, and nothing else is."""

from __future__ import annotations

from consumers.offline.audit.gaps import Gaps
from consumers.offline.audit.index import Issued, RunIndex
from consumers.offline.audit.report import Findings
from schemas.ledger import Decision, DecisionRow, Subject
from schemas.topics import TOPICS, TopicName

_PARTITIONS = TOPICS[TopicName.PROMPTS].partitions


def check_ledger_records(index: RunIndex, findings: Findings) -> None:
    """Ledger records that cannot be read or were changed afterwards."""
    for transaction in index.transactions:
        for problem in transaction.problems:
            about = transaction.decisions[0] if transaction.decisions else None
            first = "" if about is None else f"; its first decision is about {_subject(about)}"
            findings.error(
                "G1.ledger_record",
                f"ledger@{problem.offset}",
                f"{problem.message} (transaction {transaction.number}{first})",
                transaction=transaction.number,
            )
    for transaction in index.transactions:
        if transaction.control is None and not transaction.problems:
            findings.error(
                "G1.ledger_record", f"ledger@{transaction.offset}", "decisions without a control record behind them"
            )


def check_requests(index: RunIndex, findings: Findings, gaps: Gaps) -> None:
    """Requests are readable, and positions 0, 1, 2, ... each lie once in their partition."""
    for entry in index.requests:
        if entry.problem:
            findings.error("G1.request_record", f"prompts[{entry.partition}]@{entry.offset}", entry.problem)
    seen: dict[int, Issued] = {}
    for issued in index.issued.values():
        other = seen.setdefault(issued.position, issued)
        if other is not issued:
            findings.error(
                "G1.request_record", issued.group_id, f"position {issued.position} is also that of {other.group_id}"
            )
        if issued.partition != issued.position % _PARTITIONS:
            findings.error(
                "G1.request_record",
                issued.group_id,
                f"position {issued.position} lies in partition {issued.partition}, not {issued.position % _PARTITIONS}",
            )
    readable = sum(1 for entry in index.requests if not entry.problem)
    if readable > len(index.issued):
        findings.error("G1.request_record", "prompts", f"{readable - len(index.issued)} group ids were requested twice")
    position = index.position
    if position is not None:
        _check_positions_are_whole(index, seen, position.next_request, findings, gaps)


def _check_positions_are_whole(
    index: RunIndex, seen: dict[int, Issued], next_request: int, findings: Findings, gaps: Gaps
) -> None:
    missing = [number for number in range(next_request) if number not in seen and number not in gaps.lost_requests]
    for number in missing:
        findings.error(
            "G1.request_record", f"request {number}", "the ledger counts it as issued, but it is not in prompts"
        )
    beyond = [issued for number, issued in sorted(seen.items()) if number >= next_request]
    if not beyond:
        return
    if index.ended is not None:
        for issued in beyond:
            findings.error(
                "G1.request_record",
                issued.group_id,
                f"position {issued.position} is behind the last one, {next_request - 1}",
            )
    else:
        findings.notice(
            "G5.beyond_ledger",
            "prompts",
            f"{len(beyond)} requests of a transaction that the ledger read does not show yet",
        )


def check_groups(index: RunIndex, findings: Findings, gaps: Gaps) -> None:
    """Each issued group ends in exactly one group decision; group and rows agree."""
    decided: dict[str, int] = {}
    for transaction in index.transactions:
        for row in transaction.decisions:
            if row.subject is not Subject.GROUP or row.group_id is None:
                continue
            if row.group_id in decided:
                findings.error(
                    "G1.group_decided_twice",
                    row.group_id,
                    f"decided in transaction {decided[row.group_id]} and again in {transaction.number} ({_words(row)})",
                    transaction=transaction.number,
                )
            decided.setdefault(row.group_id, transaction.number)
            if row.group_id not in index.issued and gaps.lost_requests:
                gaps.not_judged["groups without a request"] += 1
            elif row.group_id not in index.issued:
                findings.error(
                    "G1.group_unknown",
                    row.group_id,
                    f"decided ({_words(row)}) but never issued",
                    transaction=transaction.number,
                )
        _check_rows_follow_groups(transaction.number, transaction.decisions, findings)
    _check_undecided(index, decided, findings)


def _check_rows_follow_groups(number: int, decisions: tuple[DecisionRow, ...], findings: Findings) -> None:
    """A row is trained for the first time only together with its group, and a trained group has such a row."""
    groups = {r.group_id for r in decisions if r.subject is Subject.GROUP and r.decision is Decision.TRAINED}
    rows: dict[str | None, str | None] = {}
    for r in decisions:
        if r.subject is Subject.TRAJECTORY and r.decision is Decision.TRAINED:
            rows.setdefault(r.group_id, r.trajectory_id)
    for group_id in sorted(str(g) for g in groups - rows.keys()):
        findings.error(
            "G1.group_mismatch",
            group_id,
            "the group is trained, but none of its rows in that transaction",
            transaction=number,
        )
    for stray, trajectory_id in rows.items():
        if stray not in groups:
            findings.error(
                "G1.group_mismatch",
                str(trajectory_id),
                f"trained, but its group {stray} is not, in that transaction",
                transaction=number,
            )


def _check_undecided(index: RunIndex, decided: dict[str, int], findings: Findings) -> None:
    position = index.position
    if position is None:
        return
    open_ids = {group.group_id for group in position.open_groups}
    waiting = 0
    for issued in index.issued.values():
        if issued.group_id in decided or issued.position >= position.next_request:
            continue
        if index.ended is not None:
            findings.error(
                "G1.group_undecided",
                issued.group_id,
                f"request {issued.position} has no group decision, and the run has ended",
            )
        elif issued.group_id not in open_ids:
            findings.error(
                "G1.group_undecided",
                issued.group_id,
                f"request {issued.position} is neither decided nor open: it was lost",
            )
        else:
            waiting += 1
    if waiting:
        findings.notice("G1.open", "groups", f"{waiting} groups are open", open_groups=waiting)


def _words(row: DecisionRow) -> str:
    return f"{row.decision.value} {row.reason}".strip()


def _subject(row: DecisionRow) -> str:
    return row.trajectory_id or row.group_id or f"trajectories[{row.partition}]@{row.offset}"
