"""The compose file for several machines: what each profile starts, and each rule that it brought, tripped."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.check import rules
from deploy.check.__main__ import SEVERAL, SEVERAL_EXAMPLE
from deploy.check.compose import Compose, Service, read_compose

DOCKERFILE = (Path(__file__).resolve().parents[3] / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def changed(change: Callable[[dict[str, Any]], object] = lambda services: None) -> Compose:
    """The real file with one thing changed."""
    real = read_compose(SEVERAL, SEVERAL_EXAMPLE)
    raw = copy.deepcopy(dict(real.raw))
    change(raw["services"])
    services = {name: Service(name=name, raw=entry) for name, entry in raw["services"].items()}
    return Compose(path=real.path, raw=raw, services=services)


TRIPS: list[tuple[rules.Rule, str, Callable[[dict[str, Any]], object]]] = [
    (rules.the_pipeline_is_whole, "none runs driftlog evaluate", lambda s: s.pop("evaluator")),
    (rules.accelerators, "trainer-gpu: its image is for accelerators", lambda s: s["trainer-gpu"].pop("deploy")),
    (
        rules.accelerators,
        "trainer: reserves an accelerator",
        lambda s: s["trainer"].update(deploy=s["trainer-gpu"]["deploy"]),
    ),
    (rules.accelerators, "generator-gpu: no shm_size", lambda s: s["generator-gpu"].pop("shm_size")),
    (rules.metrics_can_be_asked, "evaluator: no port of the host", lambda s: s["evaluator"].pop("ports")),
    (
        rules.metrics_can_be_asked,
        "evaluator: no port of the host leads to its metrics",
        lambda s: s["evaluator"].update(ports=["127.0.0.1:9466:9999"]),
    ),
    (
        rules.metrics_can_be_asked,
        "projector: port 9464 of the host is coordinator's under the profile head",
        lambda s: s["projector"].update(ports=["127.0.0.1:9464:9464"]),
    ),
    (
        rules.metrics_can_be_asked,
        "generator: 9 copies, 8 ports of the host",
        lambda s: s["generator"].update(deploy={"replicas": 9}),
    ),
]


@pytest.mark.parametrize(("rule", "words", "change"), TRIPS, ids=[words for _, words, _ in TRIPS])
def test_a_file_that_breaks_a_rule_is_found(
    rule: rules.Rule, words: str, change: Callable[[dict[str, Any]], object]
) -> None:
    assert list(rule(changed())) == []

    found = list(rule(changed(change)))

    assert any(words in line for line in found), found


def test_a_metrics_port_that_is_open_to_the_network_is_found() -> None:
    compose = read_compose(SEVERAL, {**SEVERAL_EXAMPLE, "DRIFTLOG_METRICS_ADDRESS": "0.0.0.0"})

    assert any("is not bound to 127.0.0.1" in line for line in rules.ports_are_local(compose))


@pytest.mark.parametrize(("head", "trainer"), [("head", "trainer"), ("head-gpu", "trainer-gpu")])
def test_a_head_runs_everything_but_the_generators_with_one_trainer(head: str, trainer: str) -> None:
    assert set(changed().active([head])) == {"prepare", "coordinator", "projector", "evaluator", trainer}


@pytest.mark.parametrize(("worker", "generator"), [("worker", "generator"), ("worker-gpu", "generator-gpu")])
def test_a_worker_runs_generators_alone(worker: str, generator: str) -> None:
    assert set(changed().active([worker])) == {generator}


def test_an_image_for_accelerators_that_is_not_named_can_be_pulled_from_nowhere() -> None:
    plain = {name: value for name, value in SEVERAL_EXAMPLE.items() if name != "DRIFTLOG_GPU_IMAGE"}

    images = {str(s.raw["image"]) for s in read_compose(SEVERAL, plain).services.values() if s.is_for_gpu}

    assert {image.split("/")[0].rpartition(".")[2] for image in images} == {"invalid"}


def test_the_client_of_mlflow_finds_its_log_in_in_the_home_that_the_projector_has() -> None:
    # Its source instead of itself: importing it takes seconds.
    mlflow = importlib.util.find_spec("mlflow")
    assert mlflow is not None and mlflow.origin is not None
    source = (Path(mlflow.origin).parent / "utils" / "credentials.py").read_text(encoding="utf-8")

    projector = changed().services["projector"]
    (target,) = [entry["target"] for entry in projector.raw["secrets"] if isinstance(entry, dict)]

    assert f'os.path.expanduser("~/{Path(target).relative_to(projector.environment["HOME"])}")' in source


def stages() -> Iterator[tuple[str, str]]:
    """(name, text) of each stage of the Dockerfile."""
    parts = re.split(r"^FROM \S+ AS (\S+)\n", DOCKERFILE, flags=re.MULTILINE)
    return zip(parts[1::2], parts[2::2], strict=True)


def test_a_driver_of_a_store_can_be_put_into_both_images_that_touch_checkpoints() -> None:
    taking = {name for name, text in stages() if "ARG EXTRA_PACKAGES" in text and "$EXTRA_PACKAGES;" in text}

    assert taking == {"packages", "gpu"}  # cpu copies what packages made
    assert "COPY --from=packages /opt/driftlog" in dict(stages())["cpu"]
