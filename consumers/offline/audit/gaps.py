"""What an audit cannot see: ranges that retention removed, topics cut off at their end, records of a newer build.

One message each. Ranges of requests, rows, scores and dead letters can be accepted (`--allow-gaps`): what stands on
them is then counted as not judged, and everything else is judged as ever. Policy and ledger must be whole: each event
is legal or void by what came before it, and each Position follows from the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from consumers.offline.audit.index import RunIndex
from consumers.offline.audit.report import Findings
from consumers.offline.export.ranges import MissingRange, missing_ranges, require_whole
from consumers.offline.run_log import RunLog
from consumers.offline.wholeness import NEEDED, NO_WAY_OUT, refuse_newer, require_policy_up_to
from schemas.topics import TOPICS, TopicName

_READ = (
    TopicName.DEADLETTERS, TopicName.LEDGER, TopicName.POLICY, TopicName.PROMPTS, TopicName.SCORES,
    TopicName.TRAJECTORIES,
)  # fmt: skip
_WAY_OUT = "Audit what is left with --allow-gaps"


@dataclass(slots=True, kw_only=True)
class Gaps:
    """Ranges of the log that are not there. Mutable only in what it counts."""

    run: str
    ranges: Sequence[MissingRange] = ()
    lost_requests: frozenset[int] = frozenset()
    """positions of requests whose records retention removed"""
    not_judged: Counter[str] = field(default_factory=Counter)
    """what could not be judged for them"""

    def covers(self, name: TopicName, partition: int, offset: int) -> bool:
        """The record there is known to be gone."""
        full = f"{self.run}.{name.value}"
        return any(g.topic == full and g.partition == partition and g.first <= offset < g.end for g in self.ranges)

    def touches(self, name: TopicName) -> bool:
        """Something of the topic is gone."""
        return any(gap.topic == f"{self.run}.{name.value}" for gap in self.ranges)

    def to_list(self) -> list[dict[str, object]]:
        """Plain values, the gap record of the report."""
        return [
            {"topic": gap.topic, "partition": gap.partition, "first": gap.first, "end": gap.end, "why": gap.why}
            for gap in self.ranges
        ]


def find_gaps(run_log: RunLog, index: RunIndex, *, allowed: bool) -> Gaps:
    """RangeMissing, or IllegalState, with one message where the audit cannot go on."""
    controls = [transaction.control for transaction in index.transactions if transaction.control is not None]
    require_policy_up_to(run_log, max((control.policy_read_up_to for control in controls), default=0))
    ranges = missing_ranges(run_log, _READ, index.position)
    lost = [gap for gap in ranges if not gap.is_truncated]
    require_whole([gap for gap in lost if _name(gap) in NEEDED], NO_WAY_OUT)
    if not allowed:
        require_whole(lost, _WAY_OUT)
    return Gaps(run=run_log.run, ranges=tuple(ranges), lost_requests=_lost_requests(index, ranges))


def report_gaps(gaps: Gaps, findings: Findings) -> None:
    """A notice for each range that retention removed, an error for each topic that was cut off."""
    for gap in gaps.ranges:
        evidence: dict[str, str | int] = {
            "topic": gap.topic,
            "partition": gap.partition,
            "first": gap.first,
            "end": gap.end,
        }
        subject = f"{gap.topic}[{gap.partition}]"
        words = f"records {gap.first}-{gap.end - 1} {gap.why}; what stands on them is not judged"
        if gap.is_truncated:
            findings.error("log.truncated", subject, words, **evidence)
        else:
            findings.notice("log.gap", subject, words, **evidence)
    if gaps.not_judged:
        counted = ", ".join(f"{n} {what}" for what, n in sorted(gaps.not_judged.items()))
        findings.notice("log.gap", "not judged", counted)


def require_readable(index: RunIndex) -> None:
    """IllegalState for the first record of ledger or prompts that a newer build wrote."""
    for transaction in index.transactions:
        for problem in transaction.problems:
            refuse_newer(problem.message, f"{index.run}.ledger[0]@{problem.offset}")
    for entry in index.requests:
        refuse_newer(entry.problem, f"{index.run}.prompts[{entry.partition}]@{entry.offset}")


def unseen(gaps: Gaps, name: TopicName, places: Collection[tuple[int, int]]) -> bool:
    """One of these (partition, offset) is gone."""
    return any(gaps.covers(name, partition, offset) for partition, offset in places)


def _name(gap: MissingRange) -> TopicName:
    return TopicName(gap.topic.rpartition(".")[2])


def _lost_requests(index: RunIndex, ranges: Sequence[MissingRange]) -> frozenset[int]:
    """Request i lies in partition i mod 16, in order: those below the first that is left there are gone."""
    count = TOPICS[TopicName.PROMPTS].partitions
    cut = {gap.partition for gap in ranges if _name(gap) is TopicName.PROMPTS}
    if not cut or index.position is None:
        return frozenset()
    first: dict[int, int] = {}
    for issued in index.issued.values():
        first[issued.partition] = min(issued.position, first.get(issued.partition, issued.position))
    end = index.position.next_request
    return frozenset(position for p in cut for position in range(p, first.get(p, end + p), count) if position < end)
