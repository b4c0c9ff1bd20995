"""Prompts that were asked for, dropped, and not asked for again: given up. From the ledger alone.

Not among them: groups without a difference to learn from (zero_variance, by the filter) and what the end of the run
cut off. Bounded by the prompts that are dropped and not trained.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from consumers.offline.run_log import LedgerTransaction, RunLog
from schemas.ids import parse_group_id
from schemas.ledger import Decision, Reason, Subject

_NO_ATTEMPT = frozenset({Reason.ZERO_VARIANCE.value, Reason.RUN_ENDED.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One time a prompt was asked for in vain."""

    group_id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverTrained:
    """One prompt in one pass over the prompts."""

    prompt: int
    """index in the prompt source"""
    epoch: int
    attempts: tuple[Attempt, ...]

    @property
    def words(self) -> str:
        """For a person."""
        tries = "; ".join(f"{a.group_id}: {a.reason}" + (f" ({a.detail})" if a.detail else "") for a in self.attempts)
        count = len(self.attempts)
        return f"prompt {self.prompt}, pass {self.epoch}, {count} attempt{'' if count == 1 else 's'}: {tries}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class NeverTrainedPrompts:
    """Feed it the transactions in order."""

    def __init__(self) -> None:
        self._dropped: dict[tuple[int, int], list[Attempt]] = {}
        self._open: set[tuple[int, int]] = set()

    def add(self, transaction: LedgerTransaction) -> None:
        """Count one transaction."""
        for row in transaction.decisions:
            if row.subject is not Subject.GROUP or row.group_id is None:
                continue
            key = _prompt(row.group_id)
            if row.decision is not Decision.DROPPED or row.reason in _NO_ATTEMPT:
                self._dropped.pop(key, None)
            else:
                attempt = Attempt(group_id=row.group_id, reason=row.reason, detail=row.detail)
                self._dropped.setdefault(key, []).append(attempt)
        if transaction.control is not None:
            self._open = {_prompt(group.group_id) for group in transaction.control.position.open_groups}

    def found(self) -> list[NeverTrained]:
        """Those that were given up, in order of prompts."""
        return [
            NeverTrained(prompt=prompt, epoch=epoch, attempts=tuple(attempts))
            for (prompt, epoch), attempts in sorted(self._dropped.items())
            if (prompt, epoch) not in self._open
        ]


def never_trained(run_log: RunLog) -> list[NeverTrained]:
    """Of a whole run."""
    prompts = NeverTrainedPrompts()
    for transaction in run_log.transactions():
        prompts.add(transaction)
    return prompts.found()


def _prompt(group_id: str) -> tuple[int, int]:
    key = parse_group_id(group_id)
    return key.prompt, key.epoch
