"""The pass over `trajectories`: every record and row against what was decided about it (G1), one record at a time.

Keeps ids, rewards and log offsets; never tokens. Freshness and proofs of trained rows are judged in fresh.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from consumers.offline.audit.gaps import Gaps
from consumers.offline.audit.index import AuditRules, RecordDecisions, Ref, RunIndex
from consumers.offline.audit.report import Findings
from consumers.offline.run_log import RecordKey, TrajectoryEntry
from consumers.offline.wholeness import refuse_newer
from schemas.ledger import INVALID_PREFIX, Decision, DecisionRow, Reason, Subject
from schemas.topics import TopicName
from schemas.trajectory import DecodedRow, Trajectory

JudgeTrained = Callable[[Ref, Trajectory], None]
"""called for each use of a row that is as the ledger says"""


@dataclass(frozen=True, slots=True)
class Member:
    """A row of a trained group: what its advantage follows from."""

    index: int
    claim_id: str
    reward: float | None
    decision: DecisionRow


class RowAudit:
    """Mutable; feed it every entry, then `finish`."""

    def __init__(
        self,
        index: RunIndex,
        rules: Callable[[int], AuditRules | None],
        judge: JudgeTrained,
        findings: Findings,
        gaps: Gaps,
    ) -> None:
        """`rules`: limits by transaction number; None where they are not known."""
        self._gaps = gaps
        self._index = index
        self._rules = rules
        self._judge = judge
        self._findings = findings
        self._waiting = dict(index.records)
        position = index.position
        self._next = {} if position is None else {p: q.next_offset for p, q in position.partitions.items()}
        self._undecided = (
            {} if position is None else {p: frozenset(q.undecided) for p, q in position.partitions.items()}
        )
        self._trained_groups = {
            (transaction.number, row.group_id)
            for transaction in index.transactions
            for row in transaction.decisions
            if row.subject is Subject.GROUP and row.decision is Decision.TRAINED
        }
        self._trained_at: dict[str, str] = {}
        self.offsets: dict[int, array[int]] = {}
        """partition -> offsets of its records, ascending"""
        self.groups: dict[tuple[int, str], list[Member]] = {}
        """(transaction, trained group) -> rows decided there"""
        self.counts: Counter[str] = Counter()
        self._after_end: Counter[str] = Counter()
        self._pending = 0

    # ------------------------------------------------------------------ one record

    def add(self, entry: TrajectoryEntry) -> None:
        """Check one record of the log."""
        self.offsets.setdefault(entry.partition, array("q")).append(entry.offset)
        decided = self._waiting.pop(entry.key, None)
        self.counts["records"] += 1
        self.counts["rows"] += len(entry.rows)
        if entry.error is not None:
            self._unreadable(entry, decided)
            return
        if decided is None:
            self._undecided_rows(entry, list(entry.rows))
            return
        if decided.record:
            self._refused(entry, decided)
            return
        if len(decided.transactions()) > 1:
            self._findings.error(
                "G1.record_split",
                _place(entry.key),
                f"its rows are decided in transactions {sorted(decided.transactions())}",
            )
        missing = [row for row in entry.rows if row.row not in decided.rows]
        if missing:
            self._undecided_rows(entry, missing)
        for row in entry.rows:
            if row.row in decided.rows:
                self._row(entry, row, decided.rows.pop(row.row))
        for refs in decided.rows.values():
            self._without_row(refs, f"{_place(entry.key)} has {len(entry.rows)} rows")

    def _stands(self, key: RecordKey) -> str:
        """decided, pending or after_end: what the last Position says of the record."""
        partition, offset = key
        if offset < self._next.get(partition, 0):
            return "pending" if offset in self._undecided.get(partition, ()) else "decided"
        return "after_end" if self._index.ended is not None else "pending"

    def _undecided_rows(self, entry: TrajectoryEntry, rows: list[DecodedRow]) -> None:
        stands = self._stands(entry.key)
        if stands == "after_end":
            self._after_end["rows"] += len(rows)
            self._after_end["records"] += 1
            self.counts["rows_after_end"] += len(rows)
        elif stands == "pending":
            self._pending += len(rows)
        else:
            for row in rows:
                subject = row.trajectory_id or f"{_place(entry.key)} row {row.row}"
                self._findings.error(
                    "G1.trajectory_undecided", subject, f"{_place(entry.key)} row {row.row} has no first decision"
                )

    # ------------------------------------------------------------------ records that cannot be used

    def _unreadable(self, entry: TrajectoryEntry, decided: RecordDecisions | None) -> None:
        assert entry.error is not None
        self.counts["undecodable_records"] += 1
        if decided is not None and decided.rows:
            refuse_newer(str(entry.error), f"{self._index.run}.{_place(entry.key)}")
            for trajectory_id in decided.trajectory_ids():
                self._findings.error(
                    "G1.row_altered",
                    trajectory_id,
                    f"{_place(entry.key)} was decoded when it was decided, and now is not: {entry.error}",
                )
            return
        if decided is None or not decided.record:
            if self._stands(entry.key) == "decided":
                self._findings.error(
                    "G1.record_undecided", _place(entry.key), f"cannot be decoded ({entry.error}) and has no decision"
                )
            elif self._stands(entry.key) == "after_end":
                self._after_end["records"] += 1
            return
        self._record_decision(entry, decided)

    def _refused(self, entry: TrajectoryEntry, decided: RecordDecisions) -> None:
        """Decided as undecodable, and decodes here: another build, other limits, or other bytes."""
        for refs in decided.rows.values():
            self._findings.error(
                "G1.decided_twice",
                _place(entry.key),
                f"refused as a whole, and row {refs[0].decision.row} is decided too",
            )
        self.counts["refused_rows"] += len(entry.rows)
        if self._record_decision(entry, decided):
            self._findings.notice(
                "G1.refused_but_decodes",
                _place(entry.key),
                f"refused as {decided.record[0].decision.reason}; this reader decodes {len(entry.rows)} rows of it",
            )

    def _record_decision(self, entry: TrajectoryEntry, decided: RecordDecisions) -> bool:
        """One decision, and the bytes in deadletters. True when all is well."""
        place, refs = _place(entry.key), decided.record
        before = self._findings.occurrences.total()
        if len(refs) > 1:
            self._findings.error("G1.decided_twice", place, f"{len(refs)} decisions about this record")
        if not refs[0].decision.reason.startswith(INVALID_PREFIX):
            self._findings.error(
                "G1.decision_altered", place, f"a refused record with reason {refs[0].decision.reason!r}"
            )
        letter = self._index.dead_letters.get((self._index.trajectories_topic, *entry.key))
        if letter is None and self._gaps.touches(TopicName.DEADLETTERS):
            self._gaps.not_judged["dead letters"] += 1
        elif letter is None:
            self._findings.error("G1.dead_letter", place, "refused, but not in deadletters")
        elif letter.value_sha256 != entry.value_sha256:
            self._findings.error("G1.dead_letter", place, f"deadletters@{letter.offset} holds other bytes")
        return self._findings.occurrences.total() == before

    # ------------------------------------------------------------------ one row

    def _row(self, entry: TrajectoryEntry, row: DecodedRow, refs: list[Ref]) -> None:
        firsts = [ref for ref in refs if ref.decision.decision is not Decision.REPLAYED]
        trained = [ref for ref in firsts if ref.decision.decision is Decision.TRAINED]
        subject = row.trajectory_id or f"{_place(entry.key)} row {row.row}"
        if len(firsts) > 1:
            check = "G1.trained_twice" if len(trained) > 1 else "G1.decided_twice"
            where = [ref.transaction for ref in firsts]
            self._findings.error(
                check, subject, f"{_place(entry.key)} row {row.row} is decided in transactions {where}"
            )
        self._replays(subject, firsts, refs)
        if trained:
            self._once(subject, f"{_place(entry.key)} row {row.row}")
        for ref in refs:
            self._agrees(subject, entry, row, ref)

    def _once(self, trajectory_id: str, place: str) -> None:
        other = self._trained_at.setdefault(trajectory_id, place)
        if other != place:
            self._findings.error("G1.trained_twice", trajectory_id, f"trained from {other} and from {place}")

    def _replays(self, subject: str, firsts: list[Ref], refs: list[Ref]) -> None:
        replays = [ref for ref in refs if ref.decision.decision is Decision.REPLAYED]
        if not replays:
            return
        rules = self._rules(replays[0].transaction)
        uses = sorted(ref.decision.use_count for ref in replays)
        trained = any(ref.decision.decision is Decision.TRAINED for ref in firsts)
        if not trained or min(r.transaction for r in firsts) >= min(r.transaction for r in replays):
            self._findings.error("G1.replay", subject, "replayed without having been trained before")
        elif {ref.decision.advantage for ref in replays} != {firsts[0].decision.advantage}:
            self._findings.error("G1.replay", subject, "a replay has another advantage than the first use")
        elif uses != list(range(2, len(replays) + 2)):
            self._findings.error("G1.replay", subject, f"uses of the replays are {uses}")
        elif rules is not None and len(replays) > rules.max_use - 1:
            self._findings.error("G1.replay", subject, f"{len(replays)} replays, at most {rules.max_use - 1}")

    def _agrees(self, subject: str, entry: TrajectoryEntry, row: DecodedRow, ref: Ref) -> None:
        """The decision says what the log says."""
        decision, trajectory = ref.decision, row.trajectory
        version = _version(self._index, ref.transaction)
        if decision.row_sha256 != row.row_sha256:
            self._findings.error(
                "G1.row_altered",
                subject,
                f"{_place(entry.key)} row {row.row} hashes to {row.row_sha256[:12]}..., the decision in transaction "
                f"{ref.transaction} says {(decision.row_sha256 or '')[:12]}...",
                version=version,
            )
        for problem in _differences(decision, row):
            self._findings.error(
                "G1.decision_altered", subject, f"transaction {ref.transaction}: {problem}", version=version
            )
        for problem in _inconsistencies(decision, self._rules(ref.transaction)):
            self._findings.error(
                "G1.decision_altered", subject, f"transaction {ref.transaction}: {problem}", version=version
            )
        used = decision.decision is not Decision.DROPPED
        if used and trajectory is None:
            self._findings.error(
                "G1.trained_invalid", subject, f"trained, but it is invalid: {row.detail}", version=version
            )
        if trajectory is None:
            return
        group = (ref.transaction, decision.group_id or "")
        if group in self._trained_groups and decision.decision is not Decision.REPLAYED:
            member = Member(trajectory.index_in_group, trajectory.claim_id, trajectory.reward, decision)
            self.groups.setdefault(group, []).append(member)
        if used:
            self._judge(ref, trajectory)
        elif decision.reason == Reason.STALE:
            rules = self._rules(ref.transaction)
            if rules is not None and decision.policy_lag is not None and decision.policy_lag <= rules.max_lag:
                self._findings.error("G2.stale_but_fresh", subject, f"dropped as stale with lag {decision.policy_lag}")

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Decisions whose record never came; summaries."""
        for key, decided in sorted(self._waiting.items()):
            if self._gaps.covers(TopicName.TRAJECTORIES, *key):
                self._gaps.not_judged["decisions about rows"] += len(decided.rows) + len(decided.record)
                continue
            for ref in decided.record:
                self._without_row([ref], f"{_place(key)} is not in the log")
            for refs in decided.rows.values():
                self._without_row(refs, f"{_place(key)} is not in the log")
        if self._after_end:
            self._findings.notice(
                "G1.after_end",
                "trajectories",
                f"{self._after_end['rows']} rows in {self._after_end['records']} records behind the end of the run",
                rows=self._after_end["rows"],
            )
        if self._pending:
            self._findings.notice(
                "G1.open", "trajectories", f"{self._pending} rows are not decided yet", rows=self._pending
            )
        self._check_dead_letters()

    def _without_row(self, refs: list[Ref], words: str) -> None:
        for ref in refs:
            decision = ref.decision
            subject = decision.trajectory_id or f"trajectories[{decision.partition}]@{decision.offset}"
            self._findings.error(
                "G1.decision_without_row",
                subject,
                f"{decision.decision.value} in transaction {ref.transaction}, but {words}",
                version=_version(self._index, ref.transaction),
            )

    def _check_dead_letters(self) -> None:
        """A dead letter of a trajectories record comes with a decision."""
        for (name, partition, offset), letter in self._index.dead_letters.items():
            if name != self._index.trajectories_topic:
                continue
            decided = self._index.records.get((partition, offset))
            if decided is None or not decided.record:
                where = f"deadletters@{letter.offset}"
                words = f"trajectories[{partition}]@{offset} has no decision as a refused record"
                if self._index.ended is None:
                    self._findings.notice("G5.beyond_ledger", where, words)
                else:
                    self._findings.error("G1.dead_letter", where, words)


