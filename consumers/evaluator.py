"""The evaluator service: asks held-out prompts of activated versions, on an engine of its own, off the training path.

Guarantees: nothing waits for it; a version's answers are one record, so a version is there whole or not at all; what
its topic holds is never asked again, also after a restart; a version that falls behind, is retired or cannot be
loaded is left out with a reason; after RunEnded it ends within a bound.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from consumers.evaluation import scores_of
from consumers.evaluation_plan import Ask, choose, evaluation_requests, evaluation_rows
from infra.logs import event
from infra.policy_follower import PolicyFollower
from infra.ports import (
    CheckpointStore,
    Clock,
    Completion,
    Delivery,
    EngineRequest,
    EventReader,
    EventWriter,
    GenerationEngine,
    Message,
    Prompt,
    Reward,
    RewardScorer,
)
from schemas.errors import BudgetExhausted, CheckpointError, InvalidRecord, LogUnavailable, MessageTooLarge
from schemas.evaluation_codec import EvaluationRow, decode_evaluation, encode_evaluation, evaluation_headers
from schemas.ids import RunId
from schemas.policy_events import VersionPublished
from schemas.policy_state import VersionStatus
from schemas.topics import TopicName, topic
from schemas.trajectory import PromptRequest

log = logging.getLogger(__name__)

_POLL_RECORDS = 200
# No worker's proof stands behind these answers, and none of their rows names one.
_NO_PROOF = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSettings:
    """Everything the service decides by."""

    run: RunId
    seed: int
    every_versions: int
    prompts: tuple[Prompt, ...]
    asks: tuple[Ask, ...]
    load_tries: int = 2
    retry_wait_s: float = 1.0
    end_limit_s: float = 120.0
    """after RunEnded was read, what is not evaluated by then is left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorPorts:
    """The outside world of the evaluator."""

    follower: PolicyFollower
    evaluations: EventReader
    """of the evaluations topic, from its beginning"""
    writer: EventWriter
    engine: GenerationEngine
    store: CheckpointStore
    reward: RewardScorer
    executor: Executor
    clock: Clock


@dataclass(slots=True, kw_only=True)
class _Loading:
    """Fetch and load, on the executor."""

    version: int
    future: Future[None] | None = None
    """None: not begun, or waits for its next try"""
    tries: int = 0
    not_before_s: float = float("-inf")


