"""`audit --recompute K`: are the stamps true? K random trained rows are scored again with the weights they claim.

A stamp is a worker's word: everything else in a row follows from it and cannot contradict it. Only the weights can.
Each segment is scored under its own version, over the context as it was sampled; the trainer's own log-probabilities
(topic `scores`) under the version its step started from. What runs the model is handed in: no torch here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from consumers.offline.audit.report import AuditReport, Findings
from consumers.offline.outcomes import RowKey, row_key
from consumers.offline.run_log import LedgerTransaction, RunLog
from consumers.offline.wholeness import PolicyRead, read_policy
from infra.ports import CheckpointStore, Record
from schemas.errors import CheckpointError, InvalidRecord
from schemas.ledger import Decision, StepCompleted
from schemas.policy_state import VersionStatus
from schemas.scores_codec import ScoreRow
from schemas.topics import TopicName, topic
from schemas.trajectory import BoolArray, DecodedRow, FloatArray, Trajectory
from schemas.trajectory_codec import decode_group

FAR = 10.0
"""tolerances: further away than this no rounding explains it. Nearer, it is a lie only where other weights fit"""
MOST_OTHERS = 64
"""versions that are tried for a row whose own does not fit, the nearest first: each costs a model load"""
Kind = Literal["behaviour", "scores"]


class Scorer(Protocol):
    """A model that is loaded."""

    def scores(self, rows: Sequence[Trajectory], version_in: int) -> Mapping[str, ScoreRow]:
        """Trajectory id -> log-probabilities of its tokens under these weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeRules:
    """What is looked at, and how near is near enough."""

    rows: int
    seed: int
    behaviour_tolerance: Callable[[str], float]
    """served dtype -> largest |difference| of a log-probability"""
    scores_tolerance: float
    """of the trainer's own numbers"""
    version: int | None = None
    """only rows that were trained into it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Some tokens of a row, and the version that is said to have given their log-probabilities."""

    kind: Kind
    row: Trajectory
    version: int
    first: int
    last: int
    """tokens first ... last - 1"""
    said: FloatArray
    """[T] of the whole completion"""
    counts: BoolArray
    """[T] tokens to compare"""
    tolerance: float
    trained_into: int

    @property
    def words(self) -> str:
        """For a person."""
        if self.kind == "scores":
            return f"the trainer's scores in the step of version {self.trained_into}"
        return f"tokens {self.first}-{self.last - 1}"

    def differences(self, computed: FloatArray) -> FloatArray:
        """|said - computed| of the tokens that count; infinite where either is not finite."""
        counts = self.counts[self.first : self.last]
        found = np.abs(self.said[self.first : self.last] - computed[self.first : self.last])[counts]
        return np.where(np.isfinite(found), found, np.float32(np.inf))


@dataclass(slots=True)
class _Tally:
    trajectories: set[str] = field(default_factory=set)
    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, trajectory_id: str, found: FloatArray) -> None:
        self.trajectories.add(trajectory_id)
        self.tokens += len(found)
        self.total += float(found.sum())
        self.largest = max(self.largest, float(found.max(initial=0.0)))

    def to_dict(self) -> dict[str, Any]:
        mean = self.total / self.tokens if self.tokens else 0.0
        return {
            "trajectories": len(self.trajectories), "tokens": self.tokens, "max_difference": self.largest,
            "mean_difference": mean,
        }  # fmt: skip