def _differences(decision: DecisionRow, row: DecodedRow) -> list[str]:
    """Where a decision tells something else than the log's row."""
    problems = []
    said: list[tuple[str, object, object]] = [
        ("trajectory_id", decision.trajectory_id or "", row.trajectory_id),
        ("group_id", decision.group_id or "", row.group_id),
    ]
    # Rows refused as invalid carry no values: the trainer did not trust any.
    if row.trajectory is not None and not decision.reason.startswith(INVALID_PREFIX):
        said.append(("reward", decision.reward, row.trajectory.reward))
        said.append(("completion_tokens", decision.completion_tokens, len(row.trajectory.token_ids)))
    for name, claimed, found in said:
        if claimed != found:
            problems.append(f"{name} is {claimed!r}, in the log {found!r}")
    return problems


def _inconsistencies(decision: DecisionRow, rules: AuditRules | None) -> list[str]:
    """Where a decision contradicts itself."""
    problems = []
    if decision.decision is Decision.DROPPED:
        if (decision.weight, decision.use_count, decision.advantage) != (0.0, 0, None):
            problems.append(
                f"dropped with weight {decision.weight}, use {decision.use_count}, advantage {decision.advantage}"
            )
        return problems
    first = decision.decision is Decision.TRAINED
    if (decision.use_count == 1) is not first or decision.use_count < 1:
        problems.append(f"{decision.decision.value} as use {decision.use_count}")
    if decision.policy_lag is None or decision.reward is None or decision.advantage is None:
        problems.append("trained without policy lag, reward or advantage")
    elif rules is not None and decision.weight != rules.weight(decision.policy_lag):
        problems.append(
            f"weight {decision.weight} at lag {decision.policy_lag}, expected {rules.weight(decision.policy_lag)}"
        )
    return problems


def _version(index: RunIndex, transaction: int) -> int | None:
    return getattr(index.transactions[transaction].control, "version_out", None)


def _place(key: RecordKey) -> str:
    return f"trajectories[{key[0]}]@{key[1]}"
