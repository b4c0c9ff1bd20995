"""Invariants about when things may be decided: nothing is judged before it was read, nobody is given up too early."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from schemas import policy_events as ev
from schemas.errors import InvalidRecord
from schemas.headers import DEAD_CODE, DEAD_TOPIC, header_text
from schemas.heartbeat import decode_heartbeat
from schemas.ledger import Decision, Reason, Subject
from schemas.topics import TopicName, topic
from tests.sim.reading import Reading, read, records
from tests.sim.services import LEASE_S, RUN
from tests.sim.world import World

_COORDINATORS = (
    ev.SwitchStarted, ev.VersionActivated, ev.VersionFailed, ev.WorkerAdmitted, ev.WorkerExpired, ev.VersionRetired,
)  # fmt: skip
_WORKERS = (ev.WorkerJoined, ev.WorkerLeft, ev.VersionLoaded, ev.LoadFailed)
_SLACK_MS = 200
_OBEYED_MS = 15_000
_NO_LOSS_S = 60.0
"""with a time-out that long every group outlives whatever the simulator does to its workers"""


def check_promises(world: World) -> list[str]:
    """Every violation, in words."""
    reading = read(world)
    problems = _void_decisions(world, reading) + _whole_groups(world, reading)
    problems += _closed_unread(world, reading) + _end_unread(world, reading)
    problems += _called_damaged(world)
    return problems + _expired_alive(world, reading) + _dead_letters_obeyed(world, reading)


def _called_damaged(world: World) -> list[str]:
    """Nothing damages the log here: whoever says so has read two moments of it as one."""
    return [
        f"G5: {process.name} took the log for damaged: {death}"
        for process in world.processes
        for death in process.deaths
        if death.startswith("IllegalState")
    ]


def _void_decisions(world: World, reading: Reading) -> list[str]:
    """The coordinator is fenced and reads back what it wrote before it decides again: nothing it says is void,
    unless a worker spoke between its look and its word (an event that reached the log in the same call)."""
    times = {record.offset: record.timestamp_ms for record in records(world, TopicName.POLICY)}
    spoke = {times[offset] for offset, event, _ in reading.policy if isinstance(event, _WORKERS)}
    pinned = {event.version for _, event, void in reading.policy if isinstance(event, ev.VersionPinned) and not void}
    problems = []
    for offset, event, void in reading.policy:
        if void is None or not isinstance(event, _COORDINATORS) or times[offset] in spoke:
            continue
        if isinstance(event, ev.VersionRetired) and event.version in pinned:
            pinned.remove(event.version)  # the pin had not reached it yet; once it has read its own words, it has
            continue
        problems.append(f"G4: policy@{offset}: the coordinator wrote a void {event.type}: {void.reason}")
    return problems


def _whole_groups(world: World, reading: Reading) -> list[str]:
    """A group is trained with every member of one claim decided beside it, once."""
    problems = []
    for transaction in reading.transactions:
        members: dict[str | None, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for decision in transaction.decisions:
            row = reading.rows.get((decision.partition, decision.offset, decision.row))
            if decision.subject is Subject.TRAJECTORY and row is not None and row.trajectory is not None:
                members[decision.group_id][row.claim_id].add(row.trajectory.index_in_group)
        for decision in transaction.decisions:
            if decision.subject is Subject.GROUP and decision.decision is Decision.TRAINED:
                claims = members[decision.group_id].values()
                if world.plan.group_size not in map(len, claims):
                    found = f"{sorted(map(len, claims))} of {world.plan.group_size}"
                    problems.append(f"G1: {decision.group_id} was trained with {found} members")
    return problems


def _closed_unread(world: World, reading: Reading) -> list[str]:
    """No group is given up as lost or incomplete while a complete claim lay in the log before its time was up."""
    complete = complete_claims(world, reading)
    issued_ms: dict[str, int] = {}
    problems = []
    for transaction in reading.transactions:
        for decision in transaction.decisions:
            if decision.subject is not Subject.GROUP or decision.reason not in (Reason.LOST, Reason.INCOMPLETE):
                continue
            group = str(decision.group_id)
            deadline_ms = issued_ms.get(group, transaction.at_ms) + world.plan.group_timeout_s * 1000
            if complete.get(group, deadline_ms + 1) <= deadline_ms:
                problems.append(f"G7: {group} was dropped ({decision.reason}) while it lay in the log unread")
            if decision.reason == Reason.LOST and world.plan.group_timeout_s >= _NO_LOSS_S:
                problems.append(f"G7: {group} was lost: nobody worked on it for {world.plan.group_timeout_s:g} s")
        for open_group in transaction.control.position.open_groups:
            issued_ms.setdefault(open_group.group_id, transaction.at_ms)
    return problems


def complete_claims(world: World, reading: Reading) -> dict[str, int]:
    """Group -> broker time (ms) at which one claim of it was complete in the log, every row good."""
    times = {
        (record.partition, record.offset): record.timestamp_ms for record in records(world, TopicName.TRAJECTORIES)
    }
    members: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    spoilt = set()
    for (partition, offset, _), row in reading.rows.items():
        if row.trajectory is None:
            spoilt.add((row.group_id, row.claim_id))
            continue
        at_ms = times[partition, offset]  # type: ignore[index]
        members[row.group_id, row.claim_id].setdefault(row.trajectory.index_in_group, at_ms)
    found: dict[str, int] = {}
    for key, claim in members.items():
        if key not in spoilt and len(claim) == world.plan.group_size:
            found[key[0]] = min(found.get(key[0], 1 << 62), max(claim.values()))
    return found


def _end_unread(world: World, reading: Reading) -> list[str]:
    """Whatever lay in the log when training was over, its last version live, is decided before the run ends."""
    end = reading.end()
    steps = reading.steps()
    made = [t.at_ms for t in reading.transactions if steps and t.control is steps[-1]]
    if end is None or not made:
        return []
    position = end.control.position.partitions
    over_ms = max([made[0], *(ms for ms in _activations_ms(world, reading) if ms <= end.at_ms)])
    return [
        f"G1: the run ended before trajectories[{record.partition}]@{record.offset} was read"
        for record in records(world, TopicName.TRAJECTORIES)
        if record.timestamp_ms < over_ms and record.offset >= position[record.partition].next_offset
    ]


def _activations_ms(world: World, reading: Reading) -> list[int]:
    """Broker time at which the newest version went live, if it did."""
    state = reading.fold.versions[reading.fold.newest or 0]
    return [r.timestamp_ms for r in records(world, TopicName.POLICY) if r.offset == state.activated_at_offset]


def _expired_alive(world: World, reading: Reading) -> list[str]:
    """No lease runs out for a worker whose heartbeats never paused for that long."""
    beats: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in records(world, TopicName.WORKERS):
        try:
            beat = decode_heartbeat(record.value)
        except InvalidRecord:
            continue
        beats[beat.worker, beat.incarnation].append(record.timestamp_ms)
    policy_ms = {record.offset: record.timestamp_ms for record in records(world, TopicName.POLICY)}
    problems = []
    for offset, event, void in reading.policy:
        if void is not None or not isinstance(event, ev.WorkerExpired) or event.reason != "lease":
            continue
        at_ms = policy_ms[offset]
        mine = [ms for ms in beats[event.worker, event.incarnation] if ms <= at_ms]
        gaps = [after - before for before, after in pairwise([*mine, at_ms])]
        if mine and max(gaps) < LEASE_S * 1000 - _SLACK_MS:
            problems.append(
                f"G7: {event.worker}/{event.incarnation} was expired; its longest pause was {max(gaps) / 1000:.1f} s"
            )
    return problems


def _dead_letters_obeyed(world: World, reading: Reading) -> list[str]:
    """A prompt that a worker has given up is decided as such, not by time-out."""
    told: dict[str, int] = {}
    for record in records(world, TopicName.DEADLETTERS):
        try:
            about = (header_text(record.headers, DEAD_CODE), header_text(record.headers, DEAD_TOPIC))
        except InvalidRecord:
            continue
        if about == (Reason.POISON_PROMPT.value, topic(RUN, TopicName.PROMPTS)) and record.key is not None:
            told.setdefault(record.key.decode(errors="replace"), record.timestamp_ms)
    return [
        f"G7: {d.group_id} was given up by a worker, and dropped only by its time-out"
        for t in reading.transactions
        for d in t.decisions
        if d.subject is Subject.GROUP and d.reason == Reason.LOST
        if t.at_ms > told.get(str(d.group_id), t.at_ms) + _OBEYED_MS
    ]
