"""The batch of a step, made again from its rows by the trainer's own StepMaker, and held against the ledger.

Advantages, policy lags and weights are computed from the log; the ledger's are only compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from consumers.offline.replay.report import Difference
from consumers.offline.trained_steps import StepGroup, StepRow, TrainedStep
from consumers.trainer.admission import Admission, Verdict, trained_versions
from consumers.trainer.grouping import GroupBuffer, HeldRow
from consumers.trainer.replay import ReplayedGroup, ReplayedRow
from consumers.trainer.selection import JudgedMember, ReadyGroup
from consumers.trainer.step import PreparedStep, StepMaker
from schemas.ledger import Decision, DecisionRow, OpenGroup, Position, Reason
from schemas.policy_fold import PolicyFold
from schemas.trajectory import DecodedRow, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What StepMaker.prepare takes."""

    groups: tuple[ReadyGroup, ...]
    replayed: tuple[ReplayedGroup, ...]
    version_in: int
    depth_in: int


def is_whole(step: TrainedStep) -> bool:
    """The ledger names every row of the batch, and all of them are there."""
    return len(step.decisions) == step.control.trajectories and None not in step.rows


def step_input(step: TrainedStep, fold: PolicyFold) -> tuple[StepInput, list[Difference]]:
    """The groups as the trainer had them, from a step whose rows are all there; and what is wrong with them."""
    version_in = step.control.version_in
    found = _ledger_differences(step)
    found += [
        Difference(part="data", subject=p.trajectory_id, place=p.place, detail=f"{p.kind}: {p.detail}")
        for p in step.problems
    ]
    found += _lag_differences(step, fold)
    opened = {} if step.before is None else {group.group_id: group for group in step.before.open_groups}
    rows = zip(step.decisions, step.decoded, strict=True)
    replayed = [(d, row) for d, row in rows if d.decision is Decision.REPLAYED and row is not None]
    found += _replay_differences([decision for decision, _ in replayed], step.before)
    made = StepInput(
        groups=tuple(_ready_group(group, opened.get(group.group_id), fold, version_in) for group in step.groups),
        replayed=tuple(_replayed_groups(replayed, fold, version_in)),
        version_in=version_in,
        depth_in=_depth(fold, version_in),
    )
    return made, found


def prepared(made: StepInput, maker: StepMaker) -> PreparedStep:
    """The batch, under the weights the learner holds (they count where a divergence is part of the reward)."""
    return maker.prepare(made.groups, made.replayed, version_in=made.version_in, depth_in=made.depth_in)


def batch_differences(step: TrainedStep, batch: PreparedStep) -> list[Difference]:
    """The batch against what the ledger says of it: digest, order, advantages, weights."""
    found = []
    rows = batch.batch.rows
    if batch.batch.digest != step.control.batch_digest:
        said = step.control.batch_digest
        words = f"{batch.batch.digest[:12]}... over the rows in the log, the ledger says {said[:12]}..."
        found.append(Difference(part="data", subject="batch_digest", detail=words))
    ids = [row.trajectory.trajectory_id for row in rows]
    named = [decision.trajectory_id for decision in step.decisions]
    if ids != named:
        words = f"{len(ids)} rows in another order or number than the {len(named)} of the ledger"
        return [*found, Difference(part="data", subject="batch", detail=words)]
    for row, decision in zip(rows, step.decisions, strict=True):
        pairs = (("advantage", row.advantage, decision.advantage), ("weight", row.weight, decision.weight))
        for name, here, ledger in pairs:
            if here != ledger:
                words = f"{name} {ledger!r} in the ledger, computed again {here!r}"
                found.append(_about(decision, words))
    return found


def _ledger_differences(step: TrainedStep) -> list[Difference]:
    """Records of the transaction that are not what the trainer wrote, and decisions that are gone with them."""
    found = [
        Difference(part="data", subject="decisions", place=f"ledger[0]@{problem.offset}", detail=problem.message)
        for problem in step.transaction.problems
    ]
    named, said = len(step.decisions), step.control.trajectories
    if named != said:
        words = f"the ledger names {named} rows of the batch, its StepCompleted says {said}"
        found.append(Difference(part="data", subject="batch", detail=words))
    return found


# ---------------------------------------------------------------------- groups as the trainer held them