def recompute(
    report: AuditReport,
    run_log: RunLog,
    store: CheckpointStore,
    open_scorer: Callable[[Path], Scorer],
    rules: RecomputeRules,
) -> AuditReport:
    """The report, and what the weights say of some of its rows."""
    policy = read_policy(run_log)
    chosen = _chosen(run_log.transactions(), rules)
    rows = _rows(run_log, chosen)
    claims = [*_behaviour(rows, chosen, rules), *_scores(run_log, rows, chosen, rules)]
    weights = _Weights(policy, store, open_scorer)
    findings = Findings()
    tallies: dict[Kind, defaultdict[int, _Tally]] = {"behaviour": defaultdict(_Tally), "scores": defaultdict(_Tally)}
    suspects: list[tuple[Claim, float]] = []
    for version in sorted({claim.version for claim in claims}):
        mine = [claim for claim in claims if claim.version == version]
        for claim, found in weights.differences(version, mine):
            tallies[claim.kind][version].add(claim.row.trajectory_id, found)
            largest = float(found.max(initial=0.0))
            if not largest <= claim.tolerance:
                suspects.append((claim, largest))
    _accuse(suspects, weights, findings)
    section = {
        "asked": rules.rows,
        "seed": rules.seed,
        "trajectories": len(rows),
        "not_in_the_log": len(chosen) - len(rows),
        "behaviour": {str(v): t.to_dict() for v, t in sorted(tallies["behaviour"].items())},
        "scores": {str(v): t.to_dict() for v, t in sorted(tallies["scores"].items())},
        "not_checked": {str(v): {"claims": n, "why": weights.why[v]} for v, n in sorted(weights.refused.items())},
    }
    counts = {
        "tokens_recomputed": sum(t.tokens for t in tallies["behaviour"].values()),
        "scores_recomputed": sum(t.tokens for t in tallies["scores"].values()),
    }
    return report.with_more(findings, counts, {"recompute"}, {"recompute": section})


def recompute_lines(section: Mapping[str, Any]) -> list[str]:
    """For a person: over all versions, and the version that is furthest off; --json has every one."""
    lines = [f"{section['trajectories']} of {section['asked']} rows computed again (seed {section['seed']})"]
    for kind in ("behaviour", "scores"):
        found = section[kind]
        if not found:
            continue
        tokens = sum(one["tokens"] for one in found.values())
        mean = sum(one["mean_difference"] * one["tokens"] for one in found.values()) / max(1, tokens)
        worst = max(found, key=lambda version: found[version]["max_difference"])
        lines.append(
            f"  {kind:9} {tokens} tokens under {len(found)} versions: difference at most "
            f"{found[worst]['max_difference']:.2g} (version {worst}), {mean:.2g} on average"
        )
    for version, found in section["not_checked"].items():
        lines.append(f"  version {version}: {found['claims']} claims not checked: {found['why']}")
    return lines


# ---------------------------------------------------------------------- which rows


def _chosen(transactions: Iterable[LedgerTransaction], rules: RecomputeRules) -> dict[RowKey, StepCompleted]:
    """Rows that were trained for the first time, and their step; each as likely as the others."""
    found: dict[RowKey, StepCompleted] = {}
    for transaction in transactions:
        step = transaction.control
        if not isinstance(step, StepCompleted) or rules.version not in (None, step.version_out):
            continue
        for decision in transaction.decisions:
            key = row_key(decision)
            if key is not None and decision.decision is Decision.TRAINED:
                found.setdefault(key, step)
    keys = sorted(found)
    if len(keys) > rules.rows:
        keys = random.Random(rules.seed).sample(keys, rules.rows)
    return {key: found[key] for key in keys}


def _rows(run_log: RunLog, chosen: Mapping[RowKey, StepCompleted]) -> dict[RowKey, Trajectory]:
    """Those that are there; what is missing or altered is for the other checks."""
    wanted = {(partition, offset) for partition, offset, _ in chosen}
    begin: dict[int, int] = {}
    for name, partition in run_log.ends:
        if name == topic(run_log.run, TopicName.TRAJECTORIES):
            offsets = [offset for p, offset in wanted if p == partition]
            begin[partition] = min(offsets, default=run_log.ends[name, partition])
    for partition, first in run_log.beginnings(TopicName.TRAJECTORIES).items():
        begin[partition] = max(first, begin.get(partition, first))
    found: dict[RowKey, Trajectory] = {}
    for record in run_log.records(TopicName.TRAJECTORIES, begin):
        if (record.partition, record.offset) not in wanted:
            continue
        for row in _decoded(run_log, record):
            key = (record.partition, record.offset, row.row)
            if key in chosen and row.trajectory is not None:
                found[key] = row.trajectory
    return found


def _decoded(run_log: RunLog, record: Record) -> Sequence[DecodedRow]:
    try:
        return decode_group(record.value, record.headers, run_log.limits)
    except InvalidRecord:
        return ()


def _behaviour(
    rows: Mapping[RowKey, Trajectory], chosen: Mapping[RowKey, StepCompleted], rules: RecomputeRules
) -> Iterable[Claim]:
    for key, row in rows.items():
        first = 0
        for segment in row.segments:
            last = first + segment.length
            if row.loss_mask[first:last].any():
                yield Claim(
                    kind="behaviour", row=row, version=segment.version, first=first, last=last, said=row.logprobs,
                    counts=row.loss_mask, tolerance=rules.behaviour_tolerance(row.fingerprint.dtype),
                    trained_into=chosen[key].version_out,
                )  # fmt: skip
            first = last


