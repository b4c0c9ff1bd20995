"""The generator service: claims prompt requests, samples groups under proven weights, publishes trajectories.

Only an admitted worker with proven, activated weights takes requests. Claims stand in the heartbeat before
generation starts; a request is committed only after its trajectories are acknowledged by the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from infra.logs import event
from infra.policy_follower import PolicyFollower
from infra.ports import (
    CheckpointStore,
    Clock,
    Delivery,
    EngineRequest,
    EventReader,
    EventWriter,
    GenerationEngine,
    GroupReader,
    Message,
    RewardScorer,
)
from producers.assembly import ClaimedGroup, trajectories
from producers.claim_watch import ClaimWatch
from producers.intake import Intake, IntakeRules
from producers.outbox import NotSent, Outbox
from producers.pulse import Pulse
from producers.scoring import Scoring
from producers.switch_target import may_sample, may_serve
from producers.weights import WeightsKeeper, WeightsSettings
from schemas.errors import LogError
from schemas.headers import control_headers
from schemas.heartbeat import WorkerState
from schemas.ids import RunId
from schemas.policy_events import AnyPolicyEvent, WorkerJoined, WorkerLeft, encode_policy_event
from schemas.policy_state import Standing, WorkerKey
from schemas.topics import TopicName, topic
from schemas.trace_context import trace_id_of
from schemas.trajectory import Fingerprint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """Everything the service decides by."""

    run: RunId
    worker: str
    seed: int
    weights: WeightsSettings
    max_groups_in_flight: int
    heartbeat_s: float
    lease_s: float
    park_timeout_s: float
    """a request for a version we do not hold waits this long before it is taken under an older, allowed one"""
    keep_text: bool
    poison_after: int = 2
    """a request found in the last heartbeat of that many dead incarnations is not generated again"""
    rolling: bool = False
    """sample right after one's own proof, not only once the version is live"""


@dataclass(slots=True, kw_only=True)
class GeneratorPorts:
    """The outside world of a worker."""

    follower: PolicyFollower
    workers: EventReader
    """heartbeats of all workers, from the beginning"""
    prompts: GroupReader
    writer: EventWriter
    engine: GenerationEngine
    store: CheckpointStore
    reward: RewardScorer
    executor: Executor
    clock: Clock
    new_id: Callable[[], str]


