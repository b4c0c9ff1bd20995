"""Which port a service takes, who gets which from `driftlog up`, and what is off is not there."""

from __future__ import annotations

import logging
import socket
import threading
import urllib.error
import urllib.request

import pytest

from driftlog.observing import Observing, metrics_address, observe
from driftlog.programs import metrics_words, programs
from infra.clock import SystemClock
from infra.config import load_config
from infra.kafka_clients import KafkaSettings
from schemas.errors import ConfigError, LogUnavailable
from tests.fakes.metered_run import samples

CONFIG = load_config(None, ["metrics.port=9000", "generator.workers=2", "evaluation.enabled=true"])


def test_the_command_line_comes_before_the_environment_and_that_before_the_configuration() -> None:
    environment = {"DRIFTLOG_METRICS_PORT": "9464", "DRIFTLOG_METRICS_HOST": "0.0.0.0"}

    assert metrics_address(CONFIG, None, {}) == ("127.0.0.1", 9000)
    assert metrics_address(CONFIG, None, environment) == ("0.0.0.0", 9464)
    assert metrics_address(CONFIG, 0, environment) == ("0.0.0.0", 0)
    assert metrics_address(load_config(None), None, {}) == ("127.0.0.1", 0)


@pytest.mark.parametrize("text", ["x", "-1", "70000", "94.64", "\uff19"])
def test_a_port_that_is_none_is_refused_with_the_name_of_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="DRIFTLOG_METRICS_PORT"):
        metrics_address(CONFIG, None, {"DRIFTLOG_METRICS_PORT": text})


@pytest.mark.parametrize("asked", [-1, 65_536])
def test_a_port_of_the_command_line_that_is_none_is_refused(asked: int) -> None:
    with pytest.raises(ConfigError, match="--metrics-port"):
        metrics_address(CONFIG, asked, {})


def test_every_service_of_a_run_gets_a_port_of_its_own_and_they_are_said() -> None:
    found = programs(CONFIG, "run.toml", metrics_port=9000)
    ports = [program.arguments[program.arguments.index("--metrics-port") + 1] for program in found]

    assert ports == [str(9000 + place) for place in range(len(found))]
    assert [program.name for program in found] == [
        "trainer", "coordinator", "generator-0", "generator-1", "projector", "evaluator"
    ]  # fmt: skip
    assert "generator-1 http://127.0.0.1:9003/metrics" in metrics_words(found, "127.0.0.1")


def test_with_metrics_off_no_service_takes_a_port_from_the_environment() -> None:
    found = programs(CONFIG, "run.toml")

    assert {program.arguments[-2:] for program in found} == {("--metrics-port", "0")}


def test_a_service_answers_from_its_start_and_is_healthy_once_its_loop_turns() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    observing = Observing(CONFIG, "generator-g-7", address)
    try:
        assert observing._endpoint is not None
        assert observing._endpoint.wait_until_open(10.0) == address[1]
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/healthz", timeout=10)
        refused.value.close()
        observing.beat(SystemClock().monotonic_s())
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/healthz", timeout=10) as healthy:
            assert healthy.status == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics", timeout=10) as page:
            ((labels, _),) = samples(page.read(), "driftlog_loop_turned_timestamp_seconds")
    finally:
        observing.close()
        observing.close()

    assert labels == {"run": "demo", "service": "generator", "worker": "g-7"}
    assert len(observing.taps) == 1
    assert not any(type(handler).__name__ == "CountingHandler" for handler in logging.getLogger().handlers)


class Rounds(threading.Event):
    """Between two questions to the broker: notes what /healthz would say; over after so many."""

    def __init__(self, observing: Observing, rounds: int) -> None:
        super().__init__()
        self.observing, self.left, self.said = observing, rounds, list[str]()

    def wait(self, timeout: float | None = None) -> bool:
        self.said.append(self.observing._pulse.verdict(SystemClock().monotonic_s())[1])
        self.left -= 1
        if not self.left:
            self.set()
        return True


def test_a_broker_that_does_not_answer_is_said_by_healthz_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool] = [True, False, False, True]

    class Offsets:
        def __init__(self, kafka: object) -> None: ...

        def close(self) -> None: ...

        def stable_ends(self, places: object) -> dict[tuple[str, int], int]:
            if not answers.pop(0):
                raise LogUnavailable("the broker is away")
            return {("demo.policy", 0): 7}

    class Reader:
        is_closed = False

        def positions(self) -> dict[tuple[str, int], int]:
            return {("demo.policy", 0): 5}

    monkeypatch.setattr("infra.kafka_admin.KafkaOffsets", Offsets)
    with socket.socket() as taken:  # the endpoint itself is not asked
        taken.bind(("127.0.0.1", 0))
        observing = Observing(CONFIG, "trainer", taken.getsockname())
        rounds = Rounds(observing, len(answers))
        try:
            assert observing._meter is not None
            observing.watch(Reader())
            monkeypatch.setattr(observing, "_closing", rounds)
            observing._sample_lag(observing._meter, KafkaSettings(bootstrap_servers="127.0.0.1:1"))
        finally:
            observing.close()

    away = ["broker unreachable since" in words for words in rounds.said]
    assert away == [False, True, True, False]
    assert rounds.said[1].split("since")[1] == rounds.said[2].split("since")[1]


def test_a_service_without_a_port_and_without_a_collector_has_nothing_to_show() -> None:
    assert observe(CONFIG, "trainer", 0) is None
