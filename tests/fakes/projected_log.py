"""A run's `policy` and `ledger` in the in-memory log, written by hand, and trackers to mirror it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Literal

from infra.ports import Message
from schemas import policy_events as ev
from schemas.errors import TrackerUnavailable
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
POSITION = Position(open_groups=(), next_request=0, prompt_cursor=0, partitions={0: PartitionProgress(next_offset=0)})


class ProjectedLog:
    """Writes what a trainer, a coordinator and one worker would write."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        self.log.create_topic("demo.policy", 1)
        self.log.create_topic("demo.ledger", 1)
        self._writer = self.log.client("trainer").writer()
        self.policy(ev.RunStarted(run=RUN, at_us=START_US, segment=0, config_digest="cf", code_revision="c0de"))
        self.publish(0, at_s=0)
        self.policy(
            ev.WorkerJoined(run=RUN, at_us=START_US, worker="g0", incarnation="i1", engine="hf", dtype="float32")
        )

    def reader(self) -> MemoryEventReader:
        return self.log.client("projector").reader({"demo.policy": 1, "demo.ledger": 1}, "beginning")

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

    def raw(self, topic: str, value: bytes) -> None:
        self._writer.send(Message(topic=topic, key=b"0", value=value)).result(0)

    def publish(self, version: int, at_s: float, *, parent: int | None = None) -> None:
        self.policy(
            ev.VersionPublished(
                run=RUN, at_us=_us(at_s), version=version, parent=version - 1 if version and parent is None else parent,
                depth=version, manifest_uri=f"demo/a{version}/manifest.json", manifest_sha256=f"{version:064x}",
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
        self.control(Settled(run=RUN, at_us=_us(at_s), position=POSITION, policy_read_up_to=0, reason="refill"))

    def step(self, version: int, at_s: float, metrics: Mapping[str, float], *, nonfinite: tuple[str, ...] = ()) -> None:
        self.control(
            StepCompleted(
                run=RUN, at_us=_us(at_s), position=POSITION, policy_read_up_to=0, version_in=version - 1,
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

    def end(self, version: int, at_s: float) -> None:
        self.control(
            LedgerEnded(
                run=RUN,
                at_us=_us(at_s),
                position=POSITION,
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
    """The ExperimentTracker port in memory. `fail_next` calls fail; `lose_buffer`: as a crash would."""

    def __init__(self) -> None:
        self.bookmark: str | None = None
        self.points: dict[tuple[str, int, int], float] = {}
        self.versions: dict[int, dict[str, str]] = {}
        self.version_metrics: dict[int, dict[str, float]] = {}
        self.params: dict[str, str] = {}
        self.status = ""
        self.calls: list[str] = []
        self.fail_next = 0
        self.error: Exception = TrackerUnavailable("mlflow: database is locked")
        self._buffer: list[tuple[str, int, int, float]] = []

    def start(self, run: str, params: Mapping[str, str]) -> str | None:
        self._call("start")
        self._buffer.clear()
        self.params |= params
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
        self.version_metrics.setdefault(version, {}).update(metrics)
        self._buffer += [(name, version, at_us, value) for name, value in metrics.items()]

    def save_bookmark(self, bookmark: str) -> None:
        self._call("save_bookmark")
        for name, step, at_us, value in self._buffer:
            self.points[name, step, at_us] = value
        self._buffer.clear()
        self.bookmark = bookmark

    def end(self, status: Literal["finished", "failed", "killed"]) -> None:
        self._call("end")
        self.status = status

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
