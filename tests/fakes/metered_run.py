"""The pages of /metrics of every service of a run that was simulated, played and told: from records the real services
wrote, through the real meters. And a reading of such a page."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from driftlog.metering import CountingHandler, Meter
from infra.clock import SystemClock
from infra.logs import event
from infra.ports import Message, Record
from infra.prometheus_endpoint import exposition
from infra.readings import Readings
from schemas.errors import InvalidRecord
from schemas.headers import CE_SOURCE, dead_letter_headers, header_text
from schemas.policy_events import decode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName, topic
from tests.fakes.played_run import PlayedRun
from tests.fakes.simulated_run import SimulatedRun
from tests.sim.services import RUN

VARIED = (1.0, 0.0, 0.5, 0.25)


@dataclass(slots=True)
class StandingReader:
    """A reader at one place for ever."""

    places: Mapping[tuple[str, int], int]
    is_closed: bool = False

    def positions(self) -> Mapping[tuple[str, int], int]:
        return self.places


@dataclass(slots=True)
class MeteredService:
    """One service: its meter and its numbers."""

    kind: str
    worker: str = ""
    readings: Readings = field(default_factory=Readings)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.readings.begin(self.kind)
        self.readings.put("driftlog_service_info", 1, revision="tested")
        self.meter = Meter(RUN, self.readings, SystemClock())
        self.meter.turned()

    @property
    def labels(self) -> dict[str, str]:
        """As `driftlog.observing` sets them."""
        return {"run": str(RUN), "service": self.kind} | ({"worker": self.worker} if self.worker else {})

    def page(self) -> bytes:
        """Its /metrics."""
        return exposition(self.readings, self.labels, process=True)


def metered_services(directory: Path) -> dict[str, MeteredService]:
    """By name; every service has said something."""
    services = {
        "trainer": MeteredService("trainer"),
        "coordinator": MeteredService("coordinator"),
        "generator-g0": MeteredService("generator", "g0"),
        "evaluator": MeteredService("evaluator"),
        "projector": MeteredService("projector"),
    }
    _hear(services, _all_records(directory))
    trainer, worker = services["trainer"], services["generator-g0"]
    trainer.readings.put("driftlog_policy_lag_limit", 2)
    trainer.meter.written([_dead_letter()])
    trainer.meter.watch(StandingReader({(topic(RUN, TopicName.TRAJECTORIES), 0): 3}))
    trainer.meter.lag({(topic(RUN, TopicName.TRAJECTORIES), 0): 8})
    worker.meter.watch(StandingReader({(topic(RUN, TopicName.PROMPTS), 0): 3}))
    worker.meter.lag({(topic(RUN, TopicName.PROMPTS), 0): 3})
    services["projector"].meter.tracker_failures(0)
    handler = CountingHandler(trainer.readings)
    logger = logging.Logger("metered")
    logger.addHandler(handler)
    event(logger, "log_in_doubt", level=logging.WARNING)
    return services


def _all_records(directory: Path) -> list[Record]:
    simulated = SimulatedRun(directory / "simulated", evaluate=True, versions=3)
    told = [record for name in TopicName for record in simulated.records(name)]
    played = PlayedRun(directory / "played", "trainer.max_lag=1", versions=3)
    played.play(0, 1, version=0, rewards=VARIED)
    played.go_live(1)
    played.play(2, 3, version=0, rewards=VARIED)
    played.go_live(2)
    played.play(4, version=0, rewards=VARIED)  # too old: dropped
    played.play(5, version=1, rewards=VARIED)
    played.play(6, version=1, rewards=VARIED)
    return [*told, *played.records(TopicName.LEDGER)]


def _hear(services: Mapping[str, MeteredService], records: Iterable[Record]) -> None:
    fold = PolicyFold()
    for record in records:
        source = (header_text(record.headers, CE_SOURCE) or "").split("/")
        kind = source[0]
        name = "generator-g0" if kind == "generator" else kind
        message = Message(topic=record.topic, key=record.key or b"", value=record.value, headers=record.headers)
        assert name in services, f"who is {source}?"
        services[name].meter.written([message])
        if record.topic == topic(RUN, TopicName.POLICY):
            fold.apply(record.offset, decode_policy_event(record.value))
    services["coordinator"].meter.fold(fold, {"g0": 1.5})


def _dead_letter() -> Message:
    name = topic(RUN, TopicName.TRAJECTORIES)
    headers = dead_letter_headers((), topic=name, partition=0, offset=4, error=InvalidRecord("bad_magic", "planted"))
    return Message(topic=topic(RUN, TopicName.DEADLETTERS), key=b"x", value=b"?", headers=headers)


def labels_by_name(page: bytes) -> dict[str, set[str]]:
    """The series of a page, each with all labels that it has."""
    found: dict[str, set[str]] = {}
    for line in page.decode().splitlines():
        if line and not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return found


def samples(page: bytes, name: str) -> list[tuple[dict[str, str], float]]:
    """(labels, number) of one series."""
    lines = [line for line in page.decode().splitlines() if re.match(rf"{name}[{{ ]", line)]
    return [(dict(re.findall(r'(\w+)="([^"]*)"', line)), float(line.rpartition(" ")[2])) for line in lines]
