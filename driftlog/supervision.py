"""What to do when a supervised process ends. Pure.

A service that died is started again, a few times in a while; one that was told its configuration is wrong, or
that a newer process took over, never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from infra.runner import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """How often one service may die."""

    restarts: int = 5
    window_s: float = 600.0
    first_wait_s: float = 0.25
    longest_wait_s: float = 5.0


class Verdict(StrEnum):
    """What follows from an exit."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give_up"
    """it died too often"""
    USAGE = "usage"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict, and for a restart how long to wait first."""

    verdict: Verdict
    wait_s: float = 0.0


def after_exit(code: int, deaths_s: Sequence[float], now_s: float, rules: RestartRules) -> Decision:
    """Judge an exit code (negative: killed by that signal).

    Args: deaths_s: when this service died before, without this time.
    """
    if code == ExitCode.OK:
        return Decision(verdict=Verdict.DONE)
    if code == ExitCode.USAGE:
        return Decision(verdict=Verdict.USAGE)
    if code == ExitCode.FENCED:
        return Decision(verdict=Verdict.FENCED)
    recent = sum(1 for death_s in deaths_s if death_s > now_s - rules.window_s)
    if recent >= rules.restarts:
        return Decision(verdict=Verdict.GIVE_UP)
    return Decision(verdict=Verdict.RESTART, wait_s=min(rules.longest_wait_s, rules.first_wait_s * 2.0**recent))
