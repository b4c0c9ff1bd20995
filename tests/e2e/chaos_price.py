"""What the crashes of a run cost, in seconds of generation and of waiting. Pure.

Finished: groups whose records the broker had acknowledged when a process died. In flight: groups that a killed worker
had begun. A worker samples several groups at once, so its seconds are counted once, not once a group.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from schemas.ledger import Decision, Reason
from schemas.topics import TopicName
from tests.e2e.chaos_evidence import Evidence, Generated
from tests.e2e.chaos_hits import Hit, worker_of
from tests.e2e.chaos_plan import BROKER, GENERATORS, What

# A finished group that ends like this was not lost: it taught nothing, or the run was over before its turn.
NO_LOSS = frozenset({Reason.ZERO_VARIANCE, Reason.RUN_ENDED})


def lost_groups(evidence: Evidence) -> dict[str, str]:
    """Finished groups that were never trained, with the reason."""
    found = {}
    for group_id in evidence.generated:
        fates = evidence.fates.get(group_id, ())
        if any(fate.decision == Decision.TRAINED for fate in fates):
            continue
        reasons = {fate.reason for fate in fates} - NO_LOSS
        if reasons or not fates:
            found[group_id] = ", ".join(sorted(reasons)) or "never decided"
    return found


def finished_loss_s(hit: Hit, evidence: Evidence, lost: Iterable[str]) -> float:
    """Seconds of generation in groups that lay in the log when it hit, undecided, and were not trained afterwards."""
    claims = [
        claim
        for group_id in lost
        if group_id in hit.groups_in_log
        for claim in evidence.generated[group_id]
        if all(fate.decided_us > hit.at_us for fate in evidence.fates.get(group_id, ()))
    ]
    return worker_seconds(claims)


def in_flight_loss_s(hit: Hit, evidence: Evidence) -> float:
    """Seconds from the begin of the oldest group that the killed worker did not finish, to its death."""
    begun = unfinished(hit, evidence)
    return max(0.0, (hit.at_us - min(begun.values())) / 1e6) if begun else 0.0


def unfinished(hit: Hit, evidence: Evidence) -> dict[str, int]:
    """Groups that the killed worker had begun and that it never brought into the log -> when it began them."""
    worker = worker_of(hit.fault.service)
    return {
        group_id: since_us
        for group_id, since_us in hit.in_flight_since_us.items()
        if not any(
            claim.worker == worker and claim.incarnation in hit.incarnations
            for claim in evidence.generated.get(group_id, ())
        )
    }


def worker_seconds(claims: Iterable[Generated]) -> float:
    """Seconds in which a worker sampled at least one of them, summed over workers."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for claim in claims:
        spans[claim.worker, claim.incarnation].append((claim.started_us, claim.finished_us))
    total_us = 0
    for ranges in spans.values():
        reached_us = 0
        for begin_us, end_us in sorted(ranges):
            total_us += max(0, end_us - max(begin_us, reached_us))
            reached_us = max(reached_us, end_us)
    return total_us / 1e6


def only_flushed(hit: Hit, evidence: Evidence, run: str) -> dict[str, float]:
    """What a dead broker had acknowledged, and how much of it lay in the page cache only.

    kill -9 loses none of it: the page cache is the kernel's. A machine without power would have lost the rest."""
    full = f"{run}.{TopicName.TRAJECTORIES}"
    acknowledged, fsynced = sum(hit.acknowledged.values()), 0
    for place, end in hit.acknowledged.items():
        fsynced += min(end, hit.fsynced.get(place, 0))
    claims = [
        claim
        for group in evidence.generated.values()
        for claim in group
        if hit.fsynced.get((full, claim.key[0]), 0) <= claim.key[1] < hit.acknowledged.get((full, claim.key[0]), 0)
    ]
    return {
        "records_acknowledged": acknowledged,
        "records_fsynced": fsynced,
        "generation_seconds_only_flushed": round(worker_seconds(claims), 2),
    }


def price(hits: Sequence[Hit], evidence: Evidence, run: str) -> dict[str, Any]:
    """Everything about one run that the summary of all runs needs, as plain values."""
    lost = lost_groups(evidence)
    killed = [hit for hit in hits if hit.fault.what is What.KILL]
    return {
        "hits": [
            {
                "what": hit.fault.what,
                "service": hit.fault.service,
                "phase": hit.phase,
                "open_transaction": hit.open_transaction,
                "recovery_s": None if hit.recovery_s is None else round(hit.recovery_s, 2),
                "finished_loss_s": round(finished_loss_s(hit, evidence, lost), 3),
                "in_flight_loss_s": round(in_flight_loss_s(hit, evidence), 3) if _is_worker(hit) else None,
                "groups_thrown_away": len(unfinished(hit, evidence)) if _is_worker(hit) else None,
            }
            for hit in hits
        ],
        "lost_groups": lost,
        "broker_deaths": [only_flushed(hit, evidence, run) for hit in killed if hit.fault.service == BROKER],
    }


def by_phase(hits: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Kills, and the seconds of generation they cost, by where in its checkpoint cycle they found the trainer."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for hit in hits:
        if hit["what"] == What.KILL:
            groups[str(hit["phase"])].append(hit)
    return {
        phase: {
            "kills": len(found),
            "finished_s": round(sum(hit["finished_loss_s"] for hit in found), 3),
            "in_flight_s": round(sum(hit["in_flight_loss_s"] or 0.0 for hit in found), 3),
        }
        for phase, found in sorted(groups.items())
    }


def median(values: Sequence[float]) -> float:
    """Zero for none."""
    return round(statistics.median(values), 3) if values else 0.0


def _is_worker(hit: Hit) -> bool:
    return hit.fault.what is What.KILL and hit.fault.service in GENERATORS
