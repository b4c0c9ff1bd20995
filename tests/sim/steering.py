"""Invariants about what steers a run: which version is switched to, what holds a step, what a branch leaves behind,
what a person pinned, and whether the optimizer goes on from where its version stood."""

from __future__ import annotations

from schemas import policy_events as ev
from schemas.errors import CheckpointError
from schemas.ledger import OpenGroup, Settled, StepCompleted
from tests.sim.promises import complete_claims
from tests.sim.reading import Reading, read
from tests.sim.world import World


def check_steering(world: World) -> list[str]:
    """Every violation, in words."""
    reading = read(world)
    problems = _newest_first(reading) + _optimizer_steps(reading) + _abandoned(reading) + _pinned(world, reading)
    return problems + (_held(world, reading) if world.plan.hold_for_in_flight else [])


def _newest_first(reading: Reading) -> list[str]:
    """A switch goes to the newest version that the coordinator had read."""
    published: list[tuple[int, int]] = []
    problems = []
    for offset, event, void in reading.policy:
        if void is None and isinstance(event, ev.VersionPublished):
            published.append((offset, event.version))
        if void is None and isinstance(event, ev.SwitchStarted):
            newest = max(version for at, version in published if at < event.read_up_to)
            if event.version != newest:
                problems.append(f"G4: policy@{offset}: a switch to {event.version}, {newest} was the newest one read")
    return problems


def _optimizer_steps(reading: Reading) -> list[str]:
    """Each training step is one more of the optimizer; a branch start stands where its parent stood."""
    problems = []
    trained = {step.version_out for step in reading.steps()}
    for number, state in reading.fold.versions.items():
        parent = state.event.parent
        if parent is None:
            continue
        expected = reading.fold.versions[parent].event.optimizer_step + (number in trained)
        if state.event.optimizer_step != expected:
            found = f"optimizer step {state.event.optimizer_step}, its parent's state gives {expected}"
            problems.append(f"G6: version {number} has {found}")
    return problems


def _abandoned(reading: Reading) -> list[str]:
    """What is open when a branch starts belongs to the one that is left: none of it stays open."""
    problems = []
    before: frozenset[str] = frozenset()
    for transaction in reading.transactions:
        control = transaction.control
        now = frozenset(group.group_id for group in control.position.open_groups)
        if isinstance(control, Settled) and control.reason.startswith("branch from") and before & now:
            problems.append(f"G1: {', '.join(sorted(before & now))} stayed open over a {control.reason}")
        before = now
    return problems


def _pinned(world: World, reading: Reading) -> list[str]:
    """Weights that somebody pinned are still there."""
    problems = []
    for version in sorted(reading.fold.pinned):
        published = reading.fold.versions[version].event
        try:
            world.store().fetch(published.manifest_uri, published.manifest_sha256)
        except CheckpointError as error:
            problems.append(f"G4: the weights of version {version}, which is pinned, are gone: {error}")
    return problems


def _held(world: World, reading: Reading) -> list[str]:
    """stale.action = wait: no step is made that leaves a group in flight too old to be trained."""
    complete = complete_claims(world, reading)
    broken = {row.group_id for row in reading.rows.values() if row.trajectory is None}
    problems = []
    for transaction in reading.transactions:
        control = transaction.control
        if not isinstance(control, StepCompleted):
            continue
        depth = reading.fold.versions[control.version_out].depth
        for group in control.position.open_groups:
            in_flight = complete.get(group.group_id, transaction.at_ms + 1) > transaction.at_ms
            if in_flight and group.group_id not in broken and _lag(world, group, depth) > world.plan.largest_lag:
                problems.append(f"G2: step {depth} was made while {group.group_id} was in flight, now it is too old")
    return problems


def _lag(world: World, group: OpenGroup, depth: int) -> int:
    """Of a group that was sampled as early as it was asked for."""
    return depth - (group.intended_step - world.plan.run_ahead)
