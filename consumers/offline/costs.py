"""What a run cost, by phase: seconds of every phase of steps, checkpoints, loads and generation, and bytes moved.

Also how far trainer and generators were apart where they must agree: the ratios of rows of lag 0, and the probes.
All of it from the log; a phase that nobody reported is not there, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from consumers.offline.run_log import TrajectoryEntry
from consumers.offline.switch_latency import quantile
from schemas import policy_events as ev
from schemas.ledger import StepCompleted

FRESH_ERROR = "mismatch/fresh_ratio_error_max"
"""metric of a step: the largest |ratio - 1| among its tokens of lag 0"""
STEP, LOAD, GENERATION = "step", "load", "generation"

Phases = dict[str, dict[str, float]]
"""name -> count, total, p50 and max in seconds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Trainer against generators under the same weights."""

    fresh_ratio_error_max: float | None
    """largest |ratio - 1| of a trained token of lag 0; None: nothing of lag 0 was trained"""
    fresh_steps: int
    """steps that had such tokens"""
    probe_diff_max: float | None
    """largest difference of a log-probability in the proof of a version, over all workers and versions"""
    tolerance: float | None
    """that the proofs were held to (generator.probe_tolerance)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """Seconds and bytes of a run."""

    phase_s: Phases
    """`step.<phase>`: of training steps, checkpoints among them; `load.<phase>`: of workers taking over a version;
    `generation.group`: from the first completion begun to the last one done, groups run beside one another"""
    bytes: dict[str, int]
    """checkpoints (all, and the largest), trajectories in the log"""
    agreement: Agreement


@dataclass(slots=True)
class CostsAssembler:
    """Feed it what counts of a run, in any order."""

    _seconds: dict[str, list[float]] = field(default_factory=dict)
    _checkpoints: list[int] = field(default_factory=list)
    _trajectory_bytes: int = 0
    _fresh: list[float] = field(default_factory=list)
    _probes: list[float] = field(default_factory=list)
    _tolerance: float | None = None

    def add_step(self, step: StepCompleted) -> None:
        """One committed training step."""
        for name, seconds in step.phase_s.items():
            self._add(f"{STEP}.{name}", seconds)
        if FRESH_ERROR in step.metrics:
            self._fresh.append(step.metrics[FRESH_ERROR])

    def add_event(self, event: ev.AnyPolicyEvent) -> None:
        """One event of policy that counts."""
        if isinstance(event, ev.VersionPublished):
            self._checkpoints.append(event.bytes)
        elif isinstance(event, ev.VersionLoaded):
            for name, seconds in event.phase_s.items():
                self._add(f"{LOAD}.{name}", seconds)
            self._probes.append(event.probe_diff_new)
            self._tolerance = max(event.probe_tolerance, self._tolerance or 0.0)

    def add_trajectories(self, entry: TrajectoryEntry) -> None:
        """One record of trajectories: a group's, or a part of it."""
        self._trajectory_bytes += entry.value_bytes
        whole = [row.trajectory for row in entry.rows if row.trajectory is not None]
        if whole:
            began_us, ended_us = min(t.started_at_us for t in whole), max(t.finished_at_us for t in whole)
            self._add(f"{GENERATION}.group", max(0.0, (ended_us - began_us) / 1e6))

    def costs(self) -> RunCosts:
        """All of it so far."""
        return RunCosts(
            phase_s={name: _figures(seconds) for name, seconds in self._seconds.items()},
            bytes={
                "checkpoints": sum(self._checkpoints),
                "checkpoint_max": max(self._checkpoints, default=0),
                "trajectories": self._trajectory_bytes,
            },
            agreement=Agreement(
                fresh_ratio_error_max=max(self._fresh, default=None),
                fresh_steps=len(self._fresh),
                probe_diff_max=max(self._probes, default=None),
                tolerance=self._tolerance,
            ),
        )

    def _add(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)


def agreement_words(found: Agreement) -> str:
    """For a person; empty when nothing was measured.

    >>> agreement_words(Agreement(fresh_ratio_error_max=2e-6, fresh_steps=1, probe_diff_max=3e-6, tolerance=1e-4))
    'ratios at lag 0 within 2e-06 of 1 (1 step), probes within 3e-06; allowed 0.0001'
    """
    if found.probe_diff_max is None or found.tolerance is None:
        return ""
    words = "nothing of lag 0 was trained"
    if found.fresh_ratio_error_max is not None:
        steps = f"{found.fresh_steps} step" + "s" * (found.fresh_steps != 1)
        words = f"ratios at lag 0 within {found.fresh_ratio_error_max:.2g} of 1 ({steps})"
    return f"{words}, probes within {found.probe_diff_max:.2g}; allowed {found.tolerance:g}"


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(seconds), "total": round(sum(seconds), 4), "p50": round(quantile(seconds, 0.5), 4),
        "max": round(max(seconds), 4),
    }  # fmt: skip