class GeneratorService:
    """Call `step` until `finished`; `request_stop` drains first."""

    def __init__(self, settings: GeneratorSettings, ports: GeneratorPorts) -> None:
        self._s = settings
        self._p = ports
        self._policy_topic = topic(settings.run, TopicName.POLICY)
        self._prompts_topic = topic(settings.run, TopicName.PROMPTS)
        identity = ports.engine.identity()
        self._fingerprint = Fingerprint(
            tokenizer_digest=identity["tokenizer_digest"],
            dtype=identity["dtype"],
            engine=identity["engine"],
            engine_version=identity["engine_version"],
        )
        self._incarnation = ports.new_id()
        self._source = f"generator/{settings.worker}/{self._incarnation}"
        self.weights = WeightsKeeper(
            settings.weights,
            engine=ports.engine,
            store=ports.store,
            executor=ports.executor,
            clock=ports.clock,
            send=self._send_event,
        )
        self._outbox = Outbox(ports.writer, topic(settings.run, TopicName.TRAJECTORIES), self._source)
        self._scoring = Scoring(ports.reward)
        self._pulse = Pulse(settings.run, settings.worker, ports.clock, settings.heartbeat_s)
        self._intake = Intake(
            IntakeRules(run=settings.run, park_timeout_s=settings.park_timeout_s, poison_after=settings.poison_after),
            prompts=ports.prompts,
            writer=ports.writer,
            watch=ClaimWatch(ports.workers),
            clock=ports.clock,
        )
        self._running: dict[str, ClaimedGroup] = {}
        self._joined: Delivery | None = None
        ports.prompts.leave()  # a reader is a member from its beginning; partitions are for admitted workers only
        self._fresh_at_s = ports.clock.monotonic_s()
        self._ended_since_s: float | None = None
        self._asked: tuple[float, Future[int]] | None = None
        self._stopping = False
        self._stop_reason = ""
        self.finished = False

    @property
    def me(self) -> WorkerKey:
        """(worker, incarnation)"""
        return (self._s.worker, self._incarnation)

    def request_stop(self, reason: str) -> None:
        """Take no more requests, finish what runs, publish it, leave."""
        self._stopping = True
        self._stop_reason = reason

    def step(self) -> bool:
        """Do one bounded piece of work; False when there was nothing to do."""
        fold = self._p.follower.fold
        worked = bool(self._p.follower.advance())
        if not self._p.follower.reached_start_end():
            return worked  # acting on replayed activations would load retired checkpoints
        if self._joined is None and self._is_over():
            return worked
        if not self._take_part():
            return worked
        worked |= self.weights.step(fold, self.me)
        worked |= self._generate()
        worked |= self._score()
        worked |= self._publish()
        serving = may_serve(fold, self.me, self.weights.held, rolling=self._s.rolling) and not self._stopping
        # Only admitted workers hold prompt partitions.
        self._intake.subscribe(fold.workers[self.me[0]].standing is Standing.ADMITTED)
        if serving and not self.weights.holds_back and self._is_fresh():
            worked |= self._take_requests()
        self._pulse_if_due()
        if self._stopping and not self._claimed():
            self._leave()
            worked = True
        return worked

    def close(self) -> None:
        """Stop at once; what runs is generated again by others."""
        left = sorted(self._claimed())
        if left:
            event(log, "left_unpublished", level=logging.WARNING, groups=len(left), ids=" ".join(left))
        self._p.prompts.close()
        self._scoring.close()
        self._p.engine.close()

    # ------------------------------------------------------------------ membership

    def _take_part(self) -> bool:
        """Join, and join again under a new incarnation after an expiry. True when we are current in the fold."""
        fold = self._p.follower.fold
        if self._joined is None:
            event(log, "joining", worker=self._s.worker, incarnation=self._incarnation)
            self._joined = self._send_event(
                WorkerJoined(
                    run=self._s.run,
                    at_us=self._p.clock.now_us(),
                    worker=self._s.worker,
                    incarnation=self._incarnation,
                    engine=self._fingerprint.engine,
                    dtype=self._fingerprint.dtype,
                )
            )
            return False
        if not self._joined.done():
            return False
        try:
            offset = self._joined.result(0.0).offset
        except LogError as error:
            event(log, "join_not_delivered", level=logging.WARNING, reason=str(error))
            self._joined = None
            return False
        if fold.read_up_to <= offset:
            return False
        if fold.is_current(self.me):
            return not self._is_over()  # our own words may have reached the log behind the end of the run
        if fold.ended:
            self._finish("run ended")
            return False
        state = fold.workers.get(self._s.worker)
        if state is not None and state.incarnation != self._incarnation and state.joined_offset > offset:
            event(log, "replaced", level=logging.ERROR, worker=self._s.worker, by=state.incarnation)
            self._finish("another incarnation of this worker joined")
            return False
        if self._stopping:
            self._finish(self._stop_reason)
            return False
        # Our lease ran out while we lived (a pause, a partition): begin again under a new name.
        self._incarnation = self._p.new_id()
        self.weights.new_incarnation()
        self._joined = None
        return False

    def _is_over(self) -> bool:
        """The run had ended before anybody heard that we joined. It may be extended soon: one lease is waited."""
        now_s = self._p.clock.monotonic_s()
        if not self._p.follower.fold.ended:
            self._ended_since_s = None
            return False
        if self._ended_since_s is None:
            self._ended_since_s = now_s
        if self._stopping or now_s - self._ended_since_s >= self._s.lease_s:
            self._finish("the run has ended")
        return True

    def _leave(self) -> None:
        left = WorkerLeft(
            run=self._s.run,
            at_us=self._p.clock.now_us(),
            worker=self._s.worker,
            incarnation=self._incarnation,
            reason=self._stop_reason or "stopped",
        )
        self._send_event(left)
        self._beat()  # with no claims left: nobody shall think that this worker died over one
        self._finish(self._stop_reason or "stopped")

    def _finish(self, why: str) -> None:
        event(log, "worker_finished", worker=self._s.worker, why=why)
        self._intake.subscribe(False)
        self.finished = True

    def _is_fresh(self) -> bool:
        """Policy was read up to its end within one lease; a blind worker admits nothing."""
        now_s = self._p.clock.monotonic_s()
        if self._asked is None and now_s - self._fresh_at_s > self._s.lease_s / 3:
            self._asked = (now_s, self._p.executor.submit(self._p.follower.end_offset))
        if self._asked is not None and self._asked[1].done():
            try:
                if self._p.follower.read_up_to >= self._asked[1].result():
                    self._fresh_at_s, self._asked = self._asked[0], None
            except LogError as error:
                event(log, "policy_end_unknown", level=logging.WARNING, reason=str(error))
                self._asked = None
        return now_s - self._fresh_at_s <= self._s.lease_s

    # ------------------------------------------------------------------ work

    def _take_requests(self) -> bool:
        fold, held = self._p.follower.fold, self.weights.held
        assert held is not None
        claimed = self._claimed()
        room = self._s.max_groups_in_flight - len(claimed) - len(self._intake)
        if room > 0 and not self._outbox.is_stuck:
            self._intake.take(room, self._incarnation, fold, claimed)
        starting = self._intake.startable(fold, held)
        for group in starting:
            self._running[group.request.group_id] = group
        if starting:
            self._beat()  # claims stand in the heartbeat before generation starts
        for group in starting:
            _say("group_started", group, held, self._prompts_topic)
            self._p.engine.submit(EngineRequest(request=group.request, rng_seed=self._s.seed))
        return bool(starting)

    def _generate(self) -> bool:
        engine = self._p.engine
        # Kept requests must not go on under weights that are loaded but not live yet.
        allowed = may_sample(self._p.follower.fold, self.weights.held, rolling=self._s.rolling)
        if self.weights.working_in_background or not allowed or not engine.busy():
            self._pulse.idle()
            return False
        finished: list[ClaimedGroup] = []
        completions = engine.poll()
        for completion in completions:
            group = self._running[completion.group_id]
            group.completions[completion.index_in_group] = completion
            self._pulse.count_tokens(completion.sampled_tokens)
            if group.is_complete():
                finished.append(group)
        for group in finished:
            del self._running[group.request.group_id]
            self._scoring.put(group)
        self._pulse.busy()
        # An engine that computes by itself rings: looking again before that would only take its processor away.
        return bool(completions) or not engine.computes_alone()

    def _score(self) -> bool:
        """What has its rewards goes out."""
        scored = self._scoring.take()
        for group, rewards in scored:
            rows = trajectories(
                group,
                worker=self._s.worker,
                rewards=rewards,
                reward_function=self._p.reward.name,
                fingerprint=self._fingerprint,
                keep_text=self._s.keep_text,
                now_us=self._p.clock.now_us(),
            )
            self._outbox.put((group.partition, group.offset), rows, group.request.traceparent)
            _say("group_sampled", group, self.weights.held, self._prompts_topic)
            self._pulse.count_group()
        return bool(scored)

    def _claimed(self) -> frozenset[str]:
        """Groups taken and not yet acknowledged by the log: sampled, scored, or sent."""
        return frozenset(self._running) | self._scoring.group_ids() | self._outbox.group_ids()

    def _publish(self) -> bool:
        done = self._outbox.step()
        for partition, offset in done:
            self._intake.finish(partition, offset)
        self._intake.commit()
        return bool(done)

    # ------------------------------------------------------------------ events

    def _pulse_if_due(self) -> None:
        if self._pulse.is_due():
            self._beat()

    def _beat(self) -> None:
        claims = tuple(sorted(self._claimed()))
        message = self._pulse.message(self._incarnation, self._state(), self.weights.held, claims)
        try:
            self._p.writer.send(message)
        except LogError as error:
            event(log, "heartbeat_not_sent", level=logging.WARNING, reason=str(error))

    def _state(self) -> WorkerState:
        if self._stopping:
            return "leaving"
        if self.weights.stage.value in ("fetching", "draining", "loading", "proving"):
            return "loading"
        if self.weights.held is None:
            return "doubtful"
        return "serving" if self._running else "ready"

    def _send_event(self, policy_event: AnyPolicyEvent) -> Delivery:
        value = encode_policy_event(policy_event)
        headers = control_headers(policy_event, value, self._source)
        message = Message(topic=self._policy_topic, key=self._s.run.encode(), value=value, headers=headers)
        try:
            return self._p.writer.send(message)
        except LogError as error:
            return NotSent(error)


def _say(name: str, group: ClaimedGroup, version: int | None, prompts: str) -> None:
    """One line of a group's way, with the place and the trace of its request. DEBUG: there are thousands."""
    if log.isEnabledFor(logging.DEBUG):
        request = group.request
        event(
            log, name, level=logging.DEBUG, group=request.group_id, topic=prompts, partition=group.partition,
            offset=group.offset, policy_version=version, trace=trace_id_of(request.traceparent),
        )  # fmt: skip
