"""A run's `policy`, `ledger` and `evaluations` in the in-memory log, written by hand, and a tracker to mirror it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from consumers.offline.mirror import Expected, expected_mirror
from consumers.projection import origin_of
from consumers.projector import ProjectorPorts, ProjectorService, ProjectorSettings
from infra.ports import ExperimentTracker, Message, Record
from infra.tracker_port import EndStatus, Promotions, RangeRead, RunOrigin
from schemas import policy_events as ev
from schemas.errors import TrackerUnavailable
from schemas.evaluation_codec import EvaluationRow, encode_evaluation, evaluation_headers
from schemas.headers import control_headers
from schemas.ids import RunId
from schemas.ledger import (
    AnyLedgerControl,
    Decision,
    DecisionRow,
    LedgerEnded,
    PartitionProgress,
    Position,
    Settled,
    StepCompleted,
    Subject,
    encode_ledger_control,
)
from schemas.ledger_codec import decisions_headers, encode_decisions
from tests.fakes.memory_log import MemoryLog
from tests.fakes.memory_ports import MemoryEventReader
from tests.fakes.virtual_clock import START_US, VirtualClock

RUN = RunId("demo")
TOPICS = {"demo.policy": 1, "demo.ledger": 1, "demo.evaluations": 1}
RECORDS_A_STEP = 4
PARAMS = ({"lr": "1e-3"},)
BEST = "critic/rewards/mean"
ORIGIN = RunOrigin(run="demo", log_id="log-a", started_at_us=START_US)


class ProjectedLog:
    """Writes what a trainer, a coordinator and one worker would write."""

    def __init__(self, config_digest: str = "cf", *, empty: bool = False) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        for name, partitions in TOPICS.items():
            self.log.create_topic(name, partitions)
        self._read = 0
        self._writer = self.log.client("trainer").writer()
        if not empty:
            self.begin(config_digest)

    def begin(self, config_digest: str = "cf") -> None:
        """RunStarted, version 0, one worker."""
        self.policy(
            ev.RunStarted(run=RUN, at_us=START_US, segment=0, config_digest=config_digest, code_revision="c0de")
        )
        self.publish(0, at_s=0)
        self.policy(
            ev.WorkerJoined(run=RUN, at_us=START_US, worker="g0", incarnation="i1", engine="hf", dtype="float32")
        )

    def reader(self, first: str = "demo.policy") -> MemoryEventReader:
        """Of everything; `poll` begins with that topic."""
        return self.log.client("projector").reader({first: 1, **TOPICS}, "beginning")

    def records(self) -> list[Record]:
        """All of it, topic by topic."""
        return list(self.reader().poll(100_000))

    @property
    def position(self) -> Position:
        """A trainer that has read so many trajectories records."""
        progress = PartitionProgress(next_offset=self._read)
        return Position(open_groups=(), next_request=0, prompt_cursor=0, partitions={0: progress})

    def policy(self, event: ev.AnyPolicyEvent) -> int:
        value = ev.encode_policy_event(event)
        message = Message(topic="demo.policy", key=b"demo", value=value, headers=control_headers(event, value, "test"))
        return self._writer.send(message).result(0).offset

    def control(self, control: AnyLedgerControl) -> None:
        value = encode_ledger_control(control)
        headers = control_headers(control, value, "trainer")
        self._writer.send(Message(topic="demo.ledger", key=b"0", value=value, headers=headers)).result(0)

    def decisions(self, *rows: DecisionRow) -> None:
        value = encode_decisions(rows)
        headers = decisions_headers(rows, value, "trainer")
        self._writer.send(Message(topic="demo.ledger", key=b"0", value=value, headers=headers)).result(0)

    def evaluation(self, version: int, *rewards: float | None, at_s: float = 0.0) -> None:
        """Answers to held-out prompts; None: the reward failed."""
        rows = [
            EvaluationRow(
                version=version, task="t", prompt_id=f"p{number}", sample=0, temperature=0.0, reward=reward,
                reward_error=None if reward is not None else "crashed", completion_tokens=3, finish_reason="stop",
                evaluated_at_us=_us(at_s),
            )
            for number, reward in enumerate(rewards)
        ]  # fmt: skip
        value = encode_evaluation(rows)
        headers = evaluation_headers(rows, value, "evaluator")
        self._writer.send(Message(topic="demo.evaluations", key=b"0", value=value, headers=headers)).result(0)

    def raw(self, topic: str, value: bytes) -> None:
        self._writer.send(Message(topic=topic, key=b"0", value=value)).result(0)

    def publish(self, version: int, at_s: float, *, parent: int | None = None, depth: int | None = None) -> None:
        parent = version - 1 if version and parent is None else parent
        self.policy(
            ev.VersionPublished(
                run=RUN, at_us=_us(at_s), version=version, parent=parent,
                depth=version if depth is None else depth, manifest_uri=f"demo/a{version}/manifest.json",
                manifest_sha256=f"{version:064x}",
                bytes=10, optimizer_step=version, oldest_open_request=0,
            )
        )  # fmt: skip

    def switch(self, version: int, at_s: float) -> None:
        """SwitchStarted, the worker's proof, VersionActivated."""
        name = f"s{version}"
        self.policy(
            ev.SwitchStarted(
                run=RUN, at_us=_us(at_s), switch=name, version=version, mode="barrier", read_up_to=0,
                required=(ev.WorkerRef(worker="g0", incarnation="i1"),), deadline_s=30.0,
            )
        )  # fmt: skip
        ack = self.policy(
            ev.VersionLoaded(
                run=RUN, at_us=_us(at_s), switch=name, worker="g0", incarnation="i1", version=version,
                manifest_sha256=f"{version:064x}", probe_diff_new=0.0, probe_diff_old=1.0, probe_tolerance=1e-4,
                phase_s={},
            )
        )  # fmt: skip
        self.policy(ev.VersionActivated(run=RUN, at_us=_us(at_s + 0.5), switch=name, version=version, acks=(ack,)))

    def settle(self, at_s: float) -> None:
        self.control(Settled(run=RUN, at_us=_us(at_s), position=self.position, policy_read_up_to=0, reason="refill"))

    def step(self, version: int, at_s: float, metrics: Mapping[str, float], *, nonfinite: tuple[str, ...] = ()) -> None:
        self._read += RECORDS_A_STEP
        self.control(
            StepCompleted(
                run=RUN, at_us=_us(at_s), position=self.position, policy_read_up_to=0, version_in=version - 1,
                version_out=version, groups=1, trajectories=2, batch_digest=f"{version:064x}", metrics=dict(metrics),
                metrics_nonfinite=nonfinite,
                phase_s={"train": 0.25}, rng_digest="00", config_digest="cf", code_revision="c0de",
            )
        )  # fmt: skip

    def full_step(self, version: int, at_s: float, reward: float = 0.5) -> None:
        """Decisions, StepCompleted, VersionPublished, and the switch to it."""
        self.decisions(trained(version, 0), trained(version, 1), dropped(version, 2, "stale", lag=3))
        self.step(version, at_s, {"critic/rewards/mean": reward, "actor/lr": 1e-3})
        self.publish(version, at_s)
        self.switch(version, at_s + 1)

    def start_again(self, at_s: float) -> None:
        """A run that ended is extended."""
        self.policy(ev.RunStarted(run=RUN, at_us=_us(at_s), segment=1, config_digest="cf", code_revision="c0de"))
        self.settle(at_s)

    def end(self, version: int, at_s: float) -> None:
        self.control(
            LedgerEnded(
                run=RUN,
                at_us=_us(at_s),
                position=self.position,
                policy_read_up_to=0,
                last_version=version,
                reason="completed",
            )
        )
        self.policy(ev.RunEnded(run=RUN, at_us=_us(at_s), last_version=version, reason="completed"))


