"""The real trainer service on the in-memory log; the test plays the workers and the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consumers.objective.advantages import group_advantages
from consumers.trainer.service import TrainerService
from consumers.trainer.step import AgeWeights, StepMaker
from infra.policy_follower import PolicyFollower
from infra.ports import Message, Placed, Record
from schemas.errors import DriftlogError
from schemas.headers import control_headers, is_arrow
from schemas.ledger import AnyLedgerControl, DecisionRow, StepCompleted, Subject, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.policy_events import encode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.prompt_codec import decode_request
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import Fingerprint, PromptRequest, Trajectory
from schemas.trajectory_codec import encode_group, group_message_headers
from tests.fakes.log_script import G0, PolicyScript, trajectory
from tests.fakes.memory_log import MemoryLog
from tests.fakes.tiny_policy import TOKENIZER_DIGEST
from tests.sim.world import RUN, Plan, World

FINGERPRINT = Fingerprint(tokenizer_digest=TOKENIZER_DIGEST, dtype="float32", engine="tiny", engine_version="1")
TRAJECTORIES = topic(RUN, TopicName.TRAJECTORIES)


class TrainerRig:
    """One trainer at a time; time moves only when the test says so."""

    def __init__(self, directory: Path, **plan: Any) -> None:
        values: dict[str, Any] = {
            "seed": 0, "versions": 3, "groups_per_step": 2, "group_size": 4, "group_timeout_s": 60.0, "generators": 0,
        } | plan  # fmt: skip
        self.world = World(Plan(**values), directory)
        self.log: MemoryLog = self.world.log
        self.clock = self.world.clock
        self.writer = self.log.client("others").writer()
        self.changes: dict[str, Any] = {}
        """settings of the next trainer that differ from the simulator's"""
        self.trainer = self.build()
        self.proofs: dict[int, int] = {}
        """version -> policy offset of g0's proof"""

    def build(self, process: str = "trainer") -> TrainerService:
        """Another trainer process, with the objective's own advantages (sample deviation)."""
        service = self.world._trainer(self.log.client(process))
        assert isinstance(service, TrainerService)
        ports = service._p
        ports.step_maker = StepMaker(clock=self.clock, advantages=sample_advantages, age_weights=AgeWeights(max_lag=9))
        return TrainerService(replace(service._s, **self.changes), ports)

    def restart(self) -> None:
        """Killed without warning, and started again."""
        self.log.crash("trainer")
        self.trainer = self.build()
        self.step(6)

    def step(self, times: int = 4) -> None:
        """Let the trainer work; a step does at most one transaction."""
        for _ in range(times):
            self.trainer.step()

    def wait(self, seconds: float, times: int = 6) -> None:
        """Time passes, then the trainer works."""
        self.clock.advance(seconds)
        self.step(times)

    # ------------------------------------------------------------------ workers and coordinator

    def say(self, tell: str, *args: object, **kwargs: Any) -> int:
        """Write one event, spelled as PolicyScript spells it; its offset."""
        script = PolicyScript()
        getattr(script, tell)(*args, **kwargs)
        offset = -1
        for event in script.events:
            value = encode_policy_event(event)
            message = Message(topic="sim.policy", key=b"sim", value=value, headers=control_headers(event, value, "t"))
            offset = self.writer.send(message).result(0.0).offset
        return offset

    def begin(self) -> TrainerRig:
        """The first transaction is written, g0 has joined and version 0 is live."""
        self.step(4)
        self.say("joined", G0)
        self.go_live(0)
        return self

    def go_live(self, version: int) -> None:
        """g0 proves it and it is activated."""
        sha256 = self.fold().versions[version].event.manifest_sha256
        self.say("switched", f"s{version}", version, [G0])
        self.proofs[version] = self.say("loaded", G0, version, f"s{version}", manifest_sha256=sha256)
        self.say("activated", f"s{version}", version, [self.proofs[version]])
        self.step(2)

    def rows(
        self, request: PromptRequest, rewards: Sequence[float | None], *, version: int = 0, **changes: Any
    ) -> list[Trajectory]:
        """Members of that request's group, sampled by g0 under a proven version."""
        segments = [(version, 2, self.proofs.get(version, 10**6))]
        values = {"segments": segments, "fingerprint": FINGERPRINT, "group_size": self.world.plan.group_size} | changes
        key = values.get("key", G0)
        values.setdefault("claim", f"{key[0]}/{key[1]}/{request.request_position}")
        return [trajectory(request.group_id, i, reward=r, **values) for i, r in enumerate(rewards)]

    def send(self, rows: Sequence[Trajectory], *, partition: int | None = None) -> Placed:
        """One record."""
        value = encode_group(rows)
        headers = group_message_headers(rows, value, "g0")
        return self.send_bytes(value, headers, key=rows[0].group_id.encode(), partition=partition)

    def send_bytes(
        self, value: bytes | None, headers: Any = (), *, key: bytes = b"k", partition: int | None = None
    ) -> Placed:
        """Any bytes."""
        message = Message(topic=TRAJECTORIES, key=key, value=value, headers=headers, partition=partition)
        return self.writer.send(message).result(0.0)

    def answer(self, *positions: int, version: int = 0, rewards: Sequence[float] = (1, 0, 0, 1)) -> None:
        """Whole groups for these requests."""
        requests = {request.request_position: request for request in self.requests()}
        for position in positions:
            self.send(self.rows(requests[position], rewards, version=version))

    # ------------------------------------------------------------------ looks

    def records(self, name: TopicName) -> list[Record]:
        reader = self.log.client("check").reader({topic(RUN, name): TOPICS[name].partitions}, "beginning")
        return list(reader.poll(100_000))

    def requests(self) -> list[PromptRequest]:
        found = [decode_request(record.value, record.headers) for record in self.records(TopicName.PROMPTS)]
        return sorted(found, key=lambda request: request.request_position)

    def fold(self) -> PolicyFold:
        follower = PolicyFollower(self.log.client("check").reader({"sim.policy": 1}, "beginning"), "sim.policy")
        follower.advance(100_000)
        return follower.fold

    def decisions(self) -> list[DecisionRow]:
        return [
            d
            for r in self.records(TopicName.LEDGER)
            if is_arrow(r.headers)
            for d in decode_decisions(r.value, r.headers)
        ]

    def told(self, subject: Subject = Subject.GROUP) -> list[tuple[str, str, str]]:
        """(id, decision, reason) in order."""
        return [
            (d.group_id or "" if subject is Subject.GROUP else d.trajectory_id or "", d.decision.value, d.reason)
            for d in self.decisions()
            if d.subject is subject
        ]

    def controls(self) -> list[AnyLedgerControl]:
        return [decode_ledger_control(r.value) for r in self.records(TopicName.LEDGER) if not is_arrow(r.headers)]

    def steps(self) -> list[StepCompleted]:
        return [control for control in self.controls() if isinstance(control, StepCompleted)]

    def committed(self) -> dict[int, int]:
        """The trainer group's next offsets, by partition."""
        return {place[1]: value[0] for place, value in sorted(self.log.committed(f"{RUN}-trainer").items())}

    def error(self) -> DriftlogError | None:
        """What the next step raises."""
        try:
            self.trainer.step()
        except DriftlogError as error:
            return error
        return None


def sample_advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """(r - mean) / (sample deviation + 1e-4) by group, as the objective computes it."""
    import torch

    from consumers.objective.options import AdvantageEstimator, StdKind

    flat = torch.tensor([reward for group in rewards for reward in group], dtype=torch.float64)
    numbers = torch.tensor([n for n, group in enumerate(rewards) for _ in group], dtype=torch.int64)
    values = iter(
        group_advantages(
            flat, numbers, AdvantageEstimator.GROUP_MEAN_STD, std_kind=StdKind.SAMPLE
        ).advantages_N.tolist()
    )
    return [[next(values) for _ in group] for group in rewards]


def numbers(rows: Sequence[DecisionRow]) -> list[float]:
    """Advantages, rounded for comparison."""
    return [round(row.advantage, 5) for row in rows if row.advantage is not None]
