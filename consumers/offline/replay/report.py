"""What a replay says: differences by part, the environment here against that of the training, one report a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from schemas.checkpoint import Manifest

Part = Literal["environment", "data", "state", "step", "metrics", "scores", "weights"]
PARTS: tuple[tuple[Part, str], ...] = (
    ("environment", "libraries, threads, device or code are not those of the training: no sign of corruption"),
    ("data", "the log or the ledger does not hold what the step was trained on"),
    ("state", "what the step starts from, or leaves behind beside the weights: optimizer, counters, RNG"),
    ("step", "the step cannot be made at all"),
    ("metrics", "a logged number is another one"),
    ("scores", "the trainer's log-probabilities are others"),
    ("weights", "the bytes of the new version are others"),
)
"""in the order in which one follows from another"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it was."""

    part: Part
    subject: str
    """a trajectory, a metric, a file, a setting"""
    detail: str
    place: str = ""
    """position in the log, where it has one"""

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        return f"{self.part}: {self.subject}{at}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What besides log and state decides the last bits of a training step."""

    library_versions: Mapping[str, str]
    threads: int
    ranks: int
    device_type: str
    logprob_chunk: int
    code_revision: str


def environment_of(manifest: Manifest) -> Environment:
    """As it was when this checkpoint was made."""
    return Environment(
        library_versions=manifest.library_versions,
        threads=manifest.threads,
        ranks=manifest.ranks,
        device_type=manifest.device_type,
        logprob_chunk=manifest.logprob_chunk,
        code_revision=manifest.code_revision,
    )


def environment_differences(recorded: Environment, here: Environment) -> tuple[Difference, ...]:
    """Each part that is another one here."""
    return tuple(
        Difference(part="environment", subject=name, detail=f"{then} when it was trained, {now} here")
        for (name, then), (_, now) in zip(_parts(recorded, here), _parts(here, recorded), strict=True)
        if then != now
    )


def _parts(one: Environment, other: Environment) -> Iterator[tuple[str, object]]:
    for name in sorted(one.library_versions.keys() | other.library_versions.keys()):
        yield name, one.library_versions.get(name, "absent")
    yield "threads", one.threads
    yield "ranks", one.ranks
    yield "device", one.device_type
    yield "logprob_chunk", one.logprob_chunk
    yield "code", one.code_revision


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One training step, made again."""

    version: int
    parent: int
    trained: bool
    """False: it could not be made again; `differences` say why"""
    started_from: Literal["memory", "checkpoint", "nothing"]
    """memory: the weights the step before left here, equal to those stored"""
    differences: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    batch_digest: str = ""
    weights_sha256: str = ""
    files_compared: tuple[str, ...] = ()
    metrics_compared: int = 0
    scores_compared: int = 0
    not_compared: tuple[str, ...] = ()
    """what is no longer stored, in words"""
    recorded_s: float = 0.0
    """seconds of batch and training, as the ledger has them"""
    replay_s: float = 0.0
    """the same here"""

    @property
    def equal(self) -> bool:
        """Everything that was compared is equal."""
        return self.trained and not self.differences

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts that differ, causes first."""
        found = {difference.part for difference in self.differences}
        if found and self.environment:
            found.add("environment")
        return tuple(part for part, _ in PARTS if part in found)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "equal": self.equal, "parts": list(self.parts)}

    def lines(self, most: int = 8) -> list[str]:
        """Words for a person; at most that many differences."""
        head = f"version {self.version} <- {self.parent} (from {self.started_from}): "
        if self.equal:
            compared = f"{len(self.files_compared)} files, {self.metrics_compared} metrics"
            words = f"equal: weights {self.weights_sha256[:12]}..., {compared}, {self.scores_compared} scores"
            return [head + words, *(f"  not compared: {what}" for what in self.not_compared)]
        made = "DIFFERS" if self.trained else "NOT MADE AGAIN"
        shown = [f"  {difference}" for difference in self.differences[:most]]
        left = len(self.differences) - len(shown)
        return [
            f"{head}{made} in {', '.join(self.parts)}",
            *shown,
            *([f"  ... and {left} more (--json shows all)"] if left else []),
            *(f"  but here {difference}" for difference in self.environment),
            *(f"  not compared: {what}" for what in self.not_compared),
        ]


@dataclass(slots=True, kw_only=True)
class ReplaySum:
    """Adds up over the steps."""

    replayed: int = 0
    mismatched: int = 0
    recorded_s: float = 0.0
    replay_s: float = 0.0
    versions: list[int] = field(default_factory=list)
    """that differ"""

    def add(self, step: ReplayedStep) -> None:
        """One more."""
        self.replayed += step.trained
        if not step.equal:
            self.mismatched += 1
            self.versions.append(step.version)
        if step.trained:
            self.recorded_s += step.recorded_s
            self.replay_s += step.replay_s

    def to_dict(self) -> dict[str, Any]:
        """The last line of --json."""
        speed = self.recorded_s / self.replay_s if self.replay_s > 0 else 0.0
        return {"replayed": self.replayed, "mismatched": self.mismatched, "speed_vs_training": round(speed, 3)}
