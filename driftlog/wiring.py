"""Builds each service from a configuration: the one place where services, ports and adapters meet.

Heavy modules are imported inside the function that needs them: the coordinator and every command that only
reads never load torch. Whatever is opened is released by the Assembly, in the reverse order.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from driftlog.broker_access import kafka_settings
from driftlog.run_directory import RunDirectory, read_config
from driftlog.taps import Tap, tapped, tapped_transactions
from infra.clock import SystemClock
from infra.config import Config
from infra.policy_follower import PolicyFollower
from infra.ports import Record
from infra.runner import Assembly, RingingExecutor
from infra.wakeup import Wakeup
from schemas.ids import RunId
from schemas.topics import TOPICS, TopicName, topic

if TYPE_CHECKING:
    from driftlog.observing import Observing
    from infra.checkpoint_store import FsspecCheckpointStore
    from infra.kafka_clients import KafkaSettings
    from infra.kafka_reader import KafkaEventReader

_WRITER_CLOSE_S = 5.0
# A write costs much the same for one version or ten; two seconds behind is what a person does not notice.
_MLFLOW_WRITE_S = 2.0
# Versions may follow each other several times a second: the registry shows where they have come to.
_MLFLOW_PROMOTE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What every service is built from."""

    config: Config
    run: RunDirectory
    kafka: KafkaSettings
    wakeup: Wakeup
    observing: Observing | None = None
    """None: neither metrics nor traces are on"""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Who hears what the service writes."""
        return () if self.observing is None else self.observing.taps

    @property
    def run_id(self) -> RunId:
        """The run."""
        return RunId(self.config.run.name)


def site(config: Config, run: RunDirectory, bootstrap: str, wakeup: Wakeup, observing: Observing | None = None) -> Site:
    """Put together a Site."""
    kafka = kafka_settings(config, bootstrap)
    return Site(config=config, run=run, kafka=kafka, wakeup=wakeup, observing=observing)


def open_store(config: Config, run: RunDirectory) -> FsspecCheckpointStore:
    """The checkpoint store of a run."""
    from infra.checkpoint_store import FsspecCheckpointStore

    root = run.checkpoints(config)
    return FsspecCheckpointStore(root, config.run.name, cache_dir=run.path / "checkpoint-cache")


def open_reader(
    at: Site,
    *names: TopicName,
    start: Literal["beginning", "end"] = "beginning",
    prepare: Callable[[Record], Record] | None = None,
) -> KafkaEventReader:
    """A reader of whole topics; `start` and `prepare` as it takes them."""
    from infra.kafka_reader import KafkaEventReader

    topics = {topic(at.run_id, name): TOPICS[name].partitions for name in names}
    reader = KafkaEventReader(at.kafka, topics, start, at.wakeup, prepare)
    if at.observing is not None:
        at.observing.watch(reader)
    return reader


def build_coordinator(at: Site) -> Assembly:
    """The coordinator."""
    from consumers.coordinator import CoordinatorPorts, CoordinatorService, CoordinatorSettings
    from consumers.switching import SwitchRules
    from infra.kafka_transactions import KafkaTransactionalWriter

    settings = at.config.coordinator
    with ExitStack() as stack:
        policy, workers = KeptReader(stack), KeptReader(stack)
        writer = KafkaTransactionalWriter(at.kafka, f"{at.run_id}-coordinator")
        stack.callback(writer.close)
        service = CoordinatorService(
            CoordinatorSettings(
                run=at.run_id,
                rules=SwitchRules(
                    run=at.run_id,
                    mode=settings.mode,
                    switch_deadline_s=settings.switch_deadline_s,
                    keep=at.config.checkpoints.keep,
                    min_workers=settings.min_workers,
                ),
                lease_s=settings.lease_s,
                failed_switches_in_row=settings.failed_switches_in_row,
                garbage_grace_s=at.config.checkpoints.garbage_grace_s,
            ),
            CoordinatorPorts(
                writer=tapped_transactions(writer, at.taps),
                open_policy=lambda: open_follower(at, policy),
                open_workers=lambda: workers.put(open_reader(at, TopicName.WORKERS)),
                store=open_store(at.config, at.run),
                clock=SystemClock(),
                new_id=short_id,
            ),
        )
        return Assembly(service=service, wakeup=at.wakeup, resources=stack.pop_all())
    raise AssertionError("unreachable: ExitStack swallows nothing")


def build_projector(at: Site) -> Assembly:
    """The projector to MLflow."""
    from consumers.projection import READ
    from consumers.projector import ProjectorPorts, ProjectorService, ProjectorSettings, in_thread
    from infra.mlflow_access import MlflowSettings
    from infra.mlflow_tracker import MlflowTracker

    clock = SystemClock()
    with ExitStack() as stack:
        reader = open_reader(at, *READ)
        stack.callback(reader.close)
        tracker = MlflowTracker(
            MlflowSettings(tracking_uri=mlflow_uri(at.config), experiment=at.config.mlflow.experiment), clock
        )
        stored = [read_config(path) for path in at.run.config_files()]
        settings = ProjectorSettings(
            run=at.run_id,
            params=[flat_settings(config) for config in stored or [at.config]],
            best_metric=at.config.mlflow.best_metric,
            write_every_s=_MLFLOW_WRITE_S,
            promote_every_s=_MLFLOW_PROMOTE_S,
            await_evaluation_s=at.config.evaluation.end_limit_s if at.config.evaluation.enabled else 0.0,
        )
        ports = ProjectorPorts(
            reader=reader, tracker=tracker, clock=clock, background=lambda work: _ringing(in_thread(work), at.wakeup)
        )
        service = ProjectorService(settings, ports)
        return Assembly(service=service, wakeup=at.wakeup, resources=stack.pop_all())
    raise AssertionError("unreachable: ExitStack swallows nothing")


def build_generator(at: Site, worker: str) -> Assembly:
    """One generator."""
    from driftlog.episode_wiring import open_players
    from driftlog.policies import initial_policy
    from driftlog.wiring_engine import build_engine
    from infra.kafka_group_reader import KafkaGroupReader
    from infra.kafka_writer import KafkaEventWriter
    from producers.generator import GeneratorPorts, GeneratorService, GeneratorSettings
    from producers.weights import WeightsSettings

    config, clock = at.config, SystemClock()
    generator = config.generator
    engine = build_engine(
        config,
        at.run,
        clock,
        at.wakeup.ring,
        kind=generator.engine,
        batching=generator.batching,
        threads=generator.threads,
    )
    # The tokenizer is part of the identity a worker joins under. These weights never serve: nothing is proven yet.
    first = initial_policy(config, at.run)
    engine.load(first, 0)
    settings = GeneratorSettings(
        run=at.run_id,
        worker=worker,
        seed=config.run.seed,
        weights=WeightsSettings(
            run=at.run_id,
            in_flight=generator.in_flight,
            drain_timeout_s=generator.drain_timeout_s,
            fetch_timeout_s=generator.fetch_timeout_s,
            load_tries=generator.load_tries,
            retry_wait_s=1.0,
            probe_tolerance=generator.tolerance(config.model.dtype),
        ),
        max_groups_in_flight=generator.max_groups_in_flight,
        heartbeat_s=generator.heartbeat_s,
        lease_s=config.coordinator.lease_s,
        park_timeout_s=generator.park_timeout_s,
        keep_text=generator.keep_text,
        poison_after=generator.poison_after,
        rolling=config.coordinator.mode == "rolling",
    )
    with ExitStack() as stack:
        policy = KeptReader(stack)
        # Two threads: one may wait for the broker's answer while the other loads weights.
        executor = RingingExecutor(2, at.wakeup)
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        engine, scorer = open_players(engine, config.task, first, at.wakeup.ring, in_step=generator.batching == "group")
        stack.callback(scorer.close)
        stack.callback(engine.close)
        writer = KafkaEventWriter(at.kafka)
        stack.callback(writer.close, _WRITER_CLOSE_S)
        prompts = KafkaGroupReader(at.kafka, f"{at.run_id}-generators", topic(at.run_id, TopicName.PROMPTS), at.wakeup)
        prompts.leave()  # only an admitted worker takes part
        stack.callback(prompts.close)
        if at.observing is not None:
            at.observing.watch(prompts)
        ports = GeneratorPorts(
            follower=open_follower(at, policy),
            workers=KeptReader(stack).put(open_reader(at, TopicName.WORKERS)),
            prompts=prompts,
            writer=tapped(writer, at.taps),
            engine=engine,
            store=open_store(config, at.run),
            reward=scorer,
            executor=executor,
            clock=clock,
            new_id=short_id,
        )
        service = GeneratorService(settings, ports)
        return Assembly(service=service, wakeup=at.wakeup, resources=stack.pop_all())
    raise AssertionError("unreachable: ExitStack swallows nothing")


def open_follower(at: Site, kept: KeptReader) -> PolicyFollower:
    """A fold of policy from its beginning; the reader opened before is closed."""
    trainer = at.config.trainer
    # Proofs of versions that may still be trained must be remembered, whatever the lag limit.
    remember = max(256, 4 * trainer.largest_lag)
    reader = kept.put(open_reader(at, TopicName.POLICY))
    return PolicyFollower(reader, topic(at.run_id, TopicName.POLICY), remember_versions=remember)


def short_id() -> str:
    """Unique enough among the incarnations and switches of a run."""
    return uuid.uuid4().hex[:12]


def mlflow_uri(config: Config, environment: Mapping[str, str] | None = None) -> str:
    """Where MLflow is: the environment, the configuration, or one database beside the runs."""
    named = (os.environ if environment is None else environment).get("MLFLOW_TRACKING_URI") or config.mlflow.uri
    if named:
        return named
    return f"sqlite:///{Path(config.run.directory).resolve() / 'mlflow.db'}"


def flat_settings(config: Config) -> dict[str, str]:
    """Every setting as `section.key` -> text."""
    return {
        f"{section}.{key}": str(value)
        for section, values in config.model_dump(mode="json").items()
        for key, value in values.items()
        if (section, key) != ("kafka", "security")
    }


class KeptReader:
    """Holds the newest of a series of readers; each new one closes the one before."""

    def __init__(self, stack: ExitStack) -> None:
        self._close: Callable[[], None] | None = None
        stack.callback(self.close)

    def put(self, reader: KafkaEventReader) -> KafkaEventReader:
        """Keep this one."""
        self.close()
        self._close = reader.close
        return reader

    def close(self) -> None:
        """Close the one that is held."""
        close, self._close = self._close, None
        if close is not None:
            close()


def _ringing(future: Future[str | None], wakeup: Wakeup) -> Future[str | None]:
    future.add_done_callback(lambda _: wakeup.ring())
    return future
