"""Whom Prometheus asks: services of the compose file, at the port they answer on, each of which one exists by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.check.compose import Service, read_compose, read_env_file

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus" / "prometheus.yml"
METRICS_PORT = "9464"
EXPORTERS = {"kafka-exporter": "9308"}  # its own default: nothing in the file sets another


def answering(profile: str) -> dict[str, Service]:
    """Services that have a page of numbers under a profile, by each name that they have in the network."""
    env_file = ROOT / (".env" if profile == "cpu" else "deploy/gpu.env")
    services = read_compose(ROOT / "docker-compose.yml", read_env_file(env_file)).active([profile, "observability"])
    found = {}
    for service in services.values():
        if "--life-sign" in service.command:
            assert service.environment["DRIFTLOG_METRICS_PORT"] == METRICS_PORT
        elif service.name not in EXPORTERS:
            continue
        networks = service.raw["networks"]
        aliases = networks["pipeline"]["aliases"] if isinstance(networks, dict) else []
        found |= dict.fromkeys((*aliases, service.name), service)
    return found


def faults(config: dict[str, Any], profile: str) -> list[str]:
    """What is wrong with the targets under a profile."""
    services, found, asked = answering(profile), [], set()
    for job in config["scrape_configs"]:
        named = [target for entry in job.get("static_configs", ()) for target in entry["targets"]]
        found += [f"{t} may be several: look its addresses up" for t in named if t.startswith("generator:")]
        looked_up = [f"{name}:{entry['port']}" for entry in job.get("dns_sd_configs", ()) for name in entry["names"]]
        found += [f"{t} is one: named, it is missed when it is away" for t in looked_up if "generator:" not in t]
        for target in (*named, *looked_up):
            host, port = target.split(":")
            if host == "localhost":  # Prometheus itself
                continue
            if host not in services:
                found.append(f"{target} is no service")
                continue
            asked.add(services[host].name)
            if port != EXPORTERS.get(host, METRICS_PORT):
                found.append(f"{target}: it answers elsewhere")
    missing = {service.name for service in services.values()} - asked
    return found + [f"nobody asks {name}" for name in sorted(missing)]


def real() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(PROMETHEUS.read_text())
    return config


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_every_service_is_asked_at_its_port_under_either_profile(profile: str) -> None:
    assert faults(real(), profile) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("trainer:9464", "trainr:9464", ["trainr:9464 is no service", "nobody asks trainer-gpu"]),
        ("trainer:9464", "trainer-gpu:9465", ["trainer-gpu:9465: it answers elsewhere"]),
        ("kafka-exporter:9308", "kafka-exporter:9309", ["kafka-exporter:9309: it answers elsewhere"]),
        ("[generator]", "[generator, evaluator]", ["evaluator:9464 is one: named, it is missed when it is away"]),
        (
            '"trainer:9464"',
            '"trainer:9464", "generator:9464"',
            ["generator:9464 may be several: look its addresses up"],
        ),
    ],
)
def test_a_target_that_is_wrong_is_found(old: str, new: str, expected: list[str]) -> None:
    text = PROMETHEUS.read_text()
    assert old in text

    assert faults(yaml.safe_load(text.replace(old, new)), "gpu") == expected
