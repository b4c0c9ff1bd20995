"""What must hold after every simulated run, read from the log itself (G1, G2, G5, liveness) and the store."""

from __future__ import annotations

from collections import Counter

from schemas.ids import parse_group_id
from schemas.ledger import Decision, DecisionRow, Reason, Subject
from schemas.policy_events import VersionPublished
from tests.fakes.tiny_policy import INITIAL_WEIGHTS, next_weights
from tests.sim.reading import Control, Reading, read, records
from tests.sim.services import LAST_SWITCH_WAIT_S
from tests.sim.world import World

__all__ = ["check", "records"]


def check(world: World) -> list[str]:
    """Every violation, in words."""
    problems = [
        f"liveness: {p.name} did not finish (restarts {p.restarts}, last error {p.error!r})"
        for p in world.processes
        if not p.done
    ]
    if problems:
        return problems
    reading = read(world)
    end = reading.end()
    if end is None:
        return ["G5: the run has no closing transaction"]
    problems += _groups(reading)
    problems += _rows(world, reading, end)
    problems += _uses(world, reading.decisions)
    problems += _steps(world, reading, end)
    problems += _reissues(world, reading)
    return problems + _poison(world, reading)


def _groups(reading: Reading) -> list[str]:
    issued = Counter(request.group_id for request in reading.requests)
    decided = Counter(d.group_id for d in reading.decisions if d.subject is Subject.GROUP)
    problems = [f"G1: group {g} was issued {n} times" for g, n in issued.items() if n != 1]
    problems += [f"G1: group {g} decided {decided[g]} times" for g in issued if decided[g] != 1]
    return problems + [f"G1: group {g} was decided but never issued" for g in decided if g not in issued]


def _rows(world: World, reading: Reading, end: Control) -> list[str]:
    position = end.control.position.partitions
    in_log = [key for key in reading.rows if key[1] < position[key[0]].next_offset]  # type: ignore[operator,index]
    rows = [d for d in reading.decisions if d.subject is Subject.TRAJECTORY and d.decision is not Decision.REPLAYED]
    decided = Counter((d.partition, d.offset, d.row) for d in rows)
    problems = [f"G1: row {key} decided {decided[key]} times" for key in in_log if decided[key] != 1]
    problems += [f"G1: row {key} decided but not in the log" for key in decided if key not in reading.rows]
    refused = Counter((d.partition, d.offset) for d in reading.decisions if d.subject is Subject.RECORD)
    problems += [
        f"G1: record {place} cannot be decoded and was decided {refused[place]} times"
        for place in reading.refused
        if refused[place] != (place[1] < position[place[0]].next_offset)
    ]
    trained = Counter(d.trajectory_id for d in rows if d.decision is Decision.TRAINED)
    return problems + [f"G1: {t} trained {n} times" for t, n in trained.items() if n != 1]


def _uses(world: World, decisions: list[DecisionRow]) -> list[str]:
    rows = [d for d in decisions if d.subject is Subject.TRAJECTORY]
    trained = {d.trajectory_id for d in rows if d.decision is Decision.TRAINED}
    problems = [
        f"G2: {d.trajectory_id} trained with lag {d.policy_lag}"
        for d in rows
        if d.decision is not Decision.DROPPED and (d.policy_lag is None or d.policy_lag > world.plan.largest_lag)
    ]
    replayed = Counter(d.trajectory_id for d in rows if d.decision is Decision.REPLAYED)
    problems += [
        f"G1: {t} replayed {n} times (trained first: {t in trained})"
        for t, n in replayed.items()
        if n >= world.plan.replay.max_use or t not in trained
    ]
    groups = [d for d in decisions if d.subject is Subject.GROUP and d.decision is Decision.TRAINED]
    prompts = Counter((parse_group_id(d.group_id).prompt, parse_group_id(d.group_id).epoch) for d in groups)
    return problems + [f"G1: prompt {p} of one pass trained {n} times" for p, n in prompts.items() if n != 1]


