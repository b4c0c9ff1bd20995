"""`driftlog replay` on a run of the real services: the same bits without generators, and the row that was altered.

And `driftlog reanalyse` on the same run: its own settings repeat it, others are told beside what happened.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from infra.model import load_policy
from tests.e2e.driving import Site, driftlog, leftovers, make_site, up
from tests.e2e.rewriting import alter_reward, copied

pytestmark = pytest.mark.long

# What decides bits beside the plain step: several optimizer steps, a reference, rows used again, a lagging policy.
SETTINGS = (
    "trainer.max_lag=2", "trainer.minibatches=2", "replay.steps=2", "replay.groups_per_step=1",
    "objective.overrides={kl_coefficient = 0.01}", "checkpoints.keep=\"all\"",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, kafka_jars: Path) -> Site:
    """Six versions, the last two by trainers that were started again."""
    site = make_site(tmp_path_factory.mktemp("replay"))
    for versions in (4, 6):
        done = up(site, f"run.versions={versions}", *SETTINGS)
        assert done.returncode == 0, done.stderr
    return site


def _replay(site: Site, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    done = driftlog("replay", "--directory", str(site.runs), *arguments, "--json")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_every_version_is_trained_again_to_the_same_bits(trained: Site) -> None:
    code, lines, words = _replay(trained, "--version", "1", "--to", "-1", "--verify")

    assert code == 0, words
    steps, total = lines[:-1], lines[-1]
    assert (total["replayed"], total["mismatched"]) == (6, 0)
    assert total["speed_vs_training"] > 0
    assert [step["started_from"] for step in steps] == ["checkpoint", *["memory"] * 5]
    files = {"model.safetensors", "optimizer.safetensors", "trainer_state.json", "probe.arrow", "config.json"}
    assert all(files <= set(step["files_compared"]) for step in steps)
    assert all(step["metrics_compared"] > 60 and step["scores_compared"] == 16 for step in steps)
    assert "training with 1 torch thread, as the manifest records" in words
    assert leftovers(trained) == []


def test_a_version_trained_again_is_written_as_a_model_that_loads(trained: Site, tmp_path: Path) -> None:
    code, lines, words = _replay(trained, "--version", "5", "--out", str(tmp_path / "model"))

    assert code == 0, words
    assert [step["started_from"] for step in lines[:-1]] == ["checkpoint"]
    assert load_policy(tmp_path / "model").vocabulary_size > 0


def test_an_altered_reward_is_named_by_trajectory_and_place(trained: Site, tmp_path: Path) -> None:
    copy = copied(trained, tmp_path)
    decision = alter_reward(copy, 6, 0.625)  # of the last step: no later one can use the row again

    code, lines, words = _replay(copy, "--version", "1", "--to", "-1", "--verify")

    assert code == 1, words
    assert (lines[-1]["replayed"], lines[-1]["mismatched"]) == (6, 1)
    step = lines[5]
    assert (step["version"], step["equal"], step["parts"][0], step["environment"]) == (6, False, "data", [])
    first = step["differences"][0]
    assert first["subject"] == decision.trajectory_id
    assert first["place"] == f"trajectories[{decision.partition}]@{decision.offset} row {decision.row}"
    assert f"reward was {decision.reward} when it was decided, in the log it is 0.625" in first["detail"]
    assert {"metrics", "weights"} <= set(step["parts"])
    assert f"data: {decision.trajectory_id} at {first['place']}" in words
    assert leftovers(copy) == []


# ---------------------------------------------------------------------- reanalyse


def _reanalyse(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    return driftlog("reanalyse", "--directory", str(site.runs), *arguments)


def test_a_reanalysis_with_the_runs_own_settings_repeats_it(trained: Site) -> None:
    done = _reanalyse(trained, "--json")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [step["version"] for step in told["versions"]] == [1, 2, 3, 4, 5, 6]
    found = told["totals"]["reproduction"]
    assert (found["reproduced"], found["decisions_different"], told["totals"]["problems"]) == (True, 0, [])
    assert told["totals"]["recorded"] == told["totals"]["reanalysed"]
    assert leftovers(trained) == []


def test_other_settings_and_other_weights_are_written_as_a_table_beside_what_happened(
    trained: Site, tmp_path: Path
) -> None:
    out = tmp_path / "fresh.parquet"

    done = _reanalyse(trained, "--set", "trainer.max_lag=0", "--model", "1", "--out", str(out))

    assert done.returncode == 0, done.stderr
    table = pq.read_table(out).to_pylist()
    found = {(row["version"], row["quantity"]): (row["recorded"], row["reanalysed"]) for row in table}
    rows = [found[version, "rows/trained"] for version in range(1, 7)]
    assert rows[0] == (16.0, 16.0)  # sampled by version 0, to update version 0: nothing can be old
    assert all(recorded >= again for recorded, again in rows)
    assert sum(again for _, again in rows) < sum(recorded for recorded, _ in rows)
    recorded, again = found[1, "mismatch/raw_k3"]
    assert recorded == pytest.approx(0.0, abs=1e-6)
    # Version 1 sees it otherwise, unless rewards were all alike and moved nothing.
    assert again > 1e-6 or found[1, "actor/grad_norm"][0] < 1e-6


def test_a_reanalysis_into_a_file_of_another_kind_is_refused(trained: Site, tmp_path: Path) -> None:
    done = _reanalyse(trained, "--out", str(tmp_path / "fresh.csv"))

    assert done.returncode == 2, done.stderr
    assert "end it in .json or .parquet" in done.stderr
    assert list(tmp_path.iterdir()) == []
