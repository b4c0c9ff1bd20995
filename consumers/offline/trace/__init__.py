"""`trace`: the whole life of one trajectory, group, prompt, version or worker, from the log alone.

A subject is told by its shape: `run/p../e../a../i` a trajectory, without the last part a group, `run/p..` or `p..` a
prompt, a number a version; anything else is a worker, or else a prompt id. Reads the topics it needs once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from consumers.offline.export.ranges import missing_ranges
from consumers.offline.outcomes import Outcome, outcome
from consumers.offline.run_log import PolicyEntry, RequestEntry, RunLog, TrajectoryEntry
from consumers.offline.trace.policy import trace_version, trace_worker
from consumers.offline.trace.prompt import BY_ID, prompt_number, trace_prompt
from consumers.offline.trace.words import Trace, facts_of_request, proof_facts, request_lines, seconds, when
from consumers.offline.wholeness import readable_transactions, require_policy_and_ledger
from schemas.errors import UsageError
from schemas.ids import GroupId, parse_group_id, parse_trajectory_id
from schemas.ledger import Decision, Subject
from schemas.topics import TopicName
from schemas.trajectory import DecodedRow, Trajectory

__all__ = ["Trace", "trace"]


def trace(run_log: RunLog, subject: str) -> Trace:
    """Everything the log knows about it. UsageError when it knows nothing; what retention removed is told with it."""
    require_policy_and_ledger(run_log)
    found = _trace(run_log, subject)
    missing = [gap.words for gap in missing_ranges(run_log, (TopicName.PROMPTS, TopicName.TRAJECTORIES), None)]
    if not missing:
        return found
    lines = (*found.lines, *(f"note: {words}" for words in missing))
    return replace(found, facts={**found.facts, "missing": missing}, lines=lines)


def _trace(run_log: RunLog, subject: str) -> Trace:
    if subject.isdecimal():
        return trace_version(run_log, int(subject))
    number = prompt_number(subject)
    if number is not None or subject.startswith(BY_ID):
        return trace_prompt(run_log, subject, number=number)
    group_id, is_group = _group_of(subject)
    if group_id is None:
        return trace_worker(run_log, subject) or trace_prompt(run_log, subject, number=None)
    return _trace_group(run_log, group_id) if is_group else _trace_trajectory(run_log, subject, group_id)


def _group_of(subject: str) -> tuple[GroupId | None, bool]:
    """The group that it is, or belongs to."""
    try:
        parse_group_id(subject)
    except ValueError:
        try:
            return parse_trajectory_id(subject)[0], False
        except ValueError:
            return None, False
    return GroupId(subject), True


# ---------------------------------------------------------------------- a trajectory


def _trace_trajectory(run_log: RunLog, trajectory_id: str, group_id: str) -> Trace:
    request = _request(run_log, group_id)
    policy = {entry.offset: entry for entry in run_log.policy()}
    outcomes: dict[tuple[int | None, int | None, int | None], list[Outcome]] = {}
    for transaction in readable_transactions(run_log):
        for row in transaction.decisions:
            if row.trajectory_id == trajectory_id:
                outcomes.setdefault((row.partition, row.offset, row.row), []).append(outcome(transaction, row))
    entries = list(run_log.trajectories(group_ids=[group_id]))
    found = [(e, decoded) for e in entries for decoded in e.rows if decoded.trajectory_id == trajectory_id]
    if request is None and not found and not outcomes:
        raise UsageError(f"{trajectory_id}: run {run_log.run} has no such trajectory, request or decision")
    lines = [*request_lines(request)]
    copies = []
    for entry, decoded in found:
        mine = outcomes.pop((entry.partition, entry.offset, decoded.row), [])
        row_facts, words = _row(entry, decoded, mine, policy)
        copies.append(row_facts)
        lines += words
    for entry in entries:
        lines += _unreadable(entry)
    if not found:
        lines.append("no row of it is in the log")
    for strays in outcomes.values():
        lines += [f"decided without a row in the log: {stray.words}" for stray in strays]
    facts = {"request": facts_of_request(request), "rows": copies}
    return Trace(kind="trajectory", subject=trajectory_id, facts=facts, lines=tuple(lines))


def _unreadable(entry: TrajectoryEntry) -> list[str]:
    """A record with the key of the group that says nothing here: damaged, or of a newer build."""
    if entry.error is None:
        return []
    return [f"trajectories[{entry.partition}]@{entry.offset} cannot be read: {entry.error}"]


def _row(
    entry: TrajectoryEntry, row: DecodedRow, outcomes: list[Outcome], policy: dict[int, PolicyEntry]
) -> tuple[dict[str, Any], list[str]]:
    place = f"trajectories[{entry.partition}]@{entry.offset} row {row.row}"
    facts: dict[str, Any] = {
        "partition": entry.partition,
        "offset": entry.offset,
        "row": row.row,
        "row_sha256": row.row_sha256,
        "appended_at_ms": entry.appended_at_ms,
        "problem": row.detail,
    }
    lines = []
    if row.trajectory is not None:
        more, words = _sampled(row.trajectory, policy)
        facts |= more
        lines += words
    lines.append(f"in the log: {place}, appended {when(entry.appended_at_ms * 1000)}")
    if row.code:
        lines.append(f"  refused: {row.code}: {row.detail}")
    facts["decisions"] = [_outcome_facts(found, row.trajectory) for found in outcomes]
    for found in outcomes:
        lines += _outcome_lines(found, row.trajectory)
    if not outcomes:
        lines.append("not decided")
    return facts, lines


def _sampled(t: Trajectory, policy: dict[int, PolicyEntry]) -> tuple[dict[str, Any], list[str]]:
    proofs = [proof_facts(segment.proof, policy.get(segment.proof)) for segment in t.segments]
    segments = [
        {"version": segment.version, "tokens": segment.length, "proof": proof}
        for segment, proof in zip(t.segments, proofs, strict=True)
    ]
    facts: dict[str, Any] = {
        "worker": t.worker_id,
        "incarnation": t.incarnation,
        "claim": t.claim_id,
        "prompt_tokens": len(t.prompt_token_ids),
        "completion_tokens": len(t.token_ids),
        "segments": segments,
        "reward": t.reward,
        "reward_error": t.reward_error,
        "finish_reason": t.finish_reason,
        "started_at_us": t.started_at_us,
        "finished_at_us": t.finished_at_us,
        "text": t.text,
    }
    lines = [
        f"claimed by worker {t.worker_id}, incarnation {t.incarnation} (claim {t.claim_id})",
        f"sampled {when(t.started_at_us)} to {when(t.finished_at_us)}: {len(t.token_ids)} tokens, {t.finish_reason}",
    ]
    for segment, proof in zip(t.segments, proofs, strict=True):
        lines.append(f"  {segment.length} tokens under version {segment.version}; {proof['words']}")
    reward = f"failed: {t.reward_error}" if t.reward is None else f"{t.reward:g}"
    lines.append(f"reward {reward} by {t.reward_function}")
    return facts, lines


def _outcome_facts(found: Outcome, t: Trajectory | None) -> dict[str, Any]:
    row = found.decision
    return {
        "decision": row.decision.value,
        "reason": row.reason,
        "detail": row.detail,
        "policy_lag": row.policy_lag,
        "weight": row.weight,
        "advantage": row.advantage,
        "use_count": row.use_count,
        "version": found.version,
        "transaction": found.transaction,
        "ledger_offset": found.ledger_offset,
        "consumed_at_us": row.consumed_at_us,
        "age_s": None if t is None else (row.consumed_at_us - t.finished_at_us) / 1e6,
    }


def _outcome_lines(found: Outcome, t: Trajectory | None) -> list[str]:
    row = found.decision
    lag = "lag not judged" if row.policy_lag is None else f"lag {row.policy_lag}"
    lines = [f"{found.words}, {when(row.consumed_at_us)} ({lag}; ledger@{found.ledger_offset})"]
    if row.decision is not Decision.DROPPED:
        lines.append(f"  weight {row.weight:g}, advantage {row.advantage}, use {row.use_count}")
    if t is not None:
        lines.append(f"  {seconds(row.consumed_at_us - t.finished_at_us)} from sampled to consumed")
    return lines


# ---------------------------------------------------------------------- a group


def _trace_group(run_log: RunLog, group_id: GroupId) -> Trace:
    request = _request(run_log, group_id)
    decisions: list[Outcome] = []
    by_row: dict[tuple[int | None, int | None, int | None], Outcome] = {}
    for transaction in readable_transactions(run_log):
        for row in transaction.decisions:
            if row.group_id != group_id:
                continue
            if row.subject is Subject.GROUP:
                decisions.append(outcome(transaction, row))
            else:
                by_row[row.partition, row.offset, row.row] = outcome(transaction, row)
    members: list[dict[str, Any]] = []
    lines = [*request_lines(request)]
    for entry in run_log.trajectories(group_ids=[group_id]):
        lines += _unreadable(entry)
        for decoded in entry.rows:
            if decoded.group_id != group_id:
                continue
            found = by_row.get((entry.partition, entry.offset, decoded.row))
            t = decoded.trajectory
            words = "not decided" if found is None else found.words
            members.append(
                {
                    "trajectory_id": decoded.trajectory_id,
                    "partition": entry.partition,
                    "offset": entry.offset,
                    "claim": None if t is None else t.claim_id,
                    "versions": [] if t is None else [s.version for s in t.segments],
                    "reward": None if t is None else t.reward,
                    "outcome": words,
                }
            )
            reward = "invalid" if t is None else f"reward {t.reward}"
            lines.append(
                f"{decoded.trajectory_id} at trajectories[{entry.partition}]@{entry.offset}: {reward}; {words}"
            )
    if request is None and not decisions and not members:
        raise UsageError(f"{group_id}: run {run_log.run} never issued such a group")
    if not members:
        lines.append("no row of it is in the log")
    for found in decisions:
        lines.append(
            f"the group is {found.words}, {when(found.decision.consumed_at_us)} (ledger@{found.ledger_offset})"
        )
    if not decisions:
        lines.append("the group is not decided")
    facts = {
        "request": facts_of_request(request),
        "rows": members,
        "decisions": [_outcome_facts(found, None) for found in decisions],
    }
    return Trace(kind="group", subject=group_id, facts=facts, lines=tuple(lines))


def _request(run_log: RunLog, group_id: str) -> RequestEntry | None:
    for entry in run_log.requests():
        if entry.request is not None and entry.request.group_id == group_id:
            return entry
    return None
