"""The real services, wired to what a simulated process sees. Nothing here decides anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from consumers.coordinator import CoordinatorPorts, CoordinatorService, CoordinatorSettings
from consumers.evaluation_plan import Ask
from consumers.evaluator import EvaluatorPorts, EvaluatorService, EvaluatorSettings
from consumers.switching import SwitchRules
from consumers.trainer.admission import AdmissionRules
from consumers.trainer.pacing import PacingRules
from consumers.trainer.publication import Publication
from consumers.trainer.requests import RequestRules
from consumers.trainer.selection import SelectionRules
from consumers.trainer.service import TrainerService
from consumers.trainer.settings import TrainerPorts, TrainerSettings
from consumers.trainer.step import AgeWeights, StepMaker
from infra.policy_follower import PolicyFollower
from infra.rewards import ScoredAtOnce
from producers.generator import GeneratorPorts, GeneratorService, GeneratorSettings
from producers.weights import WeightsSettings
from schemas.ids import RunId
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import Sampling
from schemas.trajectory_codec import TrajectoryLimits
from tests.fakes.memory_ports import MemoryClient
from tests.fakes.tiny_policy import TOKENIZER_DIGEST, VOCABULARY, ParityReward, TinyEngine, TinyLearner, TinyPrompts
from tests.sim.episodes import TinyEpisodes
from tests.sim.plan import Plan
from tests.sim.surroundings import LateExecutor

if TYPE_CHECKING:
    from tests.sim.world import World

RUN = RunId("sim")
LEASE_S = 6.0
SWITCH_DEADLINE_S = 8.0
LAST_SWITCH_WAIT_S = 10.0
GARBAGE_GRACE_S = 2.0
"""a checkpoint is written and named by one turn of its trainer, which takes no virtual time"""

EVALUATION_PROMPTS = 3
EVALUATION_ASKS = (
    Ask(sampling=Sampling(temperature=0.0, max_tokens=4), samples=1), Ask(sampling=Sampling(max_tokens=4), samples=2),
)  # fmt: skip


class Service(Protocol):
    """What the scheduler drives."""

    def step(self) -> bool: ...

    def close(self) -> None: ...


def follower(client: MemoryClient) -> PolicyFollower:
    """A fold over the policy topic."""
    name = topic(RUN, TopicName.POLICY)
    return PolicyFollower(client.reader({name: 1}, "beginning"), name)


def _trainer_settings(plan: Plan) -> TrainerSettings:
    return TrainerSettings(
        run=RUN,
        requests=RequestRules(
            run=RUN,
            group_size=plan.group_size,
            max_lag=plan.max_lag,
            max_attempts=plan.max_attempts,
            sampling=Sampling(max_tokens=4 if plan.turns == 1 else 12),
            pacing=PacingRules(groups_per_step=plan.groups_per_step, run_ahead=plan.run_ahead, last_step=plan.versions),
        ),
        selection=SelectionRules(
            groups_per_step=plan.groups_per_step,
            order=plan.order,
            min_group=2,
            filter_zero_variance=plan.filter_zero_variance,
            admission=AdmissionRules(max_lag=plan.largest_lag, barrier=plan.barrier, tokenizer_digest=TOKENIZER_DIGEST),
            hold_for_in_flight=plan.hold_for_in_flight,
            run_ahead=plan.run_ahead,
        ),
        limits=TrajectoryLimits(vocabulary_size=VOCABULARY),
        config_digest="config",
        code_revision="sim",
        group_timeout_s=plan.group_timeout_s,
        replay=plan.replay,
        state_every=plan.state_every,
        branch=plan.branch,
        last_switch_wait_s=LAST_SWITCH_WAIT_S,
    )


def trainer(world: World, client: MemoryClient) -> TrainerService:
    """A trainer process."""
    plan, clock = world.plan, world.clock_of(client.process)
    hook = world.hook_of(client.process)
    learner = TinyLearner(hook, saved_by=world.new_id())
    trajectories, ledger = topic(RUN, TopicName.TRAJECTORIES), topic(RUN, TopicName.LEDGER)
    ports = TrainerPorts(
        writer=client.transactional_writer(f"{RUN}-trainer"),
        open_policy=lambda: follower(client),
        open_ledger=lambda: client.reader({ledger: 1}, "beginning"),
        trajectories=client.reader({trajectories: TOPICS[TopicName.TRAJECTORIES].partitions}, "end"),
        deadletters=client.reader({topic(RUN, TopicName.DEADLETTERS): 1}, "beginning"),
        learner=learner,
        publication=Publication(
            run=RUN,
            store=world.store_of(client.process),
            learner=learner,
            clock=clock,
            new_attempt_id=world.new_id,
            config_digest="config",
            code_revision="sim",
        ),
        step_maker=StepMaker(
            clock=clock,
            advantages=mean_only,
            age_weights=AgeWeights(max_lag=plan.max_lag, decay=plan.stale_decay),
        ),
        prompts=TinyPrompts(plan.prompts),
        clock=clock,
        executor=world.executor_of(client.process) if plan.overlap else None,
    )
    return TrainerService(_trainer_settings(plan), ports)


def coordinator(world: World, client: MemoryClient) -> CoordinatorService:
    """A coordinator process."""
    workers = topic(RUN, TopicName.WORKERS)
    settings = CoordinatorSettings(
        run=RUN,
        rules=SwitchRules(run=RUN, mode=world.plan.mode, switch_deadline_s=SWITCH_DEADLINE_S, keep=world.plan.keep),
        lease_s=LEASE_S,
        failed_switches_in_row=50,
        # The store's clock is the world's; this one's may be off by that much.
        garbage_grace_s=GARBAGE_GRACE_S + 2 * world.plan.skew_s,
    )
    ports = CoordinatorPorts(
        writer=client.transactional_writer(f"{RUN}-coordinator"),
        open_policy=lambda: follower(client),
        open_workers=lambda: client.reader({workers: 1}, "beginning"),
        store=world.store_of(client.process),
        clock=world.clock_of(client.process),
        new_id=world.new_id,
    )
    return CoordinatorService(settings, ports)


def generator(world: World, client: MemoryClient) -> GeneratorService:
    """A worker process; its name is the process's."""
    plan, name, clock = world.plan, client.process, world.clock_of(client.process)
    engine = TinyEngine(
        clock,
        plan.polls_per_group,
        mixed=plan.batching == "mixed",
        prefix_cache=plan.prefix_cache,
        text=plan.turns > 1,
    )
    engine.on_call = world.hook_of(name)
    engine.polls_of = lambda request: world.polls_of(name, request)
    engine.on_sample = lambda request: world.on_sample(name, request)
    playing = engine if plan.turns == 1 else TinyEpisodes(engine, plan.turns, plan.batching, world.clock)
    settings = GeneratorSettings(
        run=RUN,
        worker=name,
        seed=plan.seed,
        weights=WeightsSettings(
            run=RUN,
            in_flight=plan.in_flight,
            drain_timeout_s=plan.drain_timeout_s,
            fetch_timeout_s=5.0,
            load_tries=2,
            retry_wait_s=0.2,
            probe_tolerance=1e-4,
        ),
        max_groups_in_flight=plan.groups_in_flight,
        heartbeat_s=0.5,
        lease_s=LEASE_S,
        park_timeout_s=0.5,
        keep_text=False,
        rolling=plan.mode == "rolling",
    )
    ports = GeneratorPorts(
        follower=follower(client),
        workers=client.reader({topic(RUN, TopicName.WORKERS): 1}, "beginning"),
        prompts=client.group_reader(f"{RUN}-generators", topic(RUN, TopicName.PROMPTS)),
        writer=client.writer(),
        engine=playing,
        store=world.store_of(name),
        reward=ScoredAtOnce(ParityReward()),
        executor=LateExecutor(world.clock, world.executor_delay_s, playing),
        clock=clock,
        new_id=world.new_id,
    )
    return GeneratorService(settings, ports)


def evaluator(world: World, client: MemoryClient) -> EvaluatorService:
    """An evaluator process."""
    clock = world.clock_of(client.process)
    engine = TinyEngine(clock)
    engine.on_call = world.hook_of(client.process)
    source = TinyPrompts(EVALUATION_PROMPTS)
    settings = EvaluatorSettings(
        run=RUN,
        seed=world.plan.seed,
        every_versions=2,
        prompts=tuple(source.by_index(index) for index in range(EVALUATION_PROMPTS)),
        asks=EVALUATION_ASKS,
    )
    evaluations = topic(RUN, TopicName.EVALUATIONS)
    ports = EvaluatorPorts(
        follower=follower(client),
        evaluations=client.reader({evaluations: 1}, "beginning"),
        writer=client.writer(),
        engine=engine,
        store=world.store_of(client.process),
        reward=ScoredAtOnce(ParityReward()),
        executor=LateExecutor(world.clock, world.executor_delay_s, engine),
        clock=clock,
    )
    return EvaluatorService(settings, ports)


def mean_only(groups: list[list[float]]) -> list[list[float]]:
    """Advantages of the simulator: r - mean."""
    return [[r - sum(rewards) / len(rewards) for r in rewards] for rewards in groups]
