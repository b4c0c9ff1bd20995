"""The trace of a prompt: every time it was asked for, over all passes; what became of that, and its rewards."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from consumers.offline.outcomes import Outcome, outcome
from consumers.offline.run_log import RequestEntry, RunLog
from consumers.offline.trace.words import Trace, when
from consumers.offline.wholeness import readable_transactions
from schemas.errors import UsageError
from schemas.ids import parse_group_id
from schemas.ledger import Subject

BY_ID = "prompt:"
"""before a prompt id, where it could be taken for something else"""
_BY_NUMBER = re.compile(r"(?:[a-z0-9][a-z0-9-]*/)?p(\d{1,18})")


@dataclass(slots=True, kw_only=True)
class _Asked:
    """One attempt."""

    entry: RequestEntry | None = None
    decisions: list[Outcome] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    """what became of them"""
    rewards: list[float] = field(default_factory=list)
    failed: int = 0
    """rows whose reward failed"""
    versions: set[int] = field(default_factory=set)
    """that sampled it"""


def prompt_number(subject: str) -> int | None:
    """`run/p000017`, or `p17`: the prompt's index in the prompt source. None for anything else."""
    match = _BY_NUMBER.fullmatch(subject)
    return None if match is None else int(match.group(1))


def trace_prompt(run_log: RunLog, subject: str, *, number: int | None) -> Trace:
    """By its index in the source, or else by its prompt id. UsageError when it was never asked for."""
    prompt_id = subject.removeprefix(BY_ID)
    asked: dict[tuple[int, int, int], _Asked] = {}
    numbers: set[int] = set() if number is None else {number}
    for entry in run_log.requests():
        if entry.request is None:
            continue
        key = parse_group_id(entry.request.group_id)
        if key.prompt == number or (number is None and entry.request.prompt_id == prompt_id):
            numbers.add(key.prompt)
            asked.setdefault((key.prompt, key.epoch, key.attempt), _Asked()).entry = entry
    _add_decisions(run_log, numbers, asked)
    _add_rows(run_log, numbers, asked)
    if not asked:
        raise UsageError(f"{subject}: run {run_log.run} never asked for such a prompt")
    ordered = sorted(asked.items(), key=lambda one: (one[0][1], one[0][2], one[0][0]))
    attempts = [_facts(run_log.run, key, found) for key, found in ordered]
    request = next((found.entry.request for _, found in ordered if found.entry and found.entry.request), None)
    facts = {
        "prompt": sorted(numbers),
        "prompt_id": None if request is None else request.prompt_id,
        "task": None if request is None else request.task,
        "prompt_text": None if request is None else request.prompt_text,
        "attempts": attempts,
    }
    lines = [
        "its requests are not in the log"
        if request is None
        else f"prompt {request.prompt_id} of task {request.task}: {request.prompt_text!r}",
        f"asked for {len(attempts)} times in {len({key[1] for key in asked})} passes",
        *(line for attempt in attempts for line in _lines(attempt)),
    ]
    return Trace(kind="prompt", subject=subject, facts=facts, lines=tuple(lines))


def _add_decisions(run_log: RunLog, numbers: set[int], asked: dict[tuple[int, int, int], _Asked]) -> None:
    for transaction in readable_transactions(run_log):
        for row in transaction.decisions:
            if row.group_id is None or row.subject is Subject.RECORD:
                continue
            key = _key(row.group_id)
            if key is None or key[0] not in numbers:
                continue
            found = asked.setdefault(key, _Asked())
            if row.subject is Subject.GROUP:
                found.decisions.append(outcome(transaction, row))
            else:
                found.rows[row.reason or row.decision.value] += 1


def _add_rows(run_log: RunLog, numbers: set[int], asked: dict[tuple[int, int, int], _Asked]) -> None:
    """Only records of the prompt are decoded: their key says whose they are."""
    wanted: defaultdict[str, list[_Asked]] = defaultdict(list)
    for (prompt, epoch, attempt), found in asked.items():
        wanted[f"{run_log.run}/p{prompt:06d}/e{epoch}/a{attempt}"].append(found)
    for entry in run_log.trajectories(group_ids=frozenset(wanted)):
        for row in entry.rows:
            for found in wanted.get(row.group_id, ()):
                if row.trajectory is None:
                    continue
                found.versions |= {segment.version for segment in row.trajectory.segments}
                if row.trajectory.reward is None:
                    found.failed += 1
                else:
                    found.rewards.append(row.trajectory.reward)


def _key(group_id: str) -> tuple[int, int, int] | None:
    try:
        key = parse_group_id(group_id)
    except ValueError:
        return None
    return key.prompt, key.epoch, key.attempt


def _facts(run: str, key: tuple[int, int, int], found: _Asked) -> dict[str, Any]:
    request = None if found.entry is None else found.entry.request
    rewards = found.rewards
    return {
        "group_id": f"{run}/p{key[0]:06d}/e{key[1]}/a{key[2]}",
        "epoch": key[1],
        "attempt": key[2],
        "position": None if request is None else request.request_position,
        "issued_at_us": None if request is None else request.issued_at_us,
        "decisions": [
            {
                "decision": one.decision.decision.value,
                "reason": one.decision.reason,
                "detail": one.decision.detail,
                "version": one.version,
                "decided_at_us": one.decision.consumed_at_us,
            }
            for one in found.decisions
        ],
        "rows": dict(found.rows),
        "sampled_by_versions": sorted(found.versions),
        "rewards": rewards,
        "rewards_failed": found.failed,
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
    }


def _lines(attempt: dict[str, Any]) -> list[str]:
    issued = "its request is not in the log"
    if attempt["issued_at_us"] is not None:
        issued = f"request {attempt['position']}, {when(attempt['issued_at_us'])}"
    decided = "; ".join(_decided(one) for one in attempt["decisions"]) or "not decided"
    lines = [f"pass {attempt['epoch']}, attempt {attempt['attempt']} ({attempt['group_id']}): {issued}; {decided}"]
    if attempt["rewards"] or attempt["rewards_failed"]:
        rewards = ", ".join(f"{reward:g}" for reward in attempt["rewards"])
        mean = "" if attempt["mean_reward"] is None else f", mean {attempt['mean_reward']:.3g}"
        failed = f", {attempt['rewards_failed']} failed" if attempt["rewards_failed"] else ""
        versions = ", ".join(map(str, attempt["sampled_by_versions"]))
        lines.append(f"  rewards {rewards}{mean}{failed}; sampled by version {versions}")
    return lines


def _decided(one: dict[str, Any]) -> str:
    if one["decision"] == "dropped":
        return f"dropped: {one['reason']}" + (f" ({one['detail']})" if one["detail"] else "")
    return f"{one['decision']} into version {one['version']}"
