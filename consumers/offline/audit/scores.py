"""G5 for the topic `scores`: it is written in the transaction of the step, so each row that was trained has its own.

Whether the numbers are right is asked of the weights: see audit_recompute.
"""

from __future__ import annotations

from dataclasses import dataclass

from consumers.offline.audit.gaps import Gaps
from consumers.offline.audit.index import RunIndex
from consumers.offline.audit.report import Findings
from consumers.offline.run_log import RunLog
from consumers.offline.wholeness import refuse_newer
from schemas.ledger import Decision, Subject
from schemas.topics import TopicName


@dataclass(slots=True)
class _Expected:
    version: int
    tokens: int | None
    found: str = ""
    """where its scores lie"""


def check_scores(index: RunIndex, run_log: RunLog, findings: Findings, gaps: Gaps) -> int:
    """How many scores there are. Steps of a run none of whose rows was ever scored are not asked for any."""
    expected = {
        (step.version_in, row.trajectory_id): _Expected(step.version_out, row.completion_tokens)
        for transaction, step in index.steps()
        for row in transaction.decisions
        if row.subject is Subject.TRAJECTORY and row.decision is Decision.TRAINED and row.trajectory_id
    }
    made = {step.version_in: step.version_out for _, step in index.steps()}
    count = 0
    newest = max((version for version, _ in expected), default=-1)
    for entry in run_log.scores():
        place = f"scores[{entry.partition}]@{entry.offset}"
        refuse_newer(entry.problem, f"{index.run}.{place}")
        if entry.problem or entry.is_damaged:
            words = entry.problem or "the bytes are not those its ce_id was made from: the record was altered"
            whose = "" if not entry.rows else f" (of {entry.rows[0].trajectory_id})"
            findings.error(
                "G5.scores",
                place,
                f"{words}{whose}",
                version=made.get(entry.rows[0].version_in) if entry.rows else None,
            )
        for row in entry.rows:
            count += 1
            found = expected.get((row.version_in, row.trajectory_id))
            if found is not None:
                _judge(found, row.trajectory_id, len(row.proximal), place, findings)
            elif row.version_in <= newest or index.ended is not None:
                words = f"scored at {place} from version {row.version_in}, but no such step trained it"
                findings.error("G5.scores", row.trajectory_id, words, version=made.get(row.version_in))
    if count or gaps.touches(TopicName.SCORES):
        _missing(expected, findings, gaps)
    elif expected:
        words = f"no scores in the log for {len(expected)} trained rows"
        findings.notice("G5.scores", "scores", words, rows=len(expected))
    return count


def _judge(found: _Expected, trajectory_id: str, tokens: int, place: str, findings: Findings) -> None:
    if found.found:
        words = f"scored twice in the step of version {found.version}: at {found.found} and at {place}"
        findings.error("G5.scores", trajectory_id, words, version=found.version)
    found.found = place
    if found.tokens is not None and tokens != found.tokens:
        words = f"{tokens} scores at {place}, the completion has {found.tokens} tokens"
        findings.error("G5.scores", trajectory_id, words, version=found.version)


def _missing(expected: dict[tuple[int, str], _Expected], findings: Findings, gaps: Gaps) -> None:
    for (_, trajectory_id), one in expected.items():
        if one.found:
            continue
        if gaps.touches(TopicName.SCORES):
            gaps.not_judged["scores"] += 1
            continue
        words = f"trained into version {one.version}, and not scored"
        findings.error("G5.scores", trajectory_id, words, version=one.version)
