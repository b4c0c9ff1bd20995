"""What a trained row says of itself, checked against the weights themselves: lag, proof, log-probabilities (G2-G4).

The second half of the invariants: nothing here trusts a decision or a stamp.
"""

from __future__ import annotations

from schemas.headers import is_arrow
from schemas.ledger import Decision, DecisionRow, LedgerEnded, StepCompleted, Subject, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import RunEnded, VersionActivated, decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import TrajectoryLimits, decode_group
from tests.fakes.tiny_policy import INITIAL_WEIGHTS, VOCABULARY, logprob, next_weights
from tests.sim.invariants import records
from tests.sim.world import World

Place = tuple[int | None, int | None, int | None]


def check_stamps(world: World) -> list[str]:
    """Every violation, in words."""
    fold, problems = _policy(world)
    rows = _rows(world)
    weights = {0: INITIAL_WEIGHTS}
    waiting: list[DecisionRow] = []
    ends = 0
    most_open = (world.plan.run_ahead + 1) * world.plan.groups_per_step
    for record in records(world, TopicName.LEDGER):
        if is_arrow(record.headers):
            waiting += decode_decisions(record.value, record.headers)
            continue
        control = decode_ledger_control(record.value)
        ends += isinstance(control, LedgerEnded)
        if len(control.position.open_groups) > most_open:
            problems.append(f"G8: {len(control.position.open_groups)} groups are open, at most {most_open} may be")
        used = [d for d in waiting if d.subject is Subject.TRAJECTORY and d.decision is not Decision.DROPPED]
        waiting = []
        if used and not isinstance(control, StepCompleted):
            problems.append(f"G5: {len(used)} rows were trained without a version")
        if isinstance(control, StepCompleted):
            base = control.version_in
            weights[control.version_out] = next_weights(weights[base], control.batch_digest)
            for decision in used:
                row = rows[decision.partition, decision.offset, decision.row]
                problems += _row(world, row, decision, fold, base, control.policy_read_up_to, weights)
    return problems + ([] if ends == 1 else [f"G5: the run was ended {ends} times"])


def _policy(world: World) -> tuple[PolicyFold, list[str]]:
    fold, problems, ends = PolicyFold(), [], 0
    for record in records(world, TopicName.POLICY):
        event = decode_policy_event(record.value)
        void = fold.apply(record.offset, event)
        ends += isinstance(event, RunEnded) and void is None
        if isinstance(event, VersionActivated) and void is not None:
            problems.append(f"G4: policy@{record.offset} activated version {event.version}: {void.reason}")
    return fold, problems + ([] if ends == 1 else [f"G5: policy ended the run {ends} times"])


def _rows(world: World) -> dict[Place, Trajectory]:
    limits = TrajectoryLimits(vocabulary_size=VOCABULARY)
    found: dict[Place, Trajectory] = {}
    for record in records(world, TopicName.TRAJECTORIES):
        for row in decode_group(record.value, record.headers, limits):
            if row.trajectory is not None:
                found[record.partition, record.offset, row.row] = row.trajectory
    return found


def _row(
    world: World, row: Trajectory, decision: DecisionRow, fold: PolicyFold, base: int, read_up_to: int,
    weights: dict[int, str],
) -> list[str]:  # fmt: skip
    name, problems, position = row.trajectory_id, [], 0
    lag = max(fold.versions[base].depth - fold.versions[s.version].depth for s in row.segments)
    if lag != decision.policy_lag or lag > world.plan.max_lag or any(s.version > base for s in row.segments):
        problems.append(f"G2: {name} was trained at lag {lag} (the ledger says {decision.policy_lag})")
    for segment in row.segments:
        proof = fold.proofs.get(segment.proof)
        mine = (row.worker_id, row.incarnation, segment.version)
        if proof is None or (proof.worker, proof.incarnation, proof.version) != mine or segment.proof >= read_up_to:
            problems.append(f"G3: {name} was trained without a proof of version {segment.version}")
        live_at = fold.versions[segment.version].activated_at_offset
        if live_at is None or live_at >= read_up_to:
            problems.append(f"G4: {name} was trained before version {segment.version} was live")
        for at in range(position, position + segment.length):
            expected = logprob(weights[segment.version], int(row.token_ids[at]), at)
            if abs(float(row.logprobs[at]) - expected) > 1e-6:
                problems.append(f"G3: token {at} of {name} was not sampled by version {segment.version}")
        position += segment.length
    return problems
