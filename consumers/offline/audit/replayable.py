"""G6: every step names what makes it repeatable, and what it names agrees with what was stored.

That a step comes out the same is shown by training it again (`driftlog replay --verify`), not here. A state that
retention or `checkpoints.state_every` left out is no finding: such steps are only not counted as replayable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from consumers.offline.audit.index import RunIndex
from consumers.offline.audit.report import Findings
from schemas.checkpoint import TRAINER_STATE_NAME, Manifest
from schemas.ledger import StepCompleted
from schemas.policy_events import VersionPublished
from schemas.policy_state import VersionState, VersionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a verified checkpoint says of the step that made it."""

    manifest: Manifest
    rng_digest: str | None
    """over the generators' state in it; None: saved without state"""


def stored(directory: Path, manifest: Manifest) -> Stored:
    """Reads a directory that was verified just now."""
    return Stored(manifest=manifest, rng_digest=_saved_rng_digest(directory) if manifest.has_state else None)


def check_replayable(index: RunIndex, checkpoints: Mapping[int, Stored] | None, findings: Findings) -> dict[str, int]:
    """How many steps can be trained again, and how many generator states were compared.

    `checkpoints`: of the versions that could be read; None: no store was asked, only the log is judged."""
    compared = 0
    for _, step in index.steps():
        version = step.version_out
        problems = _unnamed(step)
        at = None if checkpoints is None else checkpoints.get(version)
        if at is not None:
            compared += at.rng_digest is not None
            problems += _disagreements(step, at)
        for problem in problems:
            findings.error("G6.replayable", f"version {version}", problem, version=version)
    for version, checkpoint in sorted((checkpoints or {}).items()):
        for problem in _manifest_problems(index.fold.versions[version].event, checkpoint.manifest):
            findings.error("G6.replayable", f"version {version}", problem, version=version)
    return {"steps_replayable": _count_replayable(index, checkpoints), "rng_states_compared": compared}


def _unnamed(step: StepCompleted) -> list[str]:
    names = ("rng_digest", "batch_digest", "config_digest", "code_revision")
    return [f"its StepCompleted names no {name}" for name in names if not getattr(step, name)]


def _disagreements(step: StepCompleted, at: Stored) -> list[str]:
    problems = []
    for name in ("config_digest", "code_revision"):
        said, found = getattr(step, name), getattr(at.manifest, name)
        if said != found:
            problems.append(f"{name} is {said!r} in its StepCompleted, {found!r} in the manifest of what it made")
    if at.rng_digest is not None and at.rng_digest != step.rng_digest:
        problems.append(
            f"RNG state {step.rng_digest[:12]}... in its StepCompleted, {at.rng_digest[:12]}... in what it saved"
        )
    return problems


def _manifest_problems(event: VersionPublished, manifest: Manifest) -> list[str]:
    problems = []
    if event.has_state != manifest.has_state:
        said, found = (("with" if there else "without") for there in (event.has_state, manifest.has_state))
        problems.append(f"published {said} optimizer and RNG state, saved {found} it by its manifest")
    elif manifest.has_state and all(entry.name != TRAINER_STATE_NAME for entry in manifest.files):
        problems.append(f"its manifest says that it has state, and lists no {TRAINER_STATE_NAME}")
    missing = [
        name
        for name, there in (
            ("library versions", bool(manifest.library_versions)),
            ("threads", manifest.threads >= 1),
            ("ranks", manifest.ranks >= 1),
            ("device type", bool(manifest.device_type)),
            ("log-probability chunk", manifest.logprob_chunk >= 1),
            ("code revision", bool(manifest.code_revision)),
            ("configuration", bool(manifest.config_digest)),
        )
        if not there
    ]
    if missing:
        problems.append(f"its manifest does not name: {', '.join(missing)}")
    return problems


def _count_replayable(index: RunIndex, checkpoints: Mapping[int, Stored] | None) -> int:
    """Steps that can be trained again, where need be through those between."""
    versions = index.fold.versions
    had: set[int] = set()
    """versions whose weights and state are kept, or come out of those before them"""
    for version, state in sorted(versions.items()):  # a parent's number is the smaller one
        if _keeps_state(version, state, checkpoints) or state.event.parent in had:
            had.add(version)
    made = (versions.get(step.version_out) for _, step in index.steps())
    return sum(state is not None and state.event.parent in had for state in made)


def _keeps_state(version: int, state: VersionState, checkpoints: Mapping[int, Stored] | None) -> bool:
    if state.status is VersionStatus.RETIRED or not state.event.has_state:
        return False
    return checkpoints is None or (version in checkpoints and checkpoints[version].manifest.has_state)


def _saved_rng_digest(directory: Path) -> str | None:
    # torch comes with it: a reader of events alone does not pay for that.
    from consumers.trainer.learner_state import TrainerState

    path = directory / TRAINER_STATE_NAME
    if not path.exists():
        return None  # said of the manifest
    try:
        return TrainerState.model_validate_json(path.read_bytes()).rng_digest()
    except ValidationError:
        return None  # the state of another learner: it says itself what it is
