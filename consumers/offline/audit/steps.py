"""G5: what was committed together agrees, and each transaction follows from the one before it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from consumers.offline.audit.gaps import Gaps
from consumers.offline.audit.index import Issued, RunIndex
from consumers.offline.audit.report import Findings
from consumers.offline.run_log import LedgerTransaction
from schemas import policy_events as ev
from schemas.ledger import (
    Decision,
    LedgerEnded,
    PartitionProgress,
    Position,
    StepCompleted,
    Subject,
)
from schemas.row_hash import batch_digest
from schemas.topics import TopicName

Published = dict[int, tuple[int, ev.VersionPublished]]
"""version -> (policy offset, its legal event)"""


def check_steps(index: RunIndex, findings: Findings) -> None:
    """Counts and digest of each step, and its order on the parent chain."""
    published: Published = {
        entry.event.version: (entry.offset, entry.event)
        for entry in index.policy
        if entry.is_legal and isinstance(entry.event, ev.VersionPublished)
    }
    made: dict[int, int] = {}
    read_up_to = 0
    for transaction, step in index.steps():
        version, number = step.version_out, transaction.number
        check_counts(transaction, step, findings)
        problems = _step_problems(step, published) if version in published else []
        if version in made:
            problems.append(f"made in transaction {made[version]} and again in {number}")
        elif made and version <= max(made):
            problems.append(f"comes after version {max(made)} in the ledger")
        if step.policy_read_up_to < read_up_to:
            problems.append(f"read policy up to {step.policy_read_up_to}, an earlier step up to {read_up_to}")
        for problem in problems:
            findings.error("G5.step_order", f"version {version}", problem, version=version)
        if version not in published:
            problem = f"transaction {number} has no VersionPublished"
            findings.error("G5.step_without_version", f"version {version}", problem, version=version)
        made.setdefault(version, number)
        read_up_to = max(read_up_to, step.policy_read_up_to)
    _check_versions_have_steps(index, published, made, findings)
    for transaction in index.transactions:
        if transaction.control is not None and not isinstance(transaction.control, StepCompleted):
            _check_trains_nothing(transaction, findings)


def check_counts(transaction: LedgerTransaction, step: StepCompleted, findings: Findings) -> None:
    """What StepCompleted says of its batch against the decisions beside it."""
    used = [
        row
        for row in transaction.decisions
        if row.subject is Subject.TRAJECTORY and row.decision in (Decision.TRAINED, Decision.REPLAYED)
    ]
    groups = len({row.group_id for row in used if row.decision is Decision.TRAINED})  # replayed ones count as rows only
    version, subject = step.version_out, f"version {step.version_out}"
    for name, said, found in (("trajectories", step.trajectories, len(used)), ("groups", step.groups, groups)):
        if said != found:
            problem = f"says {said} {name}, its decisions have {found}"
            findings.error("G5.step_counts", subject, problem, version=version)
    digest = batch_digest(row.row_sha256 or "" for row in used)
    if digest != step.batch_digest:
        problem = f"batch digest {step.batch_digest[:12]}..., over its {len(used)} trained rows it is {digest[:12]}..."
        findings.error("G5.batch_digest", subject, problem, version=version)


def _step_problems(step: StepCompleted, published: Published) -> list[str]:
    offset, event = published[step.version_out]
    base = published.get(step.version_in)
    problems = []
    if event.parent != step.version_in:
        problems.append(f"trained from version {step.version_in}, published with parent {event.parent}")
    if base is None or base[0] >= step.policy_read_up_to:
        problems.append(f"trained from version {step.version_in}, which the trainer had not read")
    if offset < step.policy_read_up_to:
        problems.append(f"policy was read up to {step.policy_read_up_to}, behind its own event at {offset}")
    return problems


def _check_trains_nothing(transaction: LedgerTransaction, findings: Findings) -> None:
    for row in transaction.decisions:
        if row.decision is not Decision.DROPPED:
            findings.error(
                "G5.step_counts",
                str(row.trajectory_id or row.group_id),
                f"{row.decision.value} in transaction {transaction.number}, which makes no version",
                transaction=transaction.number,
            )


def _check_versions_have_steps(
    index: RunIndex, published: Published, made: Mapping[int, int], findings: Findings
) -> None:
    newest = max(published, default=0)
    for version, (_, event) in sorted(published.items()):
        if version in made or event.parent is None:
            continue
        if event.parent in published and event.depth == published[event.parent][1].depth:
            continue  # a branch start: the same weights under a new number
        subject = f"version {version}"
        if version == newest and index.ended is None:
            words = "published by a transaction that the ledger read does not show yet"
            findings.notice("G5.beyond_ledger", subject, words, version=version)
        else:
            words = "published, but no StepCompleted made it"
            findings.error("G5.version_without_step", subject, words, version=version)


# ---------------------------------------------------------------------- positions


def check_positions(index: RunIndex, log_offsets: Mapping[int, Sequence[int]], findings: Findings, gaps: Gaps) -> None:
    """Position k+1 = Position k, less what was decided, plus what was issued and read.

    `log_offsets`: partition -> offsets of the trajectories records, ascending."""
    by_position = {issued.position: issued for issued in index.issued.values()}
    before = Position(open_groups=(), next_request=0, prompt_cursor=0, partitions={})
    for transaction in index.transactions:
        if transaction.control is None:
            continue
        after = transaction.control.position
        where = f"transaction {transaction.number}"
        if any(n in gaps.lost_requests for n in range(before.next_request, after.next_request)):
            gaps.not_judged["open sets after requests that are gone"] += 1
        else:
            for problem in _group_problems(before, after, transaction, by_position):
                findings.error("G5.position", where, problem, transaction=transaction.number)
        for problem in _partition_problems(before, after, transaction, log_offsets, gaps):
            findings.error("G5.position", where, problem, transaction=transaction.number)
        before = after


def _group_problems(
    before: Position, after: Position, transaction: LedgerTransaction, by_position: Mapping[int, Issued]
) -> list[str]:
    if after.next_request < before.next_request:
        return [f"next_request goes back from {before.next_request} to {after.next_request}"]
    problems = []
    decided = {row.group_id for row in transaction.decisions if row.subject is Subject.GROUP}
    opened = {group.group_id for group in before.open_groups}
    for group_id in sorted(str(g) for g in decided - opened):
        problems.append(f"group {group_id} is decided but was not open")
    issued = [by_position[n] for n in range(before.next_request, after.next_request) if n in by_position]
    expected = (opened - decided) | {entry.group_id for entry in issued}
    found = {group.group_id for group in after.open_groups}
    for group_id in sorted(expected - found):
        problems.append(f"group {group_id} left the open set without a decision")
    for group_id in sorted(found - expected):
        problems.append(f"group {group_id} is in the open set without being issued, or although it was decided")
    fresh = sum(1 for entry in issued if entry.attempt == 0)
    if after.prompt_cursor != before.prompt_cursor + fresh:
        problems.append(
            f"prompt_cursor goes from {before.prompt_cursor} to {after.prompt_cursor}; {fresh} fresh prompts are issued"
        )
    return problems


def _partition_problems(
    before: Position,
    after: Position,
    transaction: LedgerTransaction,
    log_offsets: Mapping[int, Sequence[int]],
    gaps: Gaps,
) -> list[str]:
    problems = []
    decided: dict[int, set[int]] = {}
    for row in transaction.decisions:
        if row.partition is not None and row.offset is not None and row.decision is not Decision.REPLAYED:
            decided.setdefault(row.partition, set()).add(row.offset)
    for partition in sorted(before.partitions.keys() | after.partitions.keys() | decided.keys()):
        old = before.partitions.get(partition, PartitionProgress(next_offset=0))
        new = after.partitions.get(partition, PartitionProgress(next_offset=0))
        name = f"trajectories[{partition}]"
        if new.next_offset < old.next_offset:
            problems.append(f"{name}: next_offset goes back from {old.next_offset} to {new.next_offset}")
            continue
        offsets = log_offsets.get(partition, ())
        read = offsets[bisect_left(offsets, old.next_offset) : bisect_left(offsets, new.next_offset)]

        def seen(found: Iterable[int], partition: int = partition) -> set[int]:
            return {offset for offset in found if not gaps.covers(TopicName.TRAJECTORIES, partition, offset)}

        held = seen(old.undecided) | set(read)
        here = seen(decided.get(partition, ()))
        for offset in sorted(here - held):
            problems.append(f"{name}@{offset} is decided, but was decided before or not read")
        expected = held - here
        for offset in sorted(expected - set(new.undecided)):
            problems.append(f"{name}@{offset} left the position without a decision")
        for offset in sorted(seen(new.undecided) - expected):
            problems.append(f"{name}@{offset} is listed as undecided, but was decided or is not in the log")
    return problems


# ---------------------------------------------------------------------- the run as a whole


def check_run(index: RunIndex, findings: Findings) -> None:
    """Begin, end and configuration of the run."""
    ended = index.ended
    tail_is_open = ended is None and index.fold.ended
    if ended is not None and not index.fold.ended:
        findings.error("G5.run_end", f"run {index.run}", "the ledger has RunEnded, policy has not")
    elif tail_is_open:
        findings.notice(
            "G5.beyond_ledger", f"run {index.run}", "policy has RunEnded, the ledger read does not show it yet"
        )
    for transaction in index.transactions:
        if isinstance(transaction.control, LedgerEnded):
            _check_end(index, transaction, transaction.control, findings)
    digests: set[str] = set()
    for entry in index.policy:
        if entry.is_legal and isinstance(entry.event, ev.RunStarted):
            digests.add(entry.event.config_digest)
    for _, step in index.steps():
        if step.config_digest not in digests:
            words = f"trained under config {step.config_digest[:12]}, which no RunStarted names"
            findings.notice("G5.config", f"version {step.version_out}", words, version=step.version_out)


def _check_end(index: RunIndex, transaction: LedgerTransaction, control: LedgerEnded, findings: Findings) -> None:
    where = f"transaction {transaction.number}"
    for group in control.position.open_groups:
        findings.error("G5.run_end", group.group_id, f"still open at the end of the run ({where})")
    for partition, progress in control.position.partitions.items():
        for offset in progress.undecided:
            findings.error(
                "G5.run_end", f"trajectories[{partition}]@{offset}", f"undecided at the end of the run ({where})"
            )
    if control is index.ended and control.last_version != index.fold.newest:
        findings.error(
            "G5.run_end", where, f"the ledger ends with version {control.last_version}, policy with {index.fold.newest}"
        )
