"""The values between the trainer's decisions and its learner: what goes into a step and what comes out.

The learner is a port of its own, so that the simulator can run the real trainer service over a tiny
stand-in: it knows tensors and nothing of the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One trajectory of a training step."""

    trajectory: Trajectory
    row_sha256: str
    advantage: float
    """of its first use; a replayed row keeps it"""
    weight: float
    """from age: decay ** max(0, policy lag - max_lag)"""
    policy_lag: int
    """training steps, of the oldest trained token, when the batch was built"""
    use_count: int
    """1 on first use"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The rows of one training step, in the order of the batch digest."""

    rows: tuple[BatchRow, ...]
    version_in: int
    depth_in: int

    @property
    def digest(self) -> str:
        """sha256 hex over the row hashes in order."""
        return hashlib.sha256("".join(row.row_sha256 for row in self.rows).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerScores:
    """The trainer's own log-probabilities of one trajectory, stored in the topic `scores`."""

    trajectory_id: str
    proximal: npt.NDArray[np.float32]
    """[T] under the weights at the start of the step"""
    reference: npt.NDArray[np.float32] | None = None
    """[T] under the frozen reference, when KL is on"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one training step did. `skipped` steps changed no weight and no optimizer state."""

    metrics: Mapping[str, float]
    scores: Sequence[TrainerScores]
    optimizer_step: int
    """optimizer steps since the start of the run"""
    skipped: bool
    rng_digest: str
    phase_s: Mapping[str, float] = field(default_factory=dict)


class LearnerCopy(Protocol):
    """What a learner held at one moment, in memory of its own."""

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """As Learner.begin_save would have then. On any thread; asks nothing of the learner."""
        ...


class Learner(Protocol):
    """Weights, optimizer and RNG of the trainer. One instance lives as long as the process."""

    def restore(self, directory: Path, *, with_state: bool) -> None:
        """Load weights, and optimizer, schedule and RNG state when asked, from a verified checkpoint directory."""
        ...

    def train(self, batch: TrainBatch) -> StepOutcome:
        """One training step in memory. On an exception the state is undefined: `restore` before going on."""
        ...

    def reward_penalties(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """What to add to each reward before groups are normalised (the divergence from the reference, negative);
        zeros when that is off. Under the weights as they are: before `train`."""
        ...

    def save(self, directory: Path, *, with_state: bool = True) -> None:
        """Write model, config, tokenizer, probe, and (unless told otherwise) optimizer and RNG state into an empty
        directory.

        The probe holds the sequences of the last batch that the step pushed hardest (fixed prompts before the first
        step) with their log-probabilities under the weights being saved."""
        ...

    def begin_save(self, directory: Path, *, with_state: bool = True) -> Callable[[], None]:
        """As `save`, but for the probe, which takes computing and no disk: what is returned writes it. To be called
        before anything else is asked of the learner."""
        ...

    def copy(self, *, with_state: bool = True) -> LearnerCopy:
        """What `save` would write now, to be written later: training may go on meanwhile. Costs its size in memory,
        which the next copy may use again: the one before must be written, or given up, by then."""
        ...

    def manifest_fields(self) -> Mapping[str, Any]:
        """Manifest fields only the learner knows: dtype, tied, fingerprint, optimizer_step,
        library_versions, threads, device_type, logprob_chunk."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """tokenizer_digest, dtype: compared with each trajectory's."""
        ...

    def vocabulary_size(self) -> int:
        """Token ids at or above this are refused."""
        ...
