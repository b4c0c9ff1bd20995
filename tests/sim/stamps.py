"""What a trained row says of itself, checked against the weights themselves: lag, proof, log-probabilities (G2-G4).

The second half of the invariants: nothing here trusts a decision or a stamp.
"""

from __future__ import annotations

from schemas.ledger import Decision, DecisionRow, LedgerEnded, StepCompleted, Subject
from schemas.policy_events import RunEnded
from schemas.policy_fold import PolicyFold
from schemas.trajectory import Trajectory
from tests.fakes.tiny_policy import INITIAL_WEIGHTS, logprob, next_weights
from tests.sim.reading import Reading, read
from tests.sim.world import World


def check_stamps(world: World) -> list[str]:
    """Every violation, in words."""
    reading = read(world)
    problems = _policy(reading)
    fold = reading.fold
    weights = {0: INITIAL_WEIGHTS}
    ends = 0
    most_open = (world.plan.run_ahead + 1) * world.plan.groups_per_step
    for transaction in reading.transactions:
        control = transaction.control
        ends += isinstance(control, LedgerEnded)
        if len(control.position.open_groups) > most_open:
            problems.append(f"G8: {len(control.position.open_groups)} groups are open, at most {most_open} may be")
        used = [
            d for d in transaction.decisions if d.subject is Subject.TRAJECTORY and d.decision is not Decision.DROPPED
        ]
        if used and not isinstance(control, StepCompleted):
            problems.append(f"G5: {len(used)} rows were trained without a version")
        if isinstance(control, StepCompleted):
            base = _weights_of(control.version_in, fold, weights)
            weights[control.version_out] = next_weights(weights[base], control.batch_digest)
            for decision in used:
                row = reading.rows[decision.partition, decision.offset, decision.row].trajectory
                assert row is not None, f"{decision.trajectory_id} fails validation and was trained"
                problems += _row(world, row, decision, fold, base, control.policy_read_up_to, weights)
    segments = fold.segment or 0
    return problems + ([] if ends == segments + 1 else [f"G5: {segments + 1} segments were ended {ends} times"])


def _weights_of(version: int, fold: PolicyFold, weights: dict[int, str]) -> int:
    """A branch start holds the weights of its parent."""
    if version not in weights:
        parent = fold.versions[version].event.parent
        assert parent is not None
        weights[version] = weights[_weights_of(parent, fold, weights)]
    return version


def _policy(reading: Reading) -> list[str]:
    ends = sum(isinstance(event, RunEnded) and void is None for _, event, void in reading.policy)
    segments = reading.fold.segment or 0
    return [] if ends == segments + 1 else [f"G5: policy ended {segments + 1} segments {ends} times"]


def _row(
    world: World, row: Trajectory, decision: DecisionRow, fold: PolicyFold, base: int, read_up_to: int,
    weights: dict[int, str],
) -> list[str]:  # fmt: skip
    name, problems, position = row.trajectory_id, [], 0
    chain = _chain(fold, base)
    if any(segment.version not in chain for segment in row.segments):
        return [f"G2: {name} was sampled under {[s.version for s in row.segments]}, not on the chain of {base}"]
    lag = max(fold.versions[base].depth - fold.versions[s.version].depth for s in row.segments)
    plan = world.plan
    if lag != decision.policy_lag or lag > plan.largest_lag:
        problems.append(f"G2: {name} was trained at lag {lag} (the ledger says {decision.policy_lag})")
    weight = plan.stale_decay ** (lag - plan.max_lag) if lag > plan.max_lag else 1.0
    if decision.weight != weight:
        problems.append(f"G2: {name} of lag {lag} was trained with weight {decision.weight}, {weight} is right")
    for segment in row.segments:
        proof = fold.proofs.get(segment.proof)
        mine = (row.worker_id, row.incarnation, segment.version)
        if proof is None or (proof.worker, proof.incarnation, proof.version) != mine or segment.proof >= read_up_to:
            problems.append(f"G3: {name} was trained without a proof of version {segment.version}")
        live_at = fold.versions[segment.version].activated_at_offset
        if plan.barrier and (live_at is None or live_at >= read_up_to):
            problems.append(f"G4: {name} was trained before version {segment.version} was live")
        sampled = weights[_weights_of(segment.version, fold, weights)]
        for at in range(position, position + segment.length):
            expected = logprob(sampled, int(row.token_ids[at]), at) if row.loss_mask[at] else 0.0
            if abs(float(row.logprobs[at]) - expected) > 1e-6:
                problems.append(f"G3: token {at} of {name} was not sampled by version {segment.version}")
        position += segment.length
    return problems


def _chain(fold: PolicyFold, base: int) -> set[int]:
    """The version and its ancestors."""
    chain, version = set(), base
    while True:
        chain.add(version)
        parent = fold.versions[version].event.parent
        if parent is None:
            return chain
        version = parent
