"""What a PromQL expression of this project asks for: names of series, and labels. No parser: names are what counts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "driftlog.json"
FROM_PROMETHEUS = frozenset({"instance", "job"})
_FUNCTIONS = {"sum", "count", "max", "rate", "increase", "delta", "time", "scalar", "vector"}
_FUNCTIONS |= {"avg_over_time", "max_over_time", "last_over_time"}
_WORDS = frozenset({*_FUNCTIONS, "by", "on", "and", "or", "unless", "offset", "group_left", "bool"})


def dashboard_queries() -> list[tuple[str, str, str]]:
    """(panel, legend, expression), for every run."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return [
        (panel["title"], target["legendFormat"], target["expr"].replace("$run", ".+"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def alert_rules() -> dict[str, dict[str, Any]]:
    """Rules by name of the alert."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def series_of(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each series, with the labels that its own braces ask for."""
    for name, braces in re.findall(r"\b([a-z_]\w*)(?:\{([^}]*)\})?", _without_labels_lists(expression)):
        if name not in _WORDS:
            yield name, set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", braces))


def grouped_labels(expression: str) -> set[str]:
    """Labels of by, on and group_left."""
    lists = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", expression)
    return {label.strip() for found in lists for label in found.split(",") if label.strip()}


def legend_labels(legend: str) -> set[str]:
    """Labels in a legend."""
    return set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))


def _without_labels_lists(expression: str) -> str:
    plain = re.sub(r"\b(by|on|group_left)\s*\([^)]*\)", " ", expression)
    return re.sub(r"\[[^\]]*\]|\boffset\s+\w+", " ", plain)
