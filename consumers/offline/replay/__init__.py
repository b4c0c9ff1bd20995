"""Training steps made again from log and checkpoint store, and compared bit for bit with what they were (G6).

A step starts from its parent's stored, verified state. It goes on from the learner's own state only when that was just
found equal to the stored one, file by file, so a difference never hides in the steps behind it. Writes nothing but a
temporary directory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from consumers.offline.replay.batch import StepInput, batch_differences, is_whole, prepared, step_input
from consumers.offline.replay.compare import control_differences, file_differences, file_sha256, score_differences
from consumers.offline.replay.plan import ReplayPlan, has_state, retired_words, same_weights_as
from consumers.offline.replay.report import (
    Difference,
    Environment,
    ReplayedStep,
    environment_differences,
    environment_of,
)
from consumers.offline.replay.scores import StepScores
from consumers.offline.replay.whole import require_steps
from consumers.offline.run_log import RunLog
from consumers.offline.trained_steps import TrainedStep, trained_steps
from consumers.offline.wholeness import refuse_newer
from consumers.trainer.batch import Learner, StepOutcome
from consumers.trainer.step import Advantages, AgeWeights, PreparedStep, StepMaker
from infra.ports import CheckpointStore, Clock
from schemas.checkpoint import ADAPTER_NAME, WEIGHTS_NAME, Manifest
from schemas.errors import CheckpointError, IllegalState, StepFailed, StepRefused
from schemas.ids import RunId
from schemas.policy_events import VersionPublished
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrainer:
    """A learner and what its batches are made with, under one configuration of the run."""

    learner: Learner
    advantages: Advantages
    age_weights: AgeWeights
    kl_in_reward: bool
    environment: Environment
    """of this process"""
    notices: tuple[Difference, ...] = ()
    """what is known to be different before anything is trained"""


OpenRetrainer = Callable[[str, int | None], Retrainer]
"""(config digest of the step, threads it was trained with) -> the retrainer; called when either changes"""


def replay(
    run_log: RunLog, fold: PolicyFold, store: CheckpointStore, open_retrainer: OpenRetrainer, plan: ReplayPlan, *,
    clock: Clock, tell: Callable[[str], None] = lambda words: None,
) -> Generator[tuple[ReplayedStep, Path], None, None]:  # fmt: skip
    """Each step of the plan: its report, and a directory with the model as made here (until the next one is asked for).

    Args: fold: of the whole policy topic. tell: takes words on what is known before a step is trained.
    RangeMissing, IllegalState: before the first step, where the log no longer holds what the plan needs, or before the
    step whose rows retention removed or a newer build wrote."""
    if words := require_steps(run_log, fold, plan):
        tell(words)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="driftlog-replay-")))
        scores = StepScores(run_log)
        stack.callback(scores.close)
        steps = stack.enter_context(closing(trained_steps(run_log, first=plan.first, last=plan.last)))
        replayer = _Replayer(fold, plan, store, open_retrainer, scores, clock=clock, tell=tell)
        for step in steps:
            with TemporaryDirectory(dir=scratch) as directory:
                yield replayer.make(step, Path(directory)), Path(directory)


class _RecordedClock:
    """The wall clock stands where the step was recorded, so that ages come out the same; seconds are real."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at_us = 0

    def now_us(self) -> int:
        return self.at_us

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()


@dataclass(slots=True, kw_only=True)
class _Made:
    """What is known of one step so far."""

    step: TrainedStep
    manifest: Manifest | None = None
    """of the stored version; None: retired, or not to be trusted"""
    environment: tuple[Difference, ...] = ()
    started_from: Literal["memory", "checkpoint", "nothing"] = "nothing"
    differences: list[Difference] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    def report(self) -> ReplayedStep:
        """Of a step that could not be made."""
        control = self.step.control
        return ReplayedStep(
            version=control.version_out,
            parent=control.version_in,
            trained=False,
            started_from=self.started_from,
            differences=tuple(self.differences),
            environment=self.environment,
            not_compared=tuple(self.not_compared),
        )


