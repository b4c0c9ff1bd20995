"""Alerts: each is tripped in the file of tests, has a section in the run book, and the dashboard is what makes it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path

import yaml

from tests.fakes.prometheus_server import needs_promtool
from tests.fakes.promql import ALERTS, DASHBOARD, alert_rules, dashboard_queries

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = ROOT / "docs" / "runbook.md"
ALERT_TESTS = ALERTS.with_name("alerts_test.yml")
PARTS = ("**What it means.**", "**Look at.**", "**Do.**", "**Afterwards.**")


def sections() -> dict[str, str]:
    """Text of each section of the run book, by its title."""
    parts = re.split(r"^## (\w+)\n", RUNBOOK.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    assert sorted(sections()) == sorted(alert_rules())


def test_every_section_says_what_it_means_what_to_look_at_what_to_do_and_what_to_undo() -> None:
    assert {name: [part for part in PARTS if part not in text] for name, text in sections().items()} == {
        name: [] for name in sections()
    }


def test_every_alert_links_to_its_section_and_has_words_and_a_severity() -> None:
    for name, rule in alert_rules().items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_alert_is_tripped_by_a_test_and_one_test_is_quiet() -> None:
    tests = yaml.safe_load(ALERT_TESTS.read_text())["tests"]
    tripped = {
        label
        for test in tests
        for found in test["promql_expr_test"]
        for sample in found["exp_samples"]
        for label in re.findall(r'alertname="(\w+)"', sample["labels"])
    }

    assert tripped == set(alert_rules())
    assert any(all(not found["exp_samples"] for found in test["promql_expr_test"]) for test in tests)


@needs_promtool
def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    for arguments in (("check", "rules", str(ALERTS)), ("test", "rules", str(ALERT_TESTS))):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_notices_alerts_that_do_not_fire_and_parts_that_are_gone(tmp_path: Path) -> None:
    changes = {
        "NoVersion": ("> 600", "> 600000"),
        "NothingRuns": ("and on () count", "or on () count"),  # then ServiceDown fires at the end of a run
        "SwitchFailing": ("or driftlog_switches_failed_in_row > 0", ""),
        "EffectiveSampleSizeLow": ("or avg_over_time(driftlog_mismatch_applied_ess[10m]) < 0.5", ""),
        "LagAtItsLimit": (">= 0.8", ">= 1"),
    }
    rules = ALERTS.read_text()
    for part, instead in changes.values():
        assert part in rules
        rules = rules.replace(part, instead)
    (tmp_path / "alerts.yml").write_text(rules)
    (tmp_path / "alerts_test.yml").write_text(ALERT_TESTS.read_text())

    done = promtool("test", "rules", str(tmp_path / "alerts_test.yml"))

    assert done.returncode != 0
    assert [alert for alert in changes if alert not in done.stdout + done.stderr] == []


def test_the_dashboard_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(ROOT / "deploy" / "grafana" / "make_dashboard.py"))["dashboard"]()

    remedy = "run: python deploy/grafana/make_dashboard.py > deploy/grafana/dashboards/driftlog.json"
    assert json.loads(DASHBOARD.read_text()) == made, remedy


def test_every_panel_has_a_place_of_its_own_and_a_choice_of_run() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]

    assert len(set(places)) == len(places) == len({panel["id"] for panel in panels})
    chosen = [query for _, _, query in dashboard_queries() if 'run=~".+"' in query]
    assert len(chosen) >= len(dashboard_queries()) - 3
