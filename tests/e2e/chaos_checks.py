"""What must be true of a run that was hit, as functions that return what is wrong. Pure; empty means whole."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from schemas.ledger import Decision
from tests.e2e.chaos_evidence import Evidence, RecordKey
from tests.e2e.chaos_hits import Hit, Traces, worker_of
from tests.e2e.chaos_plan import BROKER, GENERATORS, TRAINER, Fault, Phase, RunPlan, What, kills
from tests.e2e.chaos_price import lost_groups
from tests.e2e.chaos_watch import SeenRecord

RECOVERY_S = 45.0


def findings(
    plan: RunPlan, hits: Sequence[Hit], evidence: Evidence, seen: Mapping[RecordKey, SeenRecord], disk_deaths: int
) -> list[str]:
    """Everything that is wrong with a finished run.

    Args: seen: records that readers had been given while it went. disk_deaths: trainers that must end over a full disk.
    """
    return [
        *summary_findings(plan, evidence),
        *fate_findings(evidence),
        *fault_findings(plan.faults, hits),
        *recovery_findings(plan.faults, hits, evidence.traces, evidence.joins, disk_deaths),
        *record_findings(seen, evidence),
        *attempt_findings(hits, evidence.attempts),
        *time_findings(hits),
    ]


def summary_findings(plan: RunPlan, evidence: Evidence) -> list[str]:
    """The run trained what it was asked for, and its audit is clean."""
    wanted = {"versions_trained": plan.versions, "undecided": 0, "audit_findings": 0}
    summary = evidence.summary
    wrong = [f"{name} is {summary[name]}, expected {value}" for name, value in wanted.items() if summary[name] != value]
    if summary["trajectories_trained"] + sum(summary["dropped"].values()) != summary["trajectories_in_log"]:
        wrong.append("trained + dropped is not what lies in the log")
    return wrong


def fate_findings(evidence: Evidence) -> list[str]:
    """Every finished group and each of its rows is decided exactly once, and none was lost."""
    wrong = []
    for group_id in evidence.generated:
        count = len(evidence.fates.get(group_id, ()))
        if count != 1:
            wrong.append(f"group {group_id} lies finished in the log and was decided {count} times")
    twice = [place for place, count in evidence.row_decisions.items() if count != 1]
    wrong += [f"the row at trajectories[{p}]@{o} row {r} was decided more than once" for p, o, r in twice[:5]]
    trained = Counter(fate.decision for fates in evidence.fates.values() for fate in fates)[Decision.TRAINED]
    if trained != evidence.summary["groups_trained"]:
        wrong.append(f"{trained} groups are decided as trained, the summary says {evidence.summary['groups_trained']}")
    return wrong + [f"finished group {group_id} was lost: {why}" for group_id, why in lost_groups(evidence).items()]


def fault_findings(faults: Sequence[Fault], hits: Sequence[Hit]) -> list[str]:
    """Each planned fault fired, in its order, and where it was meant to."""
    wrong = []
    if len(hits) != len(faults):
        wrong.append(f"{len(hits)} of {len(faults)} faults fired")
    for number, (fault, hit) in enumerate(zip(faults, hits, strict=False), start=1):
        if hit.fault != fault:
            wrong.append(
                f"fault {number} was {hit.fault.what} {hit.fault.service}, planned {fault.what} {fault.service}"
            )
        elif fault.phase is not None and hit.phase is not fault.phase:
            wrong.append(f"fault {number} found the trainer {hit.phase}, it was to hit it {fault.phase}")
        if not hit.evidence:
            wrong.append(f"fault {number} ({fault.what} {fault.service}): nothing proves that it fired")
    return wrong


def recovery_findings(
    faults: Sequence[Fault], hits: Sequence[Hit], found: Traces, joins: Mapping[str, int], disk_deaths: int
) -> list[str]:
    """Exactly as many deaths, restarts, resumptions and new incarnations as the faults explain: none without faults."""
    killed = kills([hit.fault for hit in hits])
    brokers = killed.pop(BROKER, 0)
    deaths = Counter({(name, -int(signal.SIGKILL)): count for name, count in killed.items()})
    if disk_deaths:
        deaths[TRAINER, 1] = disk_deaths
    restarts = killed + Counter({TRAINER: disk_deaths})
    stops = Counter(fault.service for fault in faults if fault.what is What.STOP)
    recovering = sum(1 for hit in hits if hit.fault.service == TRAINER and hit.phase is Phase.RECOVERING)
    wrong = []
    if found.deaths != deaths:
        wrong.append(f"deaths {_words(found.deaths)}, the faults explain {_words(deaths)}")
    if found.restarts != restarts:
        wrong.append(f"restarts {_words(found.restarts)}, the faults explain {_words(restarts)}")
    if found.broker_starts != 1 + brokers:
        wrong.append(f"the broker was started {found.broker_starts} times, expected {1 + brokers}")
    doubts = brokers + stops[BROKER] + stops[TRAINER]
    if found.in_doubt > doubts:
        wrong.append(f"the trainer was in doubt {found.in_doubt} times, at most {doubts} expected")
    expected = restarts[TRAINER] - recovering + found.in_doubt
    if found.resumed != expected:
        wrong.append(f"the trainer resumed {found.resumed} times, expected {expected}")
    for service in GENERATORS:
        lives = 1 + killed[service] + stops[service]
        if joins.get(worker_of(service), 0) != lives:
            wrong.append(f"{service} joined {joins.get(worker_of(service), 0)} times, expected {lives}")
    return wrong


def record_findings(seen: Mapping[RecordKey, SeenRecord], evidence: Evidence) -> list[str]:
    """What the broker had acknowledged is still there, byte for byte, however often it was killed."""
    gone = [key for key, record in seen.items() if evidence.records.get(key) != record.sha256]
    return [f"the acknowledged record trajectories[{p}]@{o} is gone or changed" for p, o in sorted(gone)[:5]]


def attempt_findings(hits: Iterable[Hit], attempts: frozenset[str]) -> list[str]:
    """A checkpoint whose process was killed before its commit never became a version."""
    named = sorted({name for hit in hits if hit.fault.what is What.KILL for name in hit.attempts & attempts})
    return [f"checkpoint {name} was to die between its name and its commit, and is a version" for name in named]


def time_findings(hits: Iterable[Hit]) -> list[str]:
    """Every service came back, in time."""
    wrong = []
    for hit in hits:
        what = f"{hit.fault.what} {hit.fault.service} at version {hit.version}"
        if hit.recovery_s is None:
            wrong.append(f"{what}: no sign of recovery")
        elif hit.recovery_s > RECOVERY_S:
            wrong.append(f"{what}: {hit.recovery_s:.0f} s to recover, at most {RECOVERY_S:g}")
    return wrong


def _words(counts: Counter[tuple[str, int]] | Counter[str]) -> str:
    return ", ".join(f"{key}: {count}" for key, count in sorted(counts.items(), key=str) if count) or "none"
