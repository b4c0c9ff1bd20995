"""May this trajectory enter the update? Policy lag, proof and support, judged when the batch is built.

This is the rule that keeps stale (G2) and unproven (G3) tokens out; min_version on requests and the
generators' own checks only save compute. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from schemas.ledger import Reason
from schemas.policy_fold import PolicyFold
from schemas.trajectory import Fingerprint, Sampling, Trajectory, unmodelled_transform

_NUMBERS = ("dtype", "engine", "engine_version")
"""parts of a fingerprint that change log-probabilities a little; the tokenizer changes what they are of"""


class Admission(StrEnum):
    """The three outcomes."""

    ADMIT = "admit"
    WAIT = "wait"
    """the fold has not passed what the row refers to; readers of several topics wait for the counterpart"""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row judged."""

    admission: Admission
    reason: Reason = Reason.NONE
    policy_lag: int | None = None
    """training steps, of the oldest trained token"""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """The limits of one run."""

    max_lag: int
    """training steps; with down-weighting this is hard_max_lag"""
    barrier: bool
    """a token counts only when its version was activated, not just proven"""
    tokenizer_digest: str
    """the trainer's own"""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """the trainer's own precision and engine; empty: not compared"""
    takes_other_numbers: bool = True
    """the objective allows for behaviour log-probabilities of another precision or engine"""


def trained_versions(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(version, proof) of each segment with at least one trained token, in order of the tokens."""
    found: list[tuple[int, int]] = []
    start = 0
    for segment in trajectory.segments:
        if np.count_nonzero(trajectory.loss_mask[start : start + segment.length]):
            found.append((segment.version, segment.proof))
        start += segment.length
    return found


def verdict_key(trajectory: Trajectory) -> tuple[object, ...]:
    """All of a row that `judge` looks at: rows with equal keys have one verdict, for one fold, base and rules.

    Sampling and fingerprint count as equal when they are one object, as they are in the rows of a record."""
    t = trajectory
    return id(t.sampling), id(t.fingerprint), t.worker_id, t.incarnation, *trained_versions(t)


def judge(trajectory: Trajectory, fold: PolicyFold, base: int, rules: AdmissionRules, *, ahead: int = 0) -> Verdict:
    """Judge one row against the weights that are about to be updated: `base`, and `ahead` training steps made on it
    that no committed version holds yet (0, or 1 while a publication is under way). A step counts, committed or not."""
    mismatch = support_mismatch(trajectory.sampling, trajectory.fingerprint.tokenizer_digest, rules.tokenizer_digest)
    if mismatch:
        return Verdict(admission=Admission.REFUSE, reason=Reason.SUPPORT_MISMATCH, detail=mismatch)
    if not rules.takes_other_numbers:
        difference = fingerprint_difference(trajectory.fingerprint, rules.fingerprint)
        if difference:
            detail = (
                f"{difference}, and the objective takes stored log-probabilities for the trainer's own: "
                "use denominator behaviour, or a correction"
            )
            return Verdict(admission=Admission.REFUSE, reason=Reason.SUPPORT_MISMATCH, detail=detail)
    oldest: int | None = None
    segments = trained_versions(trajectory)
    for version, _ in segments:
        lag = fold.lag(version, base)
        if isinstance(lag, Reason):
            # Not an ancestor. A version beyond the newest one read may still be on its way to us.
            if fold.newest is None or version > fold.newest:
                return Verdict(admission=Admission.WAIT, detail=f"version {version} is not in the fold yet")
            detail = f"version {version} is not an ancestor of {base}"
            return Verdict(admission=Admission.REFUSE, reason=Reason.OTHER_BRANCH, detail=detail)
        oldest = max(0 if oldest is None else oldest, lag + ahead)
    if oldest is not None and oldest > rules.max_lag:
        detail = f"lag {oldest} > {rules.max_lag}"
        return Verdict(admission=Admission.REFUSE, reason=Reason.STALE, policy_lag=oldest, detail=detail)
    for version, proof in segments:
        unproven = _unproven(trajectory, version, proof, fold, barrier=rules.barrier)
        if unproven is not None:
            return Verdict(admission=unproven[0], reason=Reason.UNPROVEN, policy_lag=oldest, detail=unproven[1])
    # A row without a trained token brings nothing that could be old; its reward still counts in the baseline.
    return Verdict(admission=Admission.ADMIT, policy_lag=0 if oldest is None else oldest)


def _unproven(
    trajectory: Trajectory, version: int, offset: int, fold: PolicyFold, *, barrier: bool
) -> tuple[Admission, str] | None:
    if offset >= fold.read_up_to:
        return Admission.WAIT, f"policy@{offset} is not read yet"
    proof = fold.proofs.get(offset)
    expected = (trajectory.worker_id, trajectory.incarnation, version)
    if proof is None or (proof.worker, proof.incarnation, proof.version) != expected:
        return Admission.REFUSE, f"policy@{offset} is no proof of version {version} by {expected[0]}/{expected[1]}"
    if barrier and not fold.was_activated(version):
        return Admission.WAIT, f"version {version} was not activated yet"
    return None


def fingerprint_difference(theirs: Fingerprint, own: Mapping[str, str]) -> str:
    """Which part of precision and engine differs, in words; empty when none does, or none is known.

    Equal: behaviour log-probabilities may stand for the trainer's own. Otherwise they are close, and the ratio over
    them, or a correction, has to take up the difference."""
    for name in _NUMBERS:
        part, expected = getattr(theirs, name), own.get(name, "")
        if part and expected and part != expected:
            return f"{name} {part} is not the trainer's {expected}"
    return ""


def support_mismatch(sampling: Sampling, tokenizer_digest: str, own_tokenizer_digest: str) -> str:
    """Why the row's distribution cannot be modelled by the trainer; empty when it can.

    Other tokens, or a truncated support (top_p, top_k, min_p) and penalties the trainer does not apply: the
    stored log-probabilities are of a distribution that the trainer's are not. Temperature is applied alike.
    """
    if tokenizer_digest != own_tokenizer_digest:
        return f"tokenizer {tokenizer_digest[:12]} is not the trainer's {own_tokenizer_digest[:12]}"
    name = unmodelled_transform(sampling)
    if name:
        return f"{name}={getattr(sampling, name)} changes the distribution in a way the trainer does not model"
    if sampling.temperature <= 0:
        return f"temperature={sampling.temperature} (greedy) is not trainable"
    return ""
