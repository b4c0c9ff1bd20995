"""What a step left behind, held against what is stored: StepCompleted, the scores topic, the files of the checkpoint.

Equal means equal: numbers bit for bit, files by sha256. The only tolerance is the list of metrics that are no results.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from consumers.offline.replay.report import Difference, Part
from consumers.trainer.batch import TrainerScores
from consumers.trainer.learner_state import LORA_NAME, REFERENCE_NAME
from consumers.trainer.transactions import GroupScores
from schemas.checkpoint import OPTIMIZER_NAME, TRAINER_STATE_NAME, Manifest
from schemas.ledger import StepCompleted
from schemas.scores_codec import ScoreRow
from schemas.trajectory import FloatArray

NOT_RESULTS = {
    "trainer/idle_fraction": "share of the seconds since the step before: of the clock, not of the step",
    "trainer/publication_behind_seconds": "seconds a publication took",
}
"""metrics that are left out, and why; ages are not among them: they follow from the recorded time of the step"""

_CHUNK_BYTES = 8 << 20
STATE_FILES = (OPTIMIZER_NAME, TRAINER_STATE_NAME, REFERENCE_NAME, LORA_NAME)


def control_differences(recorded: StepCompleted, here: StepCompleted) -> list[Difference]:
    """Every logged metric, which of them were not finite, the counts, and the RNG state."""
    found = [
        Difference(part="metrics", subject=name, detail=words)
        for name, words in _metric_words(results(recorded.metrics), results(here.metrics))
    ]
    left, right = set(recorded.metrics_nonfinite), set(here.metrics_nonfinite)
    for name in sorted(left ^ right):
        when = "when it was trained" if name in left else "here"
        found.append(Difference(part="metrics", subject=name, detail=f"not finite {when} only"))
    for name in ("groups", "trajectories"):
        said, made = getattr(recorded, name), getattr(here, name)
        if said != made:
            found.append(Difference(part="data", subject=name, detail=f"{said} in the ledger, {made} made again"))
    if recorded.rng_digest != here.rng_digest:
        words = f"RNG state {here.rng_digest[:12]}... after the step, the ledger says {recorded.rng_digest[:12]}..."
        found.append(Difference(part="state", subject="rng_digest", detail=words))
    return found


def results(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are compared."""
    return {name: value for name, value in metrics.items() if name not in NOT_RESULTS}


def _metric_words(recorded: Mapping[str, float], here: Mapping[str, float]) -> list[tuple[str, str]]:
    found = []
    for name in sorted(recorded.keys() | here.keys()):
        said, made = recorded.get(name), here.get(name)
        if said is None or made is None:
            found.append((name, f"{said!r} when it was trained, {made!r} here"))
        elif said != made:
            found.append((name, f"{said!r} when it was trained, {made!r} here, by {made - said:g}"))
    return found


# ---------------------------------------------------------------------- scores


def score_differences(recorded: Mapping[str, ScoreRow], groups: Sequence[GroupScores]) -> tuple[int, list[Difference]]:
    """Log-probabilities of every row that was trained for the first time: (rows compared, differences)."""
    made = {row.trajectory_id: row for _, rows in groups for row in rows}
    found = []
    for trajectory_id in sorted(recorded.keys() | made.keys()):
        words = _score_words(recorded.get(trajectory_id), made.get(trajectory_id))
        if words:
            found.append(Difference(part="scores", subject=trajectory_id, detail=words))
    return len(recorded.keys() & made.keys()), found


def _score_words(recorded: ScoreRow | None, here: TrainerScores | None) -> str:
    if recorded is None:
        return "no scores of it are in the log for this step"
    if here is None:
        return "the log has scores of it for this step, which does not train it"
    for name, said, made in (
        ("proximal", recorded.proximal, here.proximal),
        ("reference", recorded.reference, here.reference),
    ):
        if said is None or made is None:
            if said is not made:
                return f"{name} log-probabilities are there only {'here' if said is None else 'in the log'}"
        elif not _same(said, made):
            return f"{name} log-probabilities differ {_how_much(said, made)}"
    return ""


def _same(one: FloatArray, other: FloatArray) -> bool:
    return len(one) == len(other) and one.tobytes() == other.astype(np.float32).tobytes()


def _how_much(one: FloatArray, other: FloatArray) -> str:
    if len(one) != len(other):
        return f"in length: {len(one)} and {len(other)} tokens"
    gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
    most = float(gaps.max(initial=0.0))
    return f"at {int((one != other).sum())} of {len(one)} tokens, by {most:g} at most" if math.isfinite(most) else ""


# ---------------------------------------------------------------------- files


def file_sha256(path: Path) -> str:
    """sha256 hex of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def file_differences(manifest: Manifest, saved: Mapping[str, str]) -> list[Difference]:
    """Every file of the stored checkpoint against what the learner saved here: name -> sha256."""
    stored = {entry.name: entry.sha256 for entry in manifest.files}
    found = []
    for name in sorted(stored.keys() | saved.keys()):
        said, made = stored.get(name), saved.get(name)
        if said != made:
            words = f"sha256 {_short(made)} here, the manifest says {_short(said)}"
            found.append(Difference(part=_part_of(name), subject=name, detail=words))
    return found


def _short(sha256: str | None) -> str:
    return "none (no such file)" if sha256 is None else f"{sha256[:12]}..."


def _part_of(name: str) -> Part:
    """Training goes on from the state; everything else is the model that a worker loads, and its probe."""
    return "state" if name in STATE_FILES else "weights"
