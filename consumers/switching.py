"""What the coordinator decides, as a function over values: open a switch, activate, fail, admit, expire, retire.

Never activates without every remaining required worker's proof; the fold would void it anyway (G4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schemas import policy_events as ev
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Standing, VersionStatus, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRules:
    """Fixed for a run."""

    run: str
    mode: ev.SwitchMode
    switch_deadline_s: float
    keep: int | Literal["all"]
    """versions whose weights are kept, newest first, besides the protected ones"""
    min_workers: int = 1
    """joined workers to wait for before the very first switch (a start-up nicety, bounded by first_wait_s)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSeen:
    """A worker's last heartbeat, for the record of its expiry."""

    at_us: int | None
    offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Judged time-outs: only what is certain after reading up to an end taken after the deadline."""

    expired: Mapping[WorkerKey, LastSeen]
    """workers whose lease ran out"""
    switch_deadline_passed: bool
    may_open: bool
    """back-off after a failed switch is over, and the first wait for workers too"""


def decide(
    fold: PolicyFold, timeouts: Timeouts, rules: SwitchRules, new_switch_id: str, now_us: int
) -> list[ev.AnyPolicyEvent]:
    """The next events, to be written in one transaction. The caller reads them back before it decides again."""
    if fold.segment is None or fold.ended:
        return []
    expiries = _expiries(fold, timeouts, rules, now_us)
    if expiries:
        return expiries
    if fold.switch is not None:
        ended = _end_switch(fold, rules, now_us)
        if ended is not None:
            return [ended]
    admissions = _admissions(fold, rules, now_us)
    if admissions:
        return admissions
    if fold.switch is None and timeouts.may_open:
        opened = _open_switch(fold, rules, new_switch_id, now_us)
        if opened is not None:
            return [opened]
    return _retirements(fold, rules, now_us)


def _expiries(fold: PolicyFold, timeouts: Timeouts, rules: SwitchRules, now_us: int) -> list[ev.AnyPolicyEvent]:
    events: list[ev.AnyPolicyEvent] = []
    for key, seen in sorted(timeouts.expired.items()):
        if fold.is_current(key):
            events.append(_expired(key, "lease", seen, rules, now_us))
    if timeouts.switch_deadline_passed and fold.switch is not None:
        for key in sorted(fold.switch.waiting_for - timeouts.expired.keys()):
            events.append(_expired(key, "switch_deadline", LastSeen(at_us=None, offset=None), rules, now_us))
    return events


def _expired(
    key: WorkerKey, reason: ev.ExpiryReason, seen: LastSeen, rules: SwitchRules, now_us: int
) -> ev.WorkerExpired:
    return ev.WorkerExpired(
        run=rules.run,
        at_us=now_us,
        worker=key[0],
        incarnation=key[1],
        reason=reason,
        last_heartbeat_at_us=seen.at_us,
        last_heartbeat_offset=seen.offset,
    )


def _end_switch(fold: PolicyFold, rules: SwitchRules, now_us: int) -> ev.AnyPolicyEvent | None:
    switch = fold.switch
    assert switch is not None
    if not switch.remaining:
        reasons = "; ".join(f"{w}/{i}: {why}" for (w, i), why in sorted(switch.out.items()))
        return ev.VersionFailed(
            run=rules.run,
            at_us=now_us,
            switch=switch.event.switch,
            version=switch.event.version,
            reason=f"no worker left: {reasons}",
        )
    if switch.waiting_for:
        return None
    return ev.VersionActivated(
        run=rules.run,
        at_us=now_us,
        switch=switch.event.switch,
        version=switch.event.version,
        acks=tuple(sorted(switch.acks.values())),
    )


def _admissions(fold: PolicyFold, rules: SwitchRules, now_us: int) -> list[ev.AnyPolicyEvent]:
    return [
        ev.WorkerAdmitted(
            run=rules.run,
            at_us=now_us,
            worker=name,
            incarnation=state.incarnation,
            version=state.late_ack[0],
            ack=state.late_ack[1],
        )
        for name, state in sorted(fold.workers.items())
        if state.standing is Standing.JOINED and state.late_ack is not None
    ]


def _open_switch(fold: PolicyFold, rules: SwitchRules, switch_id: str, now_us: int) -> ev.SwitchStarted | None:
    """Switch to the newest published version; versions in between are jumped over."""
    if fold.newest is None or (fold.live is not None and fold.newest <= fold.live):
        return None
    wanted = Standing.JOINED if fold.live is None else Standing.ADMITTED
    required = sorted(fold.with_standing(wanted) | fold.with_standing(Standing.ADMITTED))
    if not required:
        return None
    return ev.SwitchStarted(
        run=rules.run,
        at_us=now_us,
        switch=switch_id,
        version=fold.newest,
        mode=rules.mode,
        read_up_to=fold.read_up_to,
        required=tuple(ev.WorkerRef(worker=worker, incarnation=incarnation) for worker, incarnation in required),
        deadline_s=rules.switch_deadline_s,
    )


def _retirements(fold: PolicyFold, rules: SwitchRules, now_us: int) -> list[ev.AnyPolicyEvent]:
    """Weights that are no longer needed: never the live or newest version or one in an open switch."""
    if rules.keep == "all":
        return []
    alive = sorted(number for number, state in fold.versions.items() if state.status is not VersionStatus.RETIRED)
    switching = fold.switch.event.version if fold.switch else None
    protected = {fold.live, fold.newest, fold.branch_from, switching, fold.last_with_state(), *fold.pinned}
    return [
        ev.VersionRetired(run=rules.run, at_us=now_us, version=number, rule=f"keep={rules.keep}")
        for number in alive[: -rules.keep]
        if number not in protected
    ]
