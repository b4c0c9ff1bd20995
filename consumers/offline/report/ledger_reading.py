"""What the ledger says: the metrics of every step as columns, and what was trained and dropped. Fed transactions.

Bounded: 8 bytes a step and metric; lengths as histograms; a few numbers a reason; some 250 bytes a trained record, so
that a trajectory can be joined with the step that used it.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from consumers.offline.report.bins import Histogram
from consumers.offline.run_log import LedgerTransaction, RecordKey
from schemas.ledger import AnyLedgerControl, Decision, DecisionRow, LedgerEnded, StepCompleted, Subject

METRICS = (
    "critic/rewards/mean", "critic/rewards/min", "critic/rewards/max", "group/all_right", "group/all_wrong",
    "group/zero_variance", "response_length/mean", "response_length/max", "response_length/clip_ratio",
    "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/lr", "actor/pg_loss", "actor/ratio_ess",
    "actor/ratio_chi2", "actor/pg_clipfrac", "actor/clipfrac_high", "actor/clipfrac_low", "actor/log_ratio_p01",
    "actor/log_ratio_p05", "actor/log_ratio_p50", "actor/log_ratio_p95", "actor/log_ratio_p99", "actor/kl_ref_k3",
    "mismatch/log_p01", "mismatch/log_p05", "mismatch/log_p50", "mismatch/log_p95", "mismatch/log_p99",
    "mismatch/applied_ess", "mismatch/raw_ess", "policy_lag/mean", "policy_lag/max", "policy_lag_from_issue/mean",
    "age_seconds/mean", "age_seconds/min", "age_seconds/max", "age_seconds/from_issue_mean", "trainer/idle_fraction",
    "training/tokens",
)  # fmt: skip
"""names of infra/metrics.py that the report shows; a step that lacks one has a gap there"""
PHASES = ("batch", "train", "checkpoint", "whole")
_LENGTH_BINS = 64


@dataclass(slots=True)
class Tally:
    """Rows that came to the same end: how many, how long, how good."""

    rows: int = 0
    lengths: int = 0
    length_sum: float = 0.0
    rewards: int = 0
    reward_sum: float = 0.0

    def add(self, row: DecisionRow) -> None:
        """Count one row."""
        self.rows += 1
        if row.completion_tokens is not None:
            self.lengths += 1
            self.length_sum += row.completion_tokens
        if row.reward is not None and math.isfinite(row.reward):
            self.rewards += 1
            self.reward_sum += row.reward

    @property
    def mean_length(self) -> float | None:
        """Completion tokens."""
        return self.length_sum / self.lengths if self.lengths else None

    @property
    def mean_reward(self) -> float | None:
        """As measured."""
        return self.reward_sum / self.rewards if self.rewards else None


@dataclass(slots=True)
class Use:
    """A record of which some rows were trained."""

    version_in: int
    version_out: int
    consumed_us: int
    rows: int
    """bit r: row r was trained"""


@dataclass(slots=True)
class LedgerReading:
    """Feed it every transaction."""

    versions: array[int] = field(default_factory=lambda: array("q"))
    """version_out of each step, in order"""
    times_us: array[int] = field(default_factory=lambda: array("q"))
    trajectories: array[int] = field(default_factory=lambda: array("q"))
    dropped_before: array[int] = field(default_factory=lambda: array("q"))
    """trajectories dropped in the step's transaction or since the step before it"""
    columns: dict[str, array[float]] = field(default_factory=dict)
    """metric, or time/<phase> -> a value each step, NaN where it has none"""
    lags: dict[int, int] = field(default_factory=dict)
    """policy lag -> trained rows, replays included"""
    trained: Tally = field(default_factory=Tally)
    trained_lengths: Histogram = field(default_factory=lambda: Histogram(1, _LENGTH_BINS))
    dropped: dict[str, Tally] = field(default_factory=dict)
    dropped_lengths: Histogram = field(default_factory=lambda: Histogram(1, _LENGTH_BINS))
    replayed: int = 0
    groups: dict[tuple[str, str], int] = field(default_factory=dict)
    """(decision, reason) -> groups"""
    refused_records: int = 0
    uses: dict[RecordKey, Use] = field(default_factory=dict)
    control: AnyLedgerControl | None = None
    read_up_to: int = 0
    problems: int = 0
    """ledger records that cannot be read or were altered"""
    segments: list[tuple[int, str, str]] = field(default_factory=list)
    """(first version, config digest, code revision), a new one where either changed"""
    _pending_drops: int = 0

    @property
    def is_ended(self) -> bool:
        """The last transaction closed the run."""
        return isinstance(self.control, LedgerEnded)

    @property
    def dropped_rows(self) -> int:
        """Trajectories, for whatever reason."""
        return sum(tally.rows for tally in self.dropped.values())

    def add(self, transaction: LedgerTransaction) -> None:
        """Take in one transaction."""
        self.read_up_to = transaction.offset + 1
        self.problems += len(transaction.problems)
        step = transaction.control if isinstance(transaction.control, StepCompleted) else None
        for row in transaction.decisions:
            self._decision(row, step)
        if transaction.control is not None:
            self.control = transaction.control
        if step is not None:
            self._step(step)

    def column(self, name: str) -> array[float]:
        """A value each step; all NaN when no step has it."""
        return self.columns.get(name) or array("d", [math.nan] * len(self.versions))

    # ------------------------------------------------------------------ inside

    def _decision(self, row: DecisionRow, step: StepCompleted | None) -> None:
        if row.subject is Subject.RECORD:
            self.refused_records += 1
        elif row.subject is Subject.GROUP:
            key = (row.decision.value, row.reason)
            self.groups[key] = self.groups.get(key, 0) + (row.decision is not Decision.REPLAYED)
        elif row.decision is Decision.DROPPED:
            self._pending_drops += 1
            self.dropped.setdefault(row.reason, Tally()).add(row)
            if row.completion_tokens is not None:
                self.dropped_lengths.add(row.completion_tokens)
        else:
            if row.policy_lag is not None:
                self.lags[row.policy_lag] = self.lags.get(row.policy_lag, 0) + 1
            if row.decision is Decision.REPLAYED:
                self.replayed += 1
            else:
                self._trained(row, step)

    def _trained(self, row: DecisionRow, step: StepCompleted | None) -> None:
        self.trained.add(row)
        if row.completion_tokens is not None:
            self.trained_lengths.add(row.completion_tokens)
        if step is None or row.partition is None or row.offset is None or row.row is None:
            return
        use = self.uses.get((row.partition, row.offset))
        if use is None:
            self.uses[row.partition, row.offset] = Use(
                version_in=step.version_in, version_out=step.version_out, consumed_us=row.consumed_at_us,
                rows=1 << row.row,
            )  # fmt: skip
        else:
            use.rows |= 1 << row.row

    def _step(self, step: StepCompleted) -> None:
        before = len(self.versions)
        self.versions.append(step.version_out)
        self.times_us.append(step.at_us)
        self.trajectories.append(step.trajectories)
        self.dropped_before.append(self._pending_drops)
        self._pending_drops = 0
        values = {name: step.metrics[name] for name in METRICS if name in step.metrics}
        values |= {f"time/{name}": step.phase_s[name] for name in PHASES if name in step.phase_s}
        for name in self.columns.keys() | values.keys():
            column = self.columns.setdefault(name, array("d", [math.nan] * before))
            column.append(values.get(name, math.nan))
        if not self.segments or self.segments[-1][1:] != (step.config_digest, step.code_revision):
            self.segments.append((step.version_out, step.config_digest, step.code_revision))
