"""A generator service on the in-memory log; the test plays trainer and coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.policy_follower import PolicyFollower
from infra.ports import Message, Record, RewardScorer
from infra.rewards import ScoredAtOnce
from producers.generator import GeneratorPorts, GeneratorService, GeneratorSettings
from producers.weights import WeightsSettings
from schemas.headers import control_headers
from schemas.heartbeat import Heartbeat, decode_heartbeat
from schemas.ids import RunId
from schemas.policy_events import AnyPolicyEvent, encode_policy_event
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import decode_group
from tests.fakes.inline_executor import InlineExecutor
from tests.fakes.log_script import LIMITS, PolicyScript
from tests.fakes.memory_log import MemoryLog
from tests.fakes.tiny_policy import ParityReward, TinyEngine
from tests.fakes.virtual_clock import VirtualClock
from tests.unit.generator.keeper_rig import Shelf, weights_of
from tests.unit.generator.requests_of import request_message

RUN = RunId("demo")


class GeneratorRig:
    """Time moves 0.1 s a step."""

    def __init__(
        self, root: Path, *, in_flight_bytes: int = 64 * 1024 * 1024, reward: RewardScorer | None = None
    ) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock, session_timeout_s=6.0)
        self.log.client("setup").admin().create_topics(RUN)
        self.others = self.log.client("others").writer()
        self.shelf = Shelf(root)
        for version in range(6):
            self.shelf.put(version, weights_of(version))
        self.engine = TinyEngine(self.clock)
        self.in_flight_bytes = in_flight_bytes
        self.reward = reward or ScoredAtOnce(ParityReward())
        self._ids = 0
        self.service = self.build()

    def build(self, worker: str = "g0", *, engine: TinyEngine | None = None) -> GeneratorService:
        client = self.log.client(worker, in_flight_bytes=self.in_flight_bytes)
        name = topic(RUN, TopicName.POLICY)
        weights = WeightsSettings(
            run=RUN, drain_timeout_s=2.0, fetch_timeout_s=5.0, load_tries=1, retry_wait_s=0.2, probe_tolerance=1e-4
        )
        settings = GeneratorSettings(
            run=RUN, worker=worker, seed=0, weights=weights, max_groups_in_flight=4, heartbeat_s=1.0, lease_s=6.0,
            park_timeout_s=1.0, keep_text=False,
        )  # fmt: skip
        ports = GeneratorPorts(
            follower=PolicyFollower(client.reader({name: 1}, "beginning"), name),
            workers=client.reader({topic(RUN, TopicName.WORKERS): 1}, "beginning"),
            prompts=client.group_reader("demo-generators", topic(RUN, TopicName.PROMPTS)),
            writer=client.writer(),
            engine=engine or self.engine,
            store=self.shelf,  # type: ignore[arg-type]
            reward=self.reward,
            executor=InlineExecutor(),
            clock=self.clock,
            new_id=self._new_id,
        )
        return GeneratorService(settings, ports)

    def _new_id(self) -> str:
        self._ids += 1
        return f"i{self._ids}"

    # ------------------------------------------------------------------ what others do

    def say(self, tell: str, *args: object, **kwargs: Any) -> int:
        """Write one event, spelled as PolicyScript spells it; its offset."""
        script = PolicyScript()
        getattr(script, tell)(*args, **kwargs)
        offset = -1
        for event in script.events:
            value = encode_policy_event(event)
            message = Message(topic="demo.policy", key=b"demo", value=value, headers=control_headers(event, value, "t"))
            offset = self.others.send(message).result(0.0).offset
        return offset

    def ask(self, *positions: int, **changes: Any) -> None:
        for position in positions:
            self.others.send(request_message(position, **changes))

    def switch_to(self, version: int, *, publish: bool = True) -> None:
        """Publish, open the switch, let the worker prove it, activate."""
        if publish:
            self.say("published", version)
        self.say("switched", f"s{version}", version, [self.service.me])
        ack = self.until(lambda: self.last_ack(version))
        self.say("activated", f"s{version}", version, [ack])

    def serving(self) -> GeneratorRig:
        """g0 is admitted with version 0 live."""
        self.say("started")
        self.say("published", 0)
        self.step(3)
        self.switch_to(0, publish=False)
        self.step(2)
        return self

    # ------------------------------------------------------------------ time and looks

    def step(self, times: int = 1, *, seconds: float = 0.1) -> None:
        for _ in range(times):
            self.service.step()
            self.clock.advance(seconds)

    def until(self, look: Any, steps: int = 60) -> Any:
        for _ in range(steps):
            found = look()
            if found or (found == 0 and not isinstance(found, bool)):
                return found
            self.step()
        raise AssertionError("it never happens")

    def records(self, name: TopicName) -> list[Record]:
        reader = self.log.client("check").reader({topic(RUN, name): TOPICS[name].partitions}, "beginning")
        return list(reader.poll(10_000))

    def policy(self) -> list[tuple[int, AnyPolicyEvent, bool]]:
        reader = self.log.client("check").reader({"demo.policy": 1}, "beginning")
        return PolicyFollower(reader, "demo.policy").advance(100_000)

    def types(self) -> list[str]:
        return [event.type for _, event, void in self.policy() if not void]

    def last_ack(self, version: int) -> int | None:
        acks = [o for o, e, void in self.policy() if e.type == "VersionLoaded" and not void and e.version == version]  # type: ignore[union-attr]
        return acks[-1] if acks else None

    def rows(self) -> list[Trajectory]:
        found = []
        for record in self.records(TopicName.TRAJECTORIES):
            found += [r.trajectory for r in decode_group(record.value, record.headers, LIMITS) if r.trajectory]
        return found

    def groups(self) -> list[str]:
        return list(dict.fromkeys(row.group_id for row in self.rows()))

    def beats(self) -> list[Heartbeat]:
        return [decode_heartbeat(record.value) for record in self.records(TopicName.WORKERS)]

    def committed(self, partition: int) -> int | None:
        value = self.log.committed("demo-generators").get(("demo.prompts", partition))
        return None if value is None else value[0]
