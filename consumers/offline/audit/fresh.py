"""G2 and G3 for every trained row, and the advantages of every trained group, recomputed from the log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from consumers.offline.audit.gaps import Gaps, unseen
from consumers.offline.audit.index import AuditRules, Ref, RunIndex
from consumers.offline.audit.report import Findings
from consumers.offline.audit.rows import Member
from consumers.trainer.admission import trained_versions
from schemas.ledger import Decision, Reason, StepCompleted, Subject
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName
from schemas.trajectory import Trajectory

# Advantages are float32 inside the trainer; a library's summation order may move the last digit.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6


class FreshAudit:
    """Judges each use of a row with the whole policy topic at hand, as the trainer could at its position."""

    def __init__(self, index: RunIndex, rules: Callable[[int], AuditRules | None], findings: Findings) -> None:
        self._fold: PolicyFold = index.fold
        self._controls = [transaction.control for transaction in index.transactions]
        self._rules = rules
        self._findings = findings
        self.max_lag_trained = 0
        self.trained = 0
        self.replayed = 0

    def judge(self, ref: Ref, trajectory: Trajectory) -> None:
        """One use of one row."""
        control = self._controls[ref.transaction]
        if ref.decision.decision is Decision.REPLAYED:
            self.replayed += 1
        else:
            self.trained += 1
        if not isinstance(control, StepCompleted):
            return  # reported with the transaction: it makes no version
        rules = self._rules(ref.transaction)
        self._judge_lag(ref, trajectory, control, rules)
        for version, proof in trained_versions(trajectory):
            self._judge_proof(trajectory, control, version, proof, barrier=rules is None or rules.barrier)

    def _judge_lag(self, ref: Ref, t: Trajectory, step: StepCompleted, rules: AuditRules | None) -> None:
        oldest = 0
        for version, _ in trained_versions(t):
            state = self._fold.versions.get(version)
            problem = ""
            if step.version_in not in self._fold.versions:
                problem = f"trained into version {step.version_in}, which is not published"
            elif state is None or state.offset >= step.policy_read_up_to:
                problem = (
                    f"sampled under version {version}, which was not published when version {step.version_out} was made"
                )
            else:
                lag = self._fold.lag(version, step.version_in)
                if isinstance(lag, Reason):
                    problem = f"sampled under version {version}, which is no ancestor of version {step.version_in}"
                else:
                    oldest = max(oldest, lag)
            if problem:
                self._findings.error("G2.not_an_ancestor", t.trajectory_id, problem, version=step.version_out)
                return
        self.max_lag_trained = max(self.max_lag_trained, oldest)
        if oldest != ref.decision.policy_lag:
            problem = f"the ledger says lag {ref.decision.policy_lag}, the parent chain {oldest}"
            self._findings.error("G2.lag_differs", t.trajectory_id, problem, version=step.version_out)
        if rules is not None and oldest > rules.max_lag:
            problem = f"trained into version {step.version_out} with lag {oldest} > {rules.max_lag}"
            self._findings.error(
                "G2.lag_above_limit", t.trajectory_id, problem, version=step.version_out, policy_lag=oldest
            )

    def _judge_proof(self, t: Trajectory, step: StepCompleted, version: int, proof: int, *, barrier: bool) -> None:
        found = self._fold.proofs.get(proof)
        problem = ""
        if found is None:
            problem = f"policy@{proof} is no legal VersionLoaded"
        elif (found.worker, found.incarnation, found.version) != (t.worker_id, t.incarnation, version):
            problem = (
                f"policy@{proof} is of {found.worker}/{found.incarnation} for version {found.version}, "
                f"not of {t.worker_id}/{t.incarnation} for {version}"
            )
        elif proof >= step.policy_read_up_to:
            problem = f"policy@{proof} was not read: the trainer decided at {step.policy_read_up_to}"
        if problem:
            self._findings.error("G3.proof", t.trajectory_id, problem, version=step.version_out)
            return
        if not barrier:
            return
        state = self._fold.versions.get(version)
        activated = None if state is None else state.activated_at_offset
        if activated is None or activated >= step.policy_read_up_to:
            when = "never" if activated is None else f"only at policy@{activated}"
            self._findings.error(
                "G3.not_activated",
                t.trajectory_id,
                f"sampled under version {version}, activated {when}; the trainer decided at {step.policy_read_up_to}",
                version=step.version_out,
            )


def check_advantages(
    index: RunIndex,
    groups: Mapping[tuple[int, str], Sequence[Member]],
    rules: Callable[[int], AuditRules | None],
    findings: Findings,
    gaps: Gaps,
) -> int:
    """One claim a trained group; advantages as the trainer's function gives them. How many were recomputed."""
    recomputed = 0
    for transaction, step in index.steps():
        places = {(r.partition, r.offset) for r in transaction.decisions if r.decision is not Decision.REPLAYED}
        if unseen(gaps, TopicName.TRAJECTORIES, {(p, o) for p, o in places if p is not None and o is not None}):
            gaps.not_judged["steps whose advantages cannot be recomputed"] += 1
            continue
        trained_ids = [
            row.group_id
            for row in transaction.decisions
            if row.subject is Subject.GROUP and row.decision is Decision.TRAINED and row.group_id is not None
        ]
        usable: list[list[Member]] = []
        for group_id in trained_ids:
            members = groups.get((transaction.number, group_id), ())
            claims = {m.claim_id for m in members if m.decision.decision is Decision.TRAINED}
            if len(claims) > 1:
                message = f"trained members come from {len(claims)} claims: {', '.join(sorted(claims)[:3])}"
                findings.error("G1.group_mismatch", group_id, message, version=step.version_out)
            winning = {m.index: m for m in members if m.claim_id in claims and not _is_repeat(m)}
            usable.append([winning[i] for i in sorted(winning) if winning[i].reward is not None])
        limits = rules(transaction.number)
        if limits is None or limits.advantages is None:
            continue
        values = limits.advantages([[m.reward for m in members if m.reward is not None] for members in usable])
        for group_members, group_values in zip(usable, values, strict=True):
            recomputed += len(group_members)
            _compare(group_members, group_values, step.version_out, findings)
    return recomputed


def _is_repeat(member: Member) -> bool:
    """The same claim and index a second time: never in the baseline."""
    return member.decision.reason in (Reason.DUPLICATE, Reason.CONFLICT)


def _compare(members: Sequence[Member], values: Sequence[float], version: int, findings: Findings) -> None:
    for member, value in zip(members, values, strict=True):
        said = member.decision.advantage
        if member.decision.decision is not Decision.TRAINED or said is None:
            continue
        if not math.isfinite(said) or not math.isclose(said, value, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
            findings.error(
                "G1.advantage",
                str(member.decision.trajectory_id),
                f"the ledger says {said!r}, the rewards in the log give {value!r}",
                version=version,
            )
