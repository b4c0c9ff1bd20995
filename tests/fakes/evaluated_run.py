"""A told run in the in-memory log, and an evaluator on it: policy events as they come, a store that may fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from consumers.evaluation_plan import Ask
from consumers.evaluator import EvaluatorPorts, EvaluatorService, EvaluatorSettings
from infra.policy_follower import PolicyFollower
from infra.ports import Message
from infra.rewards import ScoredAtOnce
from schemas import policy_events as ev
from schemas.checkpoint import WEIGHTS_NAME, Manifest
from schemas.errors import CheckpointMissing
from schemas.evaluation_codec import EvaluationRow, decode_evaluation
from schemas.headers import control_headers
from schemas.policy_state import Void
from schemas.topics import TopicName, topic
from schemas.trajectory import Sampling
from tests.fakes.inline_executor import InlineExecutor
from tests.fakes.log_script import G0, RUN, PolicyScript
from tests.fakes.memory_log import MemoryLog
from tests.fakes.memory_ports import MemoryClient
from tests.fakes.tiny_policy import ParityReward, TinyEngine, TinyPrompts
from tests.fakes.tiny_values import manifest
from tests.fakes.virtual_clock import VirtualClock

POLICY, EVALUATIONS = topic(RUN, TopicName.POLICY), topic(RUN, TopicName.EVALUATIONS)
GREEDY = Ask(sampling=Sampling(temperature=0.0, max_tokens=4), samples=1)
SAMPLED = Ask(sampling=Sampling(temperature=1.0, max_tokens=4), samples=4)
PROMPTS = 3


class ToldStore:
    """Every version has weights of its own; those in `missing` are gone. `on_fetch` runs before."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.missing: set[int] = set()
        self.on_fetch: Callable[[int], None] = lambda version: None
        self.fetched: list[int] = []

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Manifest]:
        version = int(manifest_sha256.rsplit("-", 1)[1])
        self.fetched.append(version)
        self.on_fetch(version)
        if version in self.missing:
            raise CheckpointMissing(f"{manifest_uri}: planted")
        place = self._directory / f"v{version}"
        place.mkdir(exist_ok=True)
        (place / WEIGHTS_NAME).write_text(f"weights of {version}")
        return place, manifest(f"a{version}", version)

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"an evaluator has no business with store.{name}")


class ToldPolicy(PolicyScript):
    """A script that lies in the log as well."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__()
        self._log = log

    def tell(self, event: ev.AnyPolicyEvent) -> Void | None:
        value = ev.encode_policy_event(event)
        headers = control_headers(event, value, "test")
        self._log.append(Message(topic=POLICY, key=b"demo", value=value, headers=headers))
        return super().tell(event)

    def live(self, *versions: int) -> None:
        """Each is published and goes live."""
        for version in versions:
            self.goes_live(version, [G0])


class EvaluatedRun:
    """A run that has begun, with one worker and no version."""

    def __init__(self, directory: Path) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        self.log.client("setup").admin().create_topics(RUN)
        self.policy = ToldPolicy(self.log)
        self.policy.started()
        self.policy.joined(G0)
        self.store = ToldStore(directory)
        self.engine = TinyEngine(self.clock)

    def evaluator(
        self, every_versions: int = 1, *, client: MemoryClient | None = None, end_limit_s: float = 60.0
    ) -> EvaluatorService:
        """A process of its own."""
        client = client or self.log.client("evaluator")
        self.engine = TinyEngine(self.clock)
        source = TinyPrompts(PROMPTS)
        settings = EvaluatorSettings(
            run=RUN, seed=7, every_versions=every_versions, asks=(GREEDY, SAMPLED), end_limit_s=end_limit_s,
            prompts=tuple(source.by_index(index) for index in range(PROMPTS)),
        )  # fmt: skip
        ports = EvaluatorPorts(
            follower=PolicyFollower(client.reader({POLICY: 1}, "beginning"), POLICY),
            evaluations=client.reader({EVALUATIONS: 1}, "beginning"),
            writer=client.writer(),
            engine=self.engine,
            store=self.store,  # type: ignore[arg-type]
            reward=ScoredAtOnce(ParityReward()),
            executor=InlineExecutor(),
            clock=self.clock,
        )
        return EvaluatorService(settings, ports)

    def rest(self, service: EvaluatorService, limit: int = 2_000) -> None:
        """Step until there is nothing to do, now and a second later (a retry may have been due then)."""
        idle = 0
        for _ in range(limit):
            idle = 0 if service.step() else idle + 1
            self.clock.advance(1.0 if idle else 0.001)
            if idle > 3:
                return
        raise AssertionError("the service never comes to rest")

    def rows(self) -> list[EvaluationRow]:
        """What lies in the topic."""
        reader = self.log.client("check").reader({EVALUATIONS: 1}, "beginning")
        return [row for record in reader.poll(10_000) for row in decode_evaluation(record.value, record.headers)]

    def versions(self) -> list[int]:
        """Versions of the records, in order."""
        reader = self.log.client("check").reader({EVALUATIONS: 1}, "beginning")
        return [decode_evaluation(record.value, record.headers)[0].version for record in reader.poll(10_000)]
