"""Everything that makes one service visible: its numbers, the endpoint, consumer lag, spans. Nothing of it when off.

Guarantees: what goes wrong here is said in the log and never stops the service; the loop pays for one look a second.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from driftlog.environment_variables import METRICS_HOST_VARIABLE, METRICS_PORT_VARIABLE
from infra.clock import SystemClock
from schemas.errors import ConfigError, DriftlogError
from schemas.ids import RunId

if TYPE_CHECKING:
    from driftlog.metering import Meter, Watched
    from driftlog.taps import Tap
    from infra.config import Config
    from infra.kafka_clients import KafkaSettings
    from infra.runner import Service

LOOK_S = 1.0
LAG_S = 5.0
"""one question to the broker for all topics of a service"""
_JOIN_S = 2.0
LARGEST_PORT = 65_500
"""room above it for the services of one `driftlog up`"""


def metrics_address(
    config: Config, asked: int | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, int]:
    """Host and port; port 0: off. The command line comes before the environment, that before the configuration."""
    host = environment.get(METRICS_HOST_VARIABLE) or config.metrics.host
    if asked is not None:
        if not 0 <= asked <= 65_535:
            raise ConfigError(f"--metrics-port {asked} is no port: give a number of 0 (off) to 65535")
        return host, asked
    text = environment.get(METRICS_PORT_VARIABLE)
    if not text:
        return host, config.metrics.port
    if not text.isascii() or not text.isdecimal() or int(text) > LARGEST_PORT:
        raise ConfigError(f"{METRICS_PORT_VARIABLE}={text!r} is no port: give a number of 0 (off) to {LARGEST_PORT}")
    return host, int(text)


def observe(config: Config, service: str, asked: int | None) -> Observing | None:
    """For one service process; None when neither metrics nor traces are on."""
    host, port = metrics_address(config, asked)
    if not port and not config.metrics.otlp:
        return None
    return Observing(config, service, (host, port))


class Observing:
    """One process seen. `begin` when its service is built, `beat` in its loop, `close` at the end."""

    def __init__(self, config: Config, service: str, address: tuple[str, int]) -> None:
        """`service`: trainer, coordinator, projector, evaluator or generator-<worker>; port 0: no endpoint."""
        from driftlog.metering import CountingHandler, Meter
        from infra.prometheus_endpoint import Endpoint, Pulse, exposition
        from infra.readings import Readings
        from infra.revision import code_revision

        kind, _, worker = service.partition("-")
        self._run, self._clock = RunId(config.run.name), SystemClock()
        self._config, self._kind = config, kind
        self._service: Service | None = None
        self._looked_s = float("-inf")
        self._pulse = Pulse(config.metrics.healthy_s, self._clock.monotonic_s())
        self._closing = threading.Event()
        self._lag: threading.Thread | None = None
        self._handler: logging.Handler | None = None
        self._endpoint: Endpoint | None = None
        self._meter: Meter | None = None
        self._tracing: Any = None
        self.taps: tuple[Tap, ...] = ()
        if address[1]:
            readings = Readings()
            readings.begin(kind)
            labels = {"run": config.run.name, "service": kind} | ({"worker": worker} if worker else {})
            readings.put("driftlog_service_info", 1, revision=code_revision())
            if kind == "trainer":
                readings.put("driftlog_policy_lag_limit", config.trainer.largest_lag)
            self._meter = Meter(self._run, readings, self._clock)
            self._handler = CountingHandler(readings)
            logging.getLogger().addHandler(self._handler)
            self._endpoint = Endpoint(
                address,
                lambda: exposition(readings, labels, process=True),
                lambda: self._pulse.verdict(self._clock.monotonic_s()),
            )
            self._endpoint.start()
            self.taps += (self._meter.written,)
        if config.metrics.otlp:
            from driftlog.spans import Spans
            from infra.tracing import Tracing, otlp_exporter

            self._tracing = Tracing(service, config.run.name, otlp_exporter(config.metrics.otlp))
            self.taps += (Spans(self._run, self._tracing.emit).written,)

    def watch(self, reader: Watched) -> None:
        """Show how far it is from the end of its topics."""
        if self._meter is not None:
            self._meter.watch(reader)

    def begin(self, kafka: KafkaSettings, service: Service) -> None:
        """The service is built, and its loop begins."""
        self._service = service
        if self._meter is not None:
            self._lag = threading.Thread(
                target=self._sample_lag, args=(self._meter, kafka), name="metrics-lag", daemon=True
            )
            self._lag.start()

    def beat(self, now_s: float) -> None:
        """The loop turned."""
        self._pulse.turned(now_s)
        if self._meter is not None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._meter.turned()
            self._look(self._meter)

    def close(self) -> None:
        """Stop in bounded time. Safe to call twice."""
        self._closing.set()
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
        if self._lag is not None:
            self._lag.join(_JOIN_S)
        if self._endpoint is not None:
            self._endpoint.close()
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            tracing.close()

    def _look(self, meter: Meter) -> None:
        """What only the service knows."""
        if self._kind == "coordinator":
            from consumers.coordinator import CoordinatorService

            if isinstance(self._service, CoordinatorService) and self._service.follower is not None:
                meter.fold(self._service.follower.fold, self._service.silent_s())
        elif self._kind == "projector":
            from consumers.projector import ProjectorService

            if isinstance(self._service, ProjectorService):
                meter.tracker_failures(self._service.failures)

    def _sample_lag(self, meter: Meter, kafka: KafkaSettings) -> None:
        from infra.kafka_admin import KafkaOffsets

        offsets: KafkaOffsets | None = None
        while not self._closing.is_set():
            asked_us = self._clock.now_us()
            ends: Mapping[tuple[str, int], int] | None = None
            try:
                offsets = offsets or KafkaOffsets(kafka)
                places = meter.positions()
                ends = offsets.stable_ends(places) if places else {}
            except DriftlogError:  # the service meets it too, and says so
                pass
            meter.lag(ends)
            self._pulse.broker(answered=ends is not None, asked_us=asked_us)
            self._closing.wait(LAG_S)
        if offsets is not None:
            offsets.close()
