"""What must hold after every simulated run, read from the log itself (G1-G5) and the store."""

from __future__ import annotations

from collections import Counter

from infra.ports import Record
from schemas.headers import is_arrow
from schemas.ids import parse_group_id
from schemas.ledger import Decision, LedgerEnded, StepCompleted, Subject, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import VersionPublished, decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.prompt_codec import decode_request
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory_codec import TrajectoryLimits, decode_group
from tests.fakes.tiny_policy import INITIAL_WEIGHTS, VOCABULARY, next_weights
from tests.sim.world import RUN, World

LAST_SWITCH_WAIT_US = 10_000_000
"""TrainerSettings.last_switch_wait_s"""


def records(world: World, name: TopicName) -> list[Record]:
    """Every committed record of a topic."""
    reader = world.log.client("check").reader({topic(RUN, name): TOPICS[name].partitions}, "beginning")
    found: list[Record] = []
    while batch := reader.poll(1000):
        found.extend(batch)
    return found


def check(world: World) -> list[str]:
    """Every violation, in words."""
    problems = [
        f"liveness: {p.name} did not finish (restarts {p.restarts}, last error {p.error!r})"
        for p in world.processes
        if not p.done
    ]
    if problems:
        return problems
    fold = PolicyFold()
    for record in records(world, TopicName.POLICY):
        fold.apply(record.offset, decode_policy_event(record.value))
    decisions, steps, end = [], [], None
    for record in records(world, TopicName.LEDGER):
        if is_arrow(record.headers):
            decisions.extend(decode_decisions(record.value, record.headers))
            continue
        control = decode_ledger_control(record.value)
        if isinstance(control, StepCompleted):
            steps.append(control)
        if isinstance(control, LedgerEnded):
            end = control
    if end is None:
        return ["the run has no closing transaction"]
    problems += _groups(world, decisions)
    problems += _rows(world, decisions, end)
    problems += _steps(world, steps, fold, decisions, end)
    return problems


def _groups(world: World, decisions: list) -> list[str]:
    issued = Counter(decode_request(r.value, r.headers).group_id for r in records(world, TopicName.PROMPTS))
    decided = Counter(d.group_id for d in decisions if d.subject is Subject.GROUP)
    problems = [f"G1: group {g} was issued {n} times" for g, n in issued.items() if n != 1]
    problems += [f"G1: group {g} decided {decided[g]} times" for g in issued if decided[g] != 1]
    return problems + [f"G1: group {g} was decided but never issued" for g in decided if g not in issued]


def _rows(world: World, decisions: list, end: LedgerEnded) -> list[str]:
    limits = TrajectoryLimits(vocabulary_size=VOCABULARY)
    in_log = Counter()
    for record in records(world, TopicName.TRAJECTORIES):
        if record.offset < end.position.partitions[record.partition].next_offset:
            for row in decode_group(record.value, record.headers, limits):
                in_log[(record.partition, record.offset, row.row)] += 1
    rows = [d for d in decisions if d.subject is Subject.TRAJECTORY and d.decision is not Decision.REPLAYED]
    decided = Counter((d.partition, d.offset, d.row) for d in rows)
    problems = [f"G1: row {key} decided {decided[key]} times" for key in in_log if decided[key] != 1]
    problems += [f"G1: row {key} decided but not in the log" for key in decided if key not in in_log]
    trained = Counter(d.trajectory_id for d in rows if d.decision is Decision.TRAINED)
    problems += [f"G1: {t} trained {n} times" for t, n in trained.items() if n != 1]
    problems += [
        f"G2: {d.trajectory_id} trained with lag {d.policy_lag}"
        for d in rows
        if d.decision is Decision.TRAINED and d.policy_lag > world.plan.max_lag
    ]
    replayed = Counter(d.trajectory_id for d in decisions if d.decision is Decision.REPLAYED)
    problems += [
        f"G1: {t} replayed {n} times (trained first: {t in trained})"
        for t, n in replayed.items()
        if n >= world.plan.replay.max_use or t not in trained
    ]
    attempts = [d for d in decisions if d.subject is Subject.GROUP and d.decision is Decision.TRAINED]
    prompts = Counter((parse_group_id(d.group_id).prompt, parse_group_id(d.group_id).epoch) for d in attempts)
    return problems + [f"G1: prompt {p} of one pass trained {n} times" for p, n in prompts.items() if n != 1]


def _steps(world: World, steps: list[StepCompleted], fold: PolicyFold, decisions: list, end: LedgerEnded) -> list[str]:
    problems = []
    made = {step.version_out: step for step in steps}
    if len(made) != len(steps):
        problems.append(f"G5: versions of the steps are {[s.version_out for s in steps]}")
    if fold.versions[fold.newest].depth != world.plan.versions or not fold.ended:
        problems.append(f"G5: newest version {fold.newest}, ended {fold.ended}")
    weights = {}
    for number, state in sorted(fold.versions.items()):
        parent = state.event.parent
        if number in made:
            weights[number] = next_weights(weights[made[number].version_in], made[number].batch_digest)
            if made[number].version_in != parent:
                problems.append(f"G5: version {number} was trained from {made[number].version_in}, parent is {parent}")
        else:  # version 0, or the start of a branch: the same weights under a new number
            weights[number] = INITIAL_WEIGHTS if parent is None else weights[parent]
    # The end waits for the last switch, but not for ever: workers may be gone.
    if fold.live != fold.newest and end.at_us - steps[-1].at_us < LAST_SWITCH_WAIT_US:
        problems.append(f"G4: the last version {fold.newest} never became live (live: {fold.live})")
    published = fold.versions[fold.newest].event
    assert isinstance(published, VersionPublished)
    directory, _ = world.store().fetch(published.manifest_uri, published.manifest_sha256)
    if (directory / "model.safetensors").read_text() != weights[fold.newest]:
        problems.append("G5: the last weights are not what the ledger's steps give: an update was repeated or lost")
    full = world.plan.groups_per_step * len(steps)
    trained = sum(d.subject is Subject.GROUP and d.decision is Decision.TRAINED for d in decisions)
    # With zero-variance groups filtered out a step may take fewer groups; it never takes more.
    right = 0 < trained <= full if world.plan.filter_zero_variance else trained == full
    return problems + ([] if right else [f"G7: {trained} groups trained, {full} expected"])