def _steps(world: World, reading: Reading, end: Control) -> list[str]:
    problems, steps, fold = [], reading.steps(), reading.fold
    made = {step.version_out: step for step in steps}
    if len(made) != len(steps):
        problems.append(f"G5: versions of the steps are {[s.version_out for s in steps]}")
    if fold.newest is None or fold.versions[fold.newest].depth != world.plan.versions or not fold.ended:
        return [*problems, f"G5: newest version {fold.newest}, ended {fold.ended}"]
    weights: dict[int, str] = {}
    for number, state in sorted(fold.versions.items()):
        parent = state.event.parent
        if number in made:
            weights[number] = next_weights(weights[made[number].version_in], made[number].batch_digest)
            if made[number].version_in != parent:
                problems.append(f"G5: version {number} was trained from {made[number].version_in}, parent is {parent}")
        else:  # version 0, or the start of a branch: the same weights under a new number
            weights[number] = INITIAL_WEIGHTS if parent is None else weights[parent]
    # The end waits for the last switch, but not for ever: workers may be gone.
    published = fold.versions[fold.newest]
    made_ms = [t.at_ms for t in reading.transactions if t.control in steps]
    if fold.live != fold.newest and end.at_ms - max(made_ms, default=0) < LAST_SWITCH_WAIT_S * 1000:
        problems.append(f"G4: the last version {fold.newest} never became live (live: {fold.live})")
    assert isinstance(published.event, VersionPublished)
    directory, _ = world.store().fetch(published.event.manifest_uri, published.event.manifest_sha256)
    if (directory / "model.safetensors").read_text() != weights[fold.newest]:
        problems.append("G5: the last weights are not what the ledger's steps give: an update was repeated or lost")
    full = world.plan.groups_per_step * len(steps)
    trained = sum(d.subject is Subject.GROUP and d.decision is Decision.TRAINED for d in reading.decisions)
    # With zero-variance groups filtered out a step may take fewer groups; it never takes more.
    right = 0 < trained <= full if world.plan.filter_zero_variance else trained == full
    return problems + ([] if right else [f"G7: {trained} groups trained, {full} expected"])


def _reissues(world: World, reading: Reading) -> list[str]:
    """A dropped group whose reason allows it is asked for again; one attempt after the other."""
    again = {Reason.STALE, Reason.OTHER_BRANCH, Reason.INCOMPLETE, Reason.LOST, Reason.UNPROVEN, Reason.ABANDONED}
    issued = {request.group_id for request in reading.requests}
    problems = []
    for number, transaction in enumerate(reading.transactions):
        dropped = [d for d in transaction.decisions if d.subject is Subject.GROUP and d.reason in again]
        for decision in dropped:
            key = parse_group_id(decision.group_id)
            following = str(decision.group_id).rsplit("/", 1)[0] + f"/a{key.attempt + 1}"
            allowed = key.attempt + 1 < world.plan.max_attempts
            if not allowed and following in issued:
                problems.append(f"G7: {following} is one attempt too many")
            # Near the end of a run nothing more is needed; before, the very transaction that drops asks again.
            depth = _depth_after(reading, number)
            needed = (world.plan.versions - depth) * world.plan.groups_per_step
            if allowed and needed > len(transaction.control.position.open_groups) and following not in issued:
                problems.append(f"G7: {decision.group_id} was dropped ({decision.reason}) and never asked for again")
    return problems


def _depth_after(reading: Reading, number: int) -> int:
    steps = [t.control for t in reading.transactions[: number + 1] if t.control in reading.steps()]
    return reading.fold.versions[steps[-1].version_out].depth if steps else 0  # type: ignore[union-attr]


def _poison(world: World, reading: Reading) -> list[str]:
    """A prompt that kills its workers is given up after a few of them, and never trained."""
    index = world.plan.poison_prompt
    if index is None:
        return []
    groups = [d for d in reading.decisions if d.subject is Subject.GROUP and d.group_id is not None]
    mine = [d for d in groups if parse_group_id(d.group_id).prompt == index]
    problems = [f"G1: {d.group_id} kills its workers and was trained" for d in mine if d.decision is Decision.TRAINED]
    # Two deaths are told by heartbeats; a worker that dies while another is not yet known to be dead is a third or
    # fourth, and a heartbeat that was lost with its worker tells nothing.
    problems += [
        f"G7: {group} killed {n} workers" for group, n in world.poison_deaths.items() if n > 3 + world.plan.generators
    ]
    return problems