def _ready_group(group: StepGroup, opened: OpenGroup | None, fold: PolicyFold, base: int) -> ReadyGroup:
    if opened is None:  # a ledger that contradicts itself: what its entry decides will differ and be told
        opened = OpenGroup(group_id=group.group_id, request_position=-1, issued_at_us=0, attempt=0, intended_step=-1)
    return ReadyGroup(
        buffer=GroupBuffer(group=opened), members=tuple(_member(row, fold, base) for row in group.members)
    )


def _member(row: StepRow, fold: PolicyFold, base: int) -> JudgedMember:
    assert row.row is not None and row.trajectory is not None, "members are rows that are there"
    decision = row.decision
    admitted = decision.decision is Decision.TRAINED
    verdict = Verdict(
        admission=Admission.ADMIT if admitted else Admission.REFUSE,
        policy_lag=_policy_lag(row.trajectory, decision, fold, base),
    )
    return JudgedMember(held=HeldRow(key=_key(decision), row=row.row), verdict=verdict)


def _replayed_groups(
    rows: Sequence[tuple[DecisionRow, DecodedRow]], fold: PolicyFold, base: int
) -> Iterator[ReplayedGroup]:
    for group_id, members in groupby(rows, key=lambda pair: pair[0].group_id):
        listed = list(members)
        yield ReplayedGroup(
            group_id=group_id or "",
            use_count=listed[0][0].use_count,
            rows=tuple(
                ReplayedRow(
                    key=_key(decision),
                    row=row,
                    advantage=0.0 if decision.advantage is None else decision.advantage,
                    policy_lag=_policy_lag(row.trajectory, decision, fold, base),
                )
                for decision, row in listed
                if row.trajectory is not None
            ),
        )


# ---------------------------------------------------------------------- lags and first uses


def _policy_lag(trajectory: Trajectory, decision: DecisionRow, fold: PolicyFold, base: int) -> int:
    """Along the parent chain; the ledger's where the chain has no answer, which is told beside it."""
    lag = _lag_on_chain(trajectory, fold, base)
    if isinstance(lag, int):
        return lag
    return 0 if decision.policy_lag is None else decision.policy_lag


def _lag_on_chain(trajectory: Trajectory, fold: PolicyFold, base: int) -> int | Reason:
    oldest = 0
    if base not in fold.versions:
        return Reason.OTHER_BRANCH
    for version, _ in trained_versions(trajectory):
        lag = fold.lag(version, base)
        if isinstance(lag, Reason):
            return lag
        oldest = max(oldest, lag)
    return oldest


def _lag_differences(step: TrainedStep, fold: PolicyFold) -> list[Difference]:
    found = []
    for decision, trajectory in zip(step.decisions, step.rows, strict=True):
        if trajectory is None:
            continue
        lag = _lag_on_chain(trajectory, fold, step.control.version_in)
        if lag != decision.policy_lag:
            words = lag if isinstance(lag, int) else "none: its version is no ancestor"
            found.append(_about(decision, f"policy_lag {decision.policy_lag} in the ledger, along the chain {words}"))
    return found


def _replay_differences(decisions: Sequence[DecisionRow], before: Position | None) -> list[Difference]:
    """A replayed row keeps the advantage of its first use, which the position before the step has too."""
    if before is None:
        return []
    first = {(r.partition, r.offset, r.row): r.advantage for group in before.replay for r in group.rows}
    found = []
    for decision in decisions:
        advantage = first.get((*_key(decision), decision.row or 0))
        if advantage is None:
            found.append(_about(decision, "replayed, but the position before the step does not allow for it"))
        elif advantage != decision.advantage:
            words = f"advantage {decision.advantage!r} in the ledger, {advantage!r} at its first use"
            found.append(_about(decision, words))
    return found


def _about(decision: DecisionRow, words: str) -> Difference:
    place = f"trajectories[{decision.partition}]@{decision.offset} row {decision.row}"
    return Difference(part="data", subject=decision.trajectory_id or "?", place=place, detail=words)


def _key(decision: DecisionRow) -> tuple[int, int]:
    return (
        -1 if decision.partition is None else decision.partition,
        -1 if decision.offset is None else decision.offset,
    )


def _depth(fold: PolicyFold, version: int) -> int:
    state = fold.versions.get(version)
    return version if state is None else state.depth
