"""Makes dashboards/driftlog.json: python deploy/grafana/make_dashboard.py > deploy/grafana/dashboards/driftlog.json

A panel is a title, a unit and its queries; where it stands follows from its place in the list. A test holds the file to
this, and every query to the endpoints of real services.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

RUN = '{run=~"$run"}'
OR_NONE = " or on () vector(0)"
"""a line at 0 where nothing of the kind has happened: no data would look like a question that is wrong"""
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; queries: (legend, PromQL), where `%` stands for the choice of the run."""

    title: str
    unit: str
    meaning: str
    queries: tuple[tuple[str, str], ...]


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Versions",
        (
            Panel(
                "Versions",
                "none",
                "published, live, and what each worker holds",
                (
                    ("published {{run}}", "driftlog_published_version%"),
                    ("live {{run}}", "driftlog_live_version%"),
                    ("{{worker}} holds", "driftlog_held_version%"),
                ),
            ),
            Panel(
                "Since the last version",
                "s",
                "grows without bound when training stands",
                (("{{run}}", "time() - driftlog_published_version_timestamp_seconds%"),),
            ),
            Panel(
                "Versions per minute",
                "none",
                "published and gone live",
                (
                    ("published", "60 * sum by (run) (rate(driftlog_versions_published_total%[5m]))"),
                    ("went live", "60 * sum by (run) (rate(driftlog_switches_activated_total%[5m]))"),
                ),
            ),
            Panel(
                "Policy lag",
                "none",
                "training steps between sampling and update, of the rows of a step",
                (
                    ("mean", "driftlog_policy_lag_mean%"),
                    ("largest", "driftlog_policy_lag_max%"),
                    ("limit", "driftlog_policy_lag_limit%"),
                ),
            ),
            Panel(
                "Age of the data",
                "s",
                "from the end of sampling to the update",
                (("mean", "driftlog_age_seconds_mean%"), ("largest", "driftlog_age_seconds_max%")),
            ),
            Panel(
                "Rows by lag",
                "none",
                "of the last step",
                (("lag {{lag}}", "driftlog_policy_lag_count%"),),
            ),
        ),
    ),
    (
        "Learning",
        (
            Panel(
                "Reward",
                "none",
                "of the trained rows, and of evaluations",
                (
                    ("trained", "driftlog_critic_rewards_mean%"),
                    ("evaluated", "driftlog_evaluation_sampled_reward_mean%"),
                    ("evaluated, greedy", "driftlog_evaluation_greedy_reward_mean%"),
                ),
            ),
            Panel(
                "Ratio",
                "none",
                "clip ratio near 1; its effective sample size falls before the reward does",
                (
                    ("mean", "driftlog_actor_ratio_mean%"),
                    ("effective sample size", "driftlog_actor_ratio_ess%"),
                ),
            ),
            Panel(
                "Clipped tokens",
                "percentunit",
                "share of tokens where the clip binds",
                (
                    ("all", "driftlog_actor_pg_clipfrac%"),
                    ("high", "driftlog_actor_clipfrac_high%"),
                    ("low", "driftlog_actor_clipfrac_low%"),
                ),
            ),
            Panel(
                "Divergence",
                "none",
                "nats: from the policy that sampled, as a mean and as k3",
                (("ppo_kl", "driftlog_actor_ppo_kl%"), ("k3", "driftlog_actor_ratio_k3%")),
            ),
            Panel("Entropy", "none", "nats; a steady fall to 0 is collapse", (("entropy", "driftlog_actor_entropy%"),)),
            Panel("Gradient norm", "none", "before clipping", (("norm", "driftlog_actor_grad_norm%"),)),
            Panel(
                "Response length",
                "none",
                "tokens of the trained rows",
                (("mean", "driftlog_response_length_mean%"), ("cut off", "driftlog_response_length_clip_ratio%")),
            ),
            Panel(
                "Groups that teach nothing",
                "percentunit",
                "all rewards equal",
                (("equal rewards", "driftlog_group_zero_variance%"),),
            ),
            Panel(
                "Rows dropped",
                "none",
                "per minute, by reason",
                (("{{reason}}", "60 * sum by (reason) (rate(driftlog_rows_dropped_total%[5m]))" + OR_NONE),),
            ),
        ),
    ),
    (
        "Switches and workers",
        (
            Panel(
                "Switch",
                "s",
                "mean from start to activation",
                (
                    (
                        "{{run}}",
                        (
                            "sum by (run) (rate(driftlog_switch_seconds_total%[5m])) "
                            "/ sum by (run) (rate(driftlog_switches_activated_total%[5m]))"
                        ),
                    ),
                ),
            ),
            Panel(
                "Load by phase",
                "s",
                "mean seconds of a worker's load",
                (
                    (
                        "{{phase}}",
                        (
                            "sum by (phase) (rate(driftlog_load_phase_seconds_total%[5m])) "
                            "/ scalar(sum(rate(driftlog_loads_total%[5m])))"
                        ),
                    ),
                ),
            ),
            Panel(
                "Switches that failed",
                "none",
                "per hour, and in a row",
                (
                    ("per hour", "3600 * rate(driftlog_switches_failed_total%[15m])"),
                    ("in a row", "driftlog_switches_failed_in_row%"),
                ),
            ),
            Panel("Workers", "none", "by standing", (("{{standing}}", "driftlog_workers%"),)),
            Panel(
                "Heartbeats", "s", "age of the last one", (("{{worker}}", "driftlog_worker_heartbeat_age_seconds%"),)
            ),
            Panel(
                "Groups in flight", "none", "taken and not delivered", (("{{worker}}", "driftlog_groups_in_flight%"),)
            ),
        ),
    ),
    (
        "Throughput",
        (
            Panel(
                "Sampled tokens per second",
                "none",
                "by worker",
                (("{{worker}}", "rate(driftlog_sampled_tokens_total%[1m])"),),
            ),
            Panel(
                "Idle",
                "percentunit",
                "share of the time without work",
                (("trainer", "driftlog_trainer_idle_fraction%"), ("{{worker}}", "driftlog_worker_idle_fraction%")),
            ),
            Panel(
                "Step by phase",
                "s",
                "mean seconds of a training step",
                (
                    (
                        "{{phase}}",
                        (
                            "sum by (phase) (rate(driftlog_step_phase_seconds_total%[5m])) "
                            "/ scalar(sum(rate(driftlog_steps_total%[5m])))"
                        ),
                    ),
                ),
            ),
            Panel(
                "Consumer lag",
                "none",
                "records not read yet",
                (("{{service}} {{worker}} {{topic}}", "driftlog_consumer_lag_records%"),),
            ),
            Panel(
                "Memory",
                "bytes",
                "resident, by process",
                (
                    (
                        "{{service}} {{worker}}",
                        (
                            "process_resident_memory_bytes * on (instance) group_left (service, worker) "
                            "driftlog_service_info%"
                        ),
                    ),
                ),
            ),
            Panel(
                "Warnings and dead letters",
                "none",
                "per hour",
                (
                    (
                        "{{service}} {{event}}",
                        "3600 * sum by (service, event) (rate(driftlog_log_events_total%[15m]))" + OR_NONE,
                    ),
                    ("dead: {{code}}", "3600 * sum by (code) (rate(driftlog_dead_letters_total%[15m]))" + OR_NONE),
                ),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y += 1
        for place, panel in enumerate(row):
            position = {"x": place % COLUMNS * WIDTH, "y": y + place // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, position))
        y += (len(row) + COLUMNS - 1) // COLUMNS * HEIGHT
    return {
        "uid": "driftlog",
        "title": "driftlog",
        "tags": ["driftlog"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_run_variable()]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": DATASOURCE, "legendFormat": legend,
             "expr": query.replace("%", RUN)}
            for place, (legend, query) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _run_variable() -> dict[str, Any]:
    query = "label_values(driftlog_service_info, run)"
    return {
        "name": "run",
        "label": "run",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "run"},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".+",
        "refresh": 2,
        "sort": 1,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