class _Replayer:
    """Mutable: the learner, and which version it holds."""

    def __init__(
        self, fold: PolicyFold, plan: ReplayPlan, store: CheckpointStore, open_retrainer: OpenRetrainer,
        scores: StepScores, *, clock: Clock, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._fold = fold
        self._plan = plan
        self._store = store
        self._open = open_retrainer
        self._scores = scores
        self._clock = _RecordedClock(clock)
        self._tell = tell
        self._key: tuple[str, int | None] | None = None
        self._retrainer: Retrainer | None = None
        self._maker: StepMaker | None = None
        self._holds: int | None = None
        """version whose weights and state the learner has; None: not known"""
        self._astray = False
        """it holds that version as it came out here, which is not as it is stored"""
        self._told: tuple[Difference, ...] = ()

    def make(self, step: TrainedStep, directory: Path) -> ReplayedStep:
        """One step, from its parent to the comparison."""
        for problem in step.problems:
            refuse_newer(problem.detail, f"{step.control.run}.trajectories[{problem.partition}]@{problem.offset}")
        made = _Made(step=step)
        self._find_stored(made)
        retrainer = self._prepare_learner(made)
        batch_in, found = step_input(step, self._fold)
        made.differences += found
        if not is_whole(step):
            self._holds = None
            return made.report()
        if not self._start(made, retrainer.learner):
            return made.report()
        try:
            batch, outcome = self._train(batch_in, retrainer.learner)
        except (StepRefused, StepFailed, IllegalState) as error:
            self._holds = None
            made.differences.append(
                Difference(part="step", subject=f"version {step.control.version_out}", detail=str(error))
            )
            return made.report()
        return self._compared(made, batch, outcome, retrainer.learner, directory)

    # ------------------------------------------------------------------ before

    def _find_stored(self, made: _Made) -> None:
        """The manifest of the version the step made."""
        version = made.step.control.version_out
        state = self._fold.versions.get(version)
        if state is None:
            words = "its VersionPublished is not in the policy topic"
            made.differences.append(Difference(part="weights", subject=f"version {version}", detail=words))
        elif state.status is VersionStatus.RETIRED:
            words = retired_words(version, self._plan.retired)
            made.not_compared.append(f"weights and state: version {version} {words}")
        else:
            try:
                _, made.manifest = self._store.fetch(state.event.manifest_uri, state.event.manifest_sha256)
            except CheckpointError as error:
                words = f"its stored checkpoint is not what was published: {error}"
                made.differences.append(Difference(part="weights", subject=f"version {version}", detail=words))

    def _prepare_learner(self, made: _Made) -> Retrainer:
        """The learner of this step's configuration; differences of the environment are told before it is used."""
        manifest, digest = made.manifest, made.step.control.config_digest
        key = (digest, None if manifest is None else manifest.threads)
        unknown = manifest is None and self._key is not None and self._key[0] == digest
        if self._retrainer is None or self._maker is None or not (key == self._key or unknown):
            self._retrainer, self._holds, self._key = self._open(*key), None, key
            learner = self._retrainer.learner
            self._maker = StepMaker(
                clock=self._clock,
                advantages=self._retrainer.advantages,
                age_weights=self._retrainer.age_weights,
                penalties=learner.reward_penalties if self._retrainer.kl_in_reward else None,
            )
        found = self._retrainer.notices
        if manifest is not None:
            found += environment_differences(environment_of(manifest), self._retrainer.environment)
        made.environment = found
        if found != self._told:
            for difference in found:
                self._tell(f"version {made.step.control.version_out}: {difference} (bits may differ: no corruption)")
            self._told = found
        return self._retrainer

    def _start(self, made: _Made, learner: Learner) -> bool:
        """Put the learner where the step began: as it is when it holds that, otherwise from the store."""
        parent = made.step.control.version_in
        root = same_weights_as(self._fold, parent)
        if self._holds == root and not self._astray:
            made.started_from = "memory"
            return True
        event = has_state(self._fold, parent) or has_state(self._fold, root)
        if event is not None:
            self._holds = None
            try:
                self._restore(learner, event)
            except CheckpointError as error:
                made.differences.append(Difference(part="state", subject=f"version {parent}", detail=str(error)))
                return False
            made.started_from, self._holds, self._astray = "checkpoint", root, False
            return True
        if self._holds == root:
            words = (
                "came out otherwise here, and was stored without optimizer state: the step goes on from what came out"
            )
            made.differences.append(Difference(part="state", subject=f"version {parent}", detail=words))
            made.started_from = "memory"
            return True
        words = "neither stored with state nor made here just before"
        made.differences.append(Difference(part="state", subject=f"version {parent}", detail=words))
        return False

    def _restore(self, learner: Learner, event: VersionPublished) -> None:
        directory, _ = self._store.fetch(event.manifest_uri, event.manifest_sha256)
        learner.restore(directory, with_state=True)

    # ------------------------------------------------------------------ the step and after

    def _train(self, batch_in: StepInput, learner: Learner) -> tuple[PreparedStep, StepOutcome]:
        assert self._maker is not None
        batch = prepared(batch_in, self._maker)
        return batch, self._maker.train(learner, batch)

    def _compared(
        self, made: _Made, batch: PreparedStep, outcome: StepOutcome, learner: Learner, directory: Path
    ) -> ReplayedStep:
        assert self._maker is not None
        recorded = made.step.control
        self._clock.at_us = recorded.at_us
        here = self._maker.completed(
            batch, outcome, made.step.transaction.decisions, run=RunId(recorded.run), position=recorded.position,
            policy_read_up_to=recorded.policy_read_up_to, config_digest=recorded.config_digest,
            code_revision=recorded.code_revision, publish_s=0.0,
        )  # fmt: skip
        made.differences += batch_differences(made.step, batch)
        made.differences += control_differences(recorded, here)
        scores = self._compare_scores(made, batch, outcome)
        files = self._compare_files(made, learner, outcome, directory)
        seconds = [sum(control.phase_s.get(name, 0.0) for name in ("batch", "train")) for control in (recorded, here)]
        return replace(
            made.report(),
            trained=True,
            batch_digest=here.batch_digest,
            weights_sha256=files.get(WEIGHTS_NAME) or files.get(ADAPTER_NAME, ""),
            files_compared=() if made.manifest is None else tuple(sorted(files)),
            metrics_compared=len(recorded.metrics),
            scores_compared=scores,
            recorded_s=seconds[0],
            replay_s=seconds[1],
        )

    def _compare_scores(self, made: _Made, batch: PreparedStep, outcome: StepOutcome) -> int:
        recorded, problems = self._scores.of(made.step.control.version_in)
        made.differences += [Difference(part="scores", subject="scores", detail=words) for words in problems]
        if not recorded and not self._scores.is_whole:
            made.not_compared.append("scores: retention has removed them")
            return 0
        compared, found = score_differences(recorded, batch.scores_by_group(outcome))
        made.differences += found
        return compared

    def _compare_files(self, made: _Made, learner: Learner, outcome: StepOutcome, directory: Path) -> Mapping[str, str]:
        """Save as the trainer did, and compare file by file; then the learner is known to hold the version, or not."""
        manifest, version = made.manifest, made.step.control.version_out
        learner.save(directory, with_state=manifest is None or manifest.has_state)
        files = {path.name: file_sha256(path) for path in sorted(directory.iterdir())}
        found: list[Difference] = []
        if manifest is not None:
            found = file_differences(manifest, files)
            if manifest.optimizer_step != outcome.optimizer_step:
                words = f"{outcome.optimizer_step} after the step, the manifest says {manifest.optimizer_step}"
                found.append(Difference(part="state", subject="optimizer_step", detail=words))
            if not manifest.has_state:
                made.not_compared.append(f"optimizer state: version {version} was saved without it")
        made.differences += found
        self._holds = version
        # Where no state is stored, nothing but the rest of the comparison tells whether the learner's own is right.
        self._astray = bool(found if manifest is not None and manifest.has_state else made.differences)
        return files