def _scores(
    run_log: RunLog, rows: Mapping[RowKey, Trajectory], chosen: Mapping[RowKey, StepCompleted], rules: RecomputeRules
) -> Iterable[Claim]:
    wanted = {(str(row.trajectory_id), chosen[key].version_in): (row, chosen[key]) for key, row in rows.items()}
    for entry in run_log.scores():
        for score in entry.rows:
            row, step = wanted.get((score.trajectory_id, score.version_in), (None, None))
            if row is not None and step is not None and len(score.proximal) == len(row.token_ids):
                yield Claim(
                    kind="scores", row=row, version=score.version_in, first=0, last=len(row.token_ids),
                    said=score.proximal, counts=np.ones(len(row.token_ids), dtype=np.bool_),
                    tolerance=rules.scores_tolerance, trained_into=step.version_out,
                )  # fmt: skip


# ---------------------------------------------------------------------- what the weights say


class _Weights:
    """One version's model at a time."""

    def __init__(self, policy: PolicyRead, store: CheckpointStore, open_scorer: Callable[[Path], Scorer]) -> None:
        self._fold = policy.fold
        self._retired = policy.retired
        self._store = store
        self._open_scorer = open_scorer
        self.refused: Counter[int] = Counter()
        """version -> claims that could not be checked"""
        self.why: dict[int, str] = {}

    def differences(self, version: int, claims: Sequence[Claim]) -> Iterable[tuple[Claim, FloatArray]]:
        """Of each claim, were it this version's."""
        directory = self._directory(version)
        if directory is None:
            self.refused[version] += len(claims)
            return
        rows = {claim.row.trajectory_id: claim.row for claim in claims}
        found = self._open_scorer(directory).scores(list(rows.values()), version)
        for claim in claims:
            yield claim, claim.differences(found[claim.row.trajectory_id].proximal)

    def others(self, version: int) -> list[int]:
        """Versions whose weights may still be there, the nearest first."""
        kept = [n for n, s in self._fold.versions.items() if s.status is not VersionStatus.RETIRED and n != version]
        return sorted(kept, key=lambda n: (abs(n - version), n))[:MOST_OTHERS]

    def _directory(self, version: int) -> Path | None:
        state = self._fold.versions.get(version)
        if state is None:
            self.why[version] = "no such version was published"
        elif state.status is VersionStatus.RETIRED:
            self.why[version] = f"retired: {self._retired[version].words}"
        else:
            try:
                return self._store.fetch(state.event.manifest_uri, state.event.manifest_sha256)[0]
            except CheckpointError as error:
                self.why[version] = str(error)
        return None


def _accuse(suspects: Sequence[tuple[Claim, float]], weights: _Weights, findings: Findings) -> None:
    fits: dict[int, tuple[int, float]] = {}
    """id of a claim -> the version that fits best, and how far it is"""
    others = sorted({n for claim, _ in suspects for n in weights.others(claim.version)})
    refused = Counter(weights.refused)  # trying a version that is gone is no claim of its own
    for other in others:
        mine = [claim for claim, _ in suspects if other in weights.others(claim.version)]
        for claim, found in weights.differences(other, mine):
            near = float(found.max(initial=0.0))
            if near <= claim.tolerance and near < fits.get(id(claim), (-1, np.inf))[1]:
                fits[id(claim)] = (other, near)
    weights.refused = refused
    for claim, largest in suspects:
        fitting, near = fits.get(id(claim), (None, 0.0))
        words = (
            f"{claim.words}: version {claim.version} is claimed, and its weights differ by up to {largest:.3g} "
            f"(tolerance {claim.tolerance:g})"
        )
        if fitting is not None:
            words += f"; the weights of version {fitting} fit ({near:.2g})"
        elif largest > FAR * claim.tolerance:
            words += "; no retained version fits"
        tell = findings.error if fitting is not None or not largest <= FAR * claim.tolerance else findings.notice
        tell(
            f"recompute.{claim.kind}", claim.row.trajectory_id, words, version=claim.trained_into,
            claimed=claim.version, fits=fitting, difference=largest,
        )  # fmt: skip
