"""How many groups to ask for, and for which step each is meant. Requests are issued only by these rules.

Invariant: usable + outstanding groups = (run_ahead + 1) x groups_per_step, bounded by what the run still
needs; so usable + outstanding >= groups_per_step until the last step. A slot is freed exactly once, by
removing the group from the open set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingRules:
    """Fixed for a run."""

    groups_per_step: int
    run_ahead: int
    """training steps generation may run ahead; <= max_lag"""
    last_step: int
    """depth of the last version to train"""


def requests_to_issue(open_groups: int, depth: int, rules: PacingRules) -> int:
    """How many new requests keep the invariant; `depth` is that of the newest version in the transaction.

    Args: open_groups: issued and undecided groups, usable and outstanding alike.
    """
    wanted = (rules.run_ahead + 1) * rules.groups_per_step
    still_needed = max(0, rules.last_step - depth) * rules.groups_per_step
    return max(0, min(wanted, still_needed) - open_groups)


def intended_step(open_steps: Iterable[int], depth: int, rules: PacingRules) -> int:
    """Depth of the weights a new request is meant to update: the first step that is not full yet.

    Args: open_steps: intended steps of the open groups; overdue ones count for the step at hand.
    """
    full = Counter(max(step, depth) for step in open_steps)
    step = depth
    while full[step] >= rules.groups_per_step:
        step += 1
    return step


def min_depth(step: int, newest_depth: int, rules: PacingRules) -> int:
    """Depth a worker should hold before it takes the request: never above the newest committed version.

    With max_lag in the place of run_ahead workers would start on the old version, because requests commit together
    with VersionPublished, and every batch would be as old as allowed.
    """
    return max(0, min(step - rules.run_ahead, newest_depth))


def fallback_depth(step: int, max_lag: int) -> int:
    """Depth a worker must hold to take the request after a short wait."""
    return max(0, step - max_lag)