def trained(version: int, index: int, lag: int = 1) -> DecisionRow:
    """A trained trajectory."""
    return _row(version, index, Decision.TRAINED, "", lag)


def dropped(version: int, index: int, reason: str, lag: int | None = None) -> DecisionRow:
    """A dropped trajectory."""
    return _row(version, index, Decision.DROPPED, reason, lag)


def _row(version: int, index: int, decision: Decision, reason: str, lag: int | None) -> DecisionRow:
    group = f"demo/p{version:06d}/e0/a0"
    used = decision is not Decision.DROPPED
    return DecisionRow(
        subject=Subject.TRAJECTORY, group_id=group, trajectory_id=f"{group}/{index}", partition=0, offset=version,
        row=index, row_sha256="ab" * 32, decision=decision, reason=reason, policy_lag=lag, weight=1.0 if used else 0.0,
        use_count=1 if used else 0, reward=1.0, advantage=0.5 if used else None, completion_tokens=4,
        consumed_at_us=START_US,
    )  # fmt: skip


def _us(at_s: float) -> int:
    return START_US + round(at_s * 1e6)


class FakeTracker:
    """The ExperimentTracker port in memory. `fail_next` calls fail."""

    def __init__(self) -> None:
        self.bookmark: str | None = None
        self.points: dict[tuple[str, int, int], float] = {}
        self.versions: dict[int, dict[str, str]] = {}
        self.version_metrics: dict[int, dict[str, float]] = {}
        self.ranges: dict[str, RangeRead] = {}
        self.files: dict[str, str] = {}
        self.promoted = Promotions()
        self.params: list[dict[str, str]] = []
        self.origin: RunOrigin | None = None
        self.status = ""
        self.ended_at_us: int | None = None
        self.is_new = False
        self.took_place = False
        self.calls: list[str] = []
        self.fail_next = 0
        self.error: Exception = TrackerUnavailable("mlflow: database is locked")
        self._buffer: list[tuple[str, int, int, float]] = []

    def start(self, origin: RunOrigin, params: Sequence[Mapping[str, str]], *, replace: bool = False) -> str | None:
        self._call("start")
        self._buffer.clear()
        if replace and not self.is_new:
            self.is_new, self.bookmark = True, None
            self.points, self.versions, self.version_metrics, self.ranges, self.files = {}, {}, {}, {}, {}
        self.origin = origin
        self.params = [dict(segment) for segment in params]
        self.status = "running"
        return self.bookmark

    def log_step(self, step: int, metrics: Mapping[str, float], at_us: int) -> None:
        self._call("log_step")
        self._buffer += [(name, step, at_us, value) for name, value in metrics.items()]

    def log_version(
        self, version: int, parent: int | None, tags: Mapping[str, str], metrics: Mapping[str, float], at_us: int
    ) -> None:
        self._call("log_version")
        entry = self.versions.setdefault(version, {})
        entry.update(tags)
        if parent is not None:
            entry["parent"] = str(parent)
            if parent in self.versions:
                entry["parent_model"] = f"of {parent}"
        self.version_metrics.setdefault(version, {}).update(metrics)
        self._buffer += [(name, version, at_us, value) for name, value in metrics.items()]

    def log_range(self, name: str, read: RangeRead) -> None:
        self._call("log_range")
        assert self.ranges.setdefault(name, read) == read

    def log_text(self, path: str, text: str) -> None:
        self._call("log_text")
        self.files[path] = text

    def promote(self, promotions: Promotions) -> None:
        self._call("promote")
        assert set(promotions.versions) <= self.versions.keys()
        self.promoted = promotions

    def save_bookmark(self, bookmark: str) -> None:
        self._call("save_bookmark")
        for name, step, at_us, value in self._buffer:
            self.points[name, step, at_us] = value
        self._buffer.clear()
        self.bookmark = bookmark

    def take_place(self) -> None:
        self._call("take_place")
        self.took_place = True

    def end(self, status: EndStatus, at_us: int | None = None) -> None:
        self._call("end")
        self.status = status
        self.ended_at_us = at_us

    def shown(self) -> tuple[object, ...]:
        """Everything, for comparing."""
        return self.points, self.versions, self.ranges, self.files, self.promoted, self.bookmark, self.status

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(version, value) pairs of one metric."""
        return sorted((step, value) for (key, step, _), value in self.points.items() if key == name)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_next > 0:
            self.fail_next -= 1
            raise self.error


def inline(work: Callable[[], str | None]) -> Future[str | None]:
    """Background work done at once."""
    future: Future[str | None] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  the future is where it is raised again
        future.set_exception(error)
    return future


def three_steps() -> ProjectedLog:
    """A log of versions 0 to 3, rewards 0.1 to 0.3."""
    log = ProjectedLog()
    for version in (1, 2, 3):
        log.full_step(version, at_s=10 * version, reward=version / 10)
    return log


def run_to_rest(service: ProjectorService, limit: int = 1_000) -> None:
    """Step until there is nothing to do."""
    for _ in range(limit):
        if not service.step():
            return
    raise AssertionError("the service never comes to rest")


def project(log: ProjectedLog, tracker: ExperimentTracker, **options: Any) -> ProjectorService:
    """Everything that is in the log, by a projector that works in this thread; it is not closed."""
    ports = ProjectorPorts(reader=log.reader(), tracker=tracker, clock=log.clock, background=inline)
    service = ProjectorService(ProjectorSettings(run=RUN, params=PARAMS, best_metric=BEST, **options), ports)
    run_to_rest(service, limit=100_000)
    return service


def expected_of(log: ProjectedLog, **options: Any) -> Expected:
    """What MLflow must hold after that."""
    records = log.records()
    (origin, *_) = [origin for record in records if (origin := origin_of(RUN, record)) is not None]
    return expected_mirror(origin, PARAMS, records, best_metric=BEST, **options)
