"""A finished run of the real services on the in-memory log, without faults, to be asked afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from consumers.offline.run_log import RunLog
from infra.ports import EventReader, Message, Record
from schemas.headers import control_headers
from schemas.policy_events import AnyPolicyEvent, VersionPublished, encode_policy_event
from schemas.topics import TopicName, topic
from schemas.trajectory_codec import TrajectoryLimits
from tests.fakes.tiny_policy import VOCABULARY
from tests.sim.services import RUN
from tests.sim.world import Plan, World


class SimulatedRun:
    """Runs a plan to its end; `run_log` reads it. What Forge needs is spelled as TinyRun spells it."""

    def __init__(self, directory: Path, **plan: Any) -> None:
        self.world = World(Plan(**{"seed": 1, **plan}), directory)
        self.world.run()
        assert all(process.done for process in self.world.processes), "the run did not end"
        self.log = self.world.log
        self._client = self.world.log.client("reader")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """What is done to the log meanwhile is undone at the end: one run serves many tests."""
        partitions = [self.log.partition(name, p) for name, count in self.log.topics.items() for p in range(count)]
        before = [(held.start, [replace(entry) for entry in held.entries]) for held in partitions]
        try:
            yield
        finally:
            for held, (start, entries) in zip(partitions, before, strict=True):
                held.start, held.entries = start, entries

    def run_log(self) -> RunLog:
        """A fresh reading."""
        limits = TrajectoryLimits(vocabulary_size=VOCABULARY)
        return RunLog(RUN, self._open, clock=self.world.clock, pause=self.world.clock.advance, limits=limits)

    def records(self, name: TopicName) -> list[Record]:
        """Every record of a topic."""
        return list(self.run_log().records(name))

    def published(self, version: int) -> VersionPublished:
        """Its event."""
        events = (entry.event for entry in self.run_log().policy())
        return next(e for e in events if isinstance(e, VersionPublished) and e.version == version)

    def append_event(self, event: AnyPolicyEvent) -> None:
        """One more policy event."""
        value = encode_policy_event(event)
        headers = control_headers(event, value, "later")
        self.log.append(Message(topic=topic(RUN, TopicName.POLICY), key=RUN.encode(), value=value, headers=headers))

    def directory(self, version: int) -> Path:
        """Where its checkpoint lies, whatever is in it."""
        return self.world.directory / Path(self.published(version).manifest_uri).parent

    def is_stored(self, version: int) -> bool:
        """It was not retired."""
        return self.directory(version).is_dir()

    def _open(self, topics: Sequence[str]) -> EventReader:
        return self._client.reader({name: self.world.log.topics[name] for name in topics}, "beginning")