@dataclass(slots=True, kw_only=True)
class _Answering:
    """The engine is at work."""

    version: int
    requests: dict[str, PromptRequest]
    arrived: dict[str, list[Completion]] = field(default_factory=dict)
    """of groups that are not complete"""
    scoring: list[tuple[PromptRequest, list[Completion], Future[Sequence[Reward]]]] = field(default_factory=list)
    rows: list[list[EvaluationRow]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Writing:
    """All answers are there."""

    version: int
    rows: tuple[EvaluationRow, ...]
    read_up_to: int | None = None
    """end of the topic, asked for after the last answer: another evaluator may have written the version meanwhile"""
    delivery: Delivery | None = None


class EvaluatorService:
    """Call `step` until `finished`, then `close`."""

    def __init__(self, settings: EvaluatorSettings, ports: EvaluatorPorts) -> None:
        self._s = settings
        self._p = ports
        self._place = (topic(settings.run, TopicName.EVALUATIONS), 0)
        self._work: _Loading | _Answering | _Writing | None = None
        self.evaluated: set[int] = set()
        """versions in the topic"""
        self.left_out: dict[int, str] = {}
        """version -> why this process did not evaluate it"""
        self._start_end: int | None = None
        self._idle_at: int | None = None
        """policy offset up to which there is nothing to evaluate"""
        self._ended_at_s: float | None = None
        self._out_of_time = False
        self._log_is_away = False

    @property
    def finished(self) -> bool:
        """The run has ended, and its last version is evaluated, left out, or out of time."""
        fold = self._p.follower.fold
        idle = self._work is None and self._idle_at == self._p.follower.read_up_to
        return self._ended_at_s is not None and fold.ended and (idle or self._out_of_time)

    def step(self) -> bool:
        """One bounded piece of work; False when there was nothing to do. An outage of the log is waited out."""
        try:
            worked = self._step()
        except LogUnavailable as error:
            if not self._log_is_away:
                event(log, "log_unavailable", level=logging.WARNING, reason=str(error))
            self._log_is_away = True
            return False
        self._log_is_away = False
        return worked

    def close(self) -> None:
        """What is not in the topic will be asked again by the next process. Safe to call twice."""
        self._p.engine.close()

    def _step(self) -> bool:
        worked = bool(self._p.follower.advance()) | self._read_evaluations()
        if not self._has_read_start():
            return worked
        self._watch_end()
        if self._out_of_time:
            return worked
        match self._work:
            case None:
                return self._begin() or worked
            case _Loading() as loading:
                return self._load(loading) or worked
            case _Answering() as answering:
                return self._answer(answering) or worked
            case _Writing() as writing:
                return self._write(writing) or worked

    # ------------------------------------------------------------------ the log

    def _read_evaluations(self) -> bool:
        records = self._p.evaluations.poll(_POLL_RECORDS)
        for record in records:
            try:
                rows = decode_evaluation(record.value, record.headers)
            except InvalidRecord as error:
                event(
                    log, "evaluation_undecodable", level=logging.WARNING, topic=record.topic,
                    partition=record.partition, offset=record.offset, reason=str(error),
                )  # fmt: skip
                continue
            self.evaluated.update(row.version for row in rows)
        return bool(records)

    def _has_read_start(self) -> bool:
        """Both topics are read as far as they went when this process began: before, an evaluated version looks new."""
        if self._start_end is None:
            self._start_end = self._p.evaluations.end_offsets()[self._place]
        return self._p.follower.reached_start_end() and self._p.evaluations.positions()[self._place] >= self._start_end

    def _watch_end(self) -> None:
        fold, now_s = self._p.follower.fold, self._p.clock.monotonic_s()
        if not fold.ended:
            self._ended_at_s = None
        elif self._ended_at_s is None:
            self._ended_at_s = now_s
        elif now_s - self._ended_at_s > self._s.end_limit_s and not (self._out_of_time or self.finished):
            self._out_of_time = True
            version = None if self._work is None else self._work.version
            event(
                log,
                "evaluation_out_of_time",
                level=logging.WARNING,
                policy_version=version,
                limit_s=self._s.end_limit_s,
            )

    # ------------------------------------------------------------------ one version

    def _begin(self) -> bool:
        follower = self._p.follower
        if self._idle_at == follower.read_up_to:
            return False
        choice = choose(follower.fold, self._s.every_versions, self.evaluated | self.left_out.keys())
        for version, reason in choice.skipped:
            self._leave_out(version, reason)
        if choice.version is None:
            self._idle_at = follower.read_up_to
            return bool(choice.skipped)
        event(log, "evaluation_started", policy_version=choice.version)
        self._work = _Loading(version=choice.version)
        return True

    def _load(self, loading: _Loading) -> bool:
        if loading.future is None:
            if self._p.clock.monotonic_s() < loading.not_before_s:
                return False
            published = self._p.follower.fold.versions[loading.version].event
            loading.future = self._p.executor.submit(self._fetch_and_load, published)
        if not loading.future.done():
            return False
        try:
            loading.future.result()
        except (CheckpointError, OSError) as error:  # OSError: the files were removed under the reader
            self._load_failed(loading, str(error))
            return True
        requests = evaluation_requests(self._s.prompts, self._s.asks, loading.version)
        for request in requests:
            self._p.engine.submit(EngineRequest(request=request, rng_seed=self._s.seed))
        self._work = _Answering(version=loading.version, requests={str(r.group_id): r for r in requests})
        return True

    def _fetch_and_load(self, published: VersionPublished) -> None:
        """On the executor's thread, while nothing else uses the engine."""
        directory, _ = self._p.store.fetch(published.manifest_uri, published.manifest_sha256)
        engine = self._p.engine
        engine.pause("keep")
        engine.load(directory, published.version)
        engine.set_proof(_NO_PROOF)
        engine.resume()

    def _load_failed(self, loading: _Loading, reason: str) -> None:
        loading.future = None
        loading.tries += 1
        loading.not_before_s = self._p.clock.monotonic_s() + self._s.retry_wait_s
        if self._p.follower.fold.versions[loading.version].status is VersionStatus.RETIRED:
            self._leave_out(loading.version, "retired while it was being loaded")
        elif loading.tries >= self._s.load_tries:
            self._leave_out(loading.version, f"not loaded in {loading.tries} tries: {reason}")

    def _answer(self, answering: _Answering) -> bool:
        engine = self._p.engine
        completions = engine.poll()
        worked = bool(completions) or (engine.busy() and not engine.computes_alone())
        for completion in completions:
            request = answering.requests[completion.group_id]
            members = answering.arrived.setdefault(completion.group_id, [])
            members.append(completion)
            if len(members) == request.group_size:
                del answering.arrived[completion.group_id]
                answering.scoring.append((request, members, self._p.reward.submit(request, members)))
        for scored in [scoring for scoring in answering.scoring if scoring[2].done()]:
            answering.scoring.remove(scored)
            request, members, future = scored
            at_us = self._p.clock.now_us()
            rows = evaluation_rows(request, members, future.result(), version=answering.version, at_us=at_us)
            answering.rows.append(rows)
            worked = True
        if len(answering.rows) == len(answering.requests):
            every = [row for group in answering.rows for row in group]
            every.sort(key=lambda row: (row.prompt_id, row.temperature, row.sample))
            self._work = _Writing(version=answering.version, rows=tuple(every))
        return worked

    def _write(self, writing: _Writing) -> bool:
        if writing.delivery is None:
            return self._send(writing)
        if not writing.delivery.done():
            return False
        # A failed delivery ends the process: the next one reads what the topic holds.
        writing.delivery.result(0.0)
        self.evaluated.add(writing.version)
        self._rest()
        scores = scores_of(writing.rows)
        event(log, "evaluated", policy_version=writing.version, answers=scores.answers, scores=scores.words)
        return True

    def _send(self, writing: _Writing) -> bool:
        if writing.read_up_to is None:
            writing.read_up_to = self._p.evaluations.end_offsets()[self._place]
        if self._p.evaluations.positions()[self._place] < writing.read_up_to:
            return False
        if writing.version in self.evaluated:
            self._leave_out(writing.version, "another evaluator was first")
            return True
        try:
            writing.delivery = self._p.writer.send(self._message(writing.rows))
        except BudgetExhausted:
            return False
        except MessageTooLarge as error:
            self._leave_out(writing.version, f"its answers are too many for one record: {error}")
        return True

    def _message(self, rows: Sequence[EvaluationRow]) -> Message:
        value = encode_evaluation(rows)
        key = str(rows[0].version).encode()
        return Message(
            topic=self._place[0],
            key=key,
            value=value,
            headers=evaluation_headers(rows, value, "evaluator"),
            partition=0,
        )

    def _leave_out(self, version: int, reason: str) -> None:
        self.left_out[version] = reason
        event(log, "evaluation_skipped", level=logging.WARNING, policy_version=version, reason=reason)
        if self._work is not None and self._work.version == version:
            self._rest()

    def _rest(self) -> None:
        self._work = None
        self._idle_at = None
