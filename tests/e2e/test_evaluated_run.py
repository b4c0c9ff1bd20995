"""A run with an evaluator beside it: the wanted versions are in the log, and every reader shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.driving import Site, driftlog, leftovers, make_site, up

pytestmark = pytest.mark.long

VERSIONS, EVERY = 12, 2
SETTINGS = (
    f"run.versions={VERSIONS}", "mlflow.enabled=true", "evaluation.enabled=true", f"evaluation.every_versions={EVERY}",
    "evaluation.samples_per_prompt=2", "evaluation.max_prompts=6",
)  # fmt: skip
ANSWERS = 6 * (1 + 2)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, kafka_jars: Path) -> Site:
    """One finished run, for every question of this module."""
    site = make_site(tmp_path_factory.mktemp("evaluated"))
    done = up(site, *SETTINGS, options=("--json",))
    assert done.returncode == 0, done.stderr
    assert leftovers(site) == []
    return site


def test_the_summary_tells_the_last_version_and_the_audit_finds_nothing(evaluated: Site) -> None:
    summary = evaluated.summary()

    assert (summary["audit_findings"], summary["undecided"], summary["newest_version"]) == (0, 0, VERSIONS)
    evaluation = summary["evaluation"]
    assert evaluation["newest"]["version"] == VERSIONS
    assert (evaluation["newest"]["prompts"], evaluation["newest"]["rewards_failed"]) == (6, 0)
    assert {"greedy_reward_mean", "sampled_reward_mean", "pass_at_1", "pass_at_2"} <= evaluation["newest"].keys()
    assert 1 <= evaluation["versions"] <= VERSIONS // EVERY + 2


def test_rows_status_and_mlflow_agree_and_a_second_evaluator_finds_nothing_to_do(evaluated: Site) -> None:
    where = ("--run", "tiny", "--directory", str(evaluated.runs))
    assert driftlog("broker", "start", *where).returncode == 0
    try:
        told = json.loads(driftlog("status", *where, "--json").stdout)
        again = driftlog("evaluate", "--config", str(evaluated.config), "--run", "tiny", "--log-level", "INFO")
        after = json.loads(driftlog("status", *where, "--json").stdout)
    finally:
        assert driftlog("down", *where).returncode == 0

    evaluation = evaluated.summary()["evaluation"]
    assert {name: told["evaluation"][name] for name in ("versions", "newest")} == {
        name: evaluation[name] for name in ("versions", "newest")
    }
    assert again.returncode == 0, again.stderr
    assert after["evaluation"] == told["evaluation"]
    assert _curve(evaluated, "evaluation/greedy_reward_mean")[VERSIONS] == evaluation["newest"]["greedy_reward_mean"]
    assert _curve(evaluated, "evaluation/answers")[VERSIONS] == ANSWERS


def _curve(site: Site, name: str) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{site.runs / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "driftlog"]
    points = {}
    for run in client.search_runs([experiment.experiment_id]):
        points |= {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
    return points
