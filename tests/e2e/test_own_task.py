"""A run with prompts and a reward of one's own, whose code crashes on one prompt and loops for ever on another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.driving import Site, driftlog, leftovers, up

pytestmark = pytest.mark.long

REWARD = """
import os

def score(request, completion):
    if request.prompt_id == "crash":
        os._exit(3)
    while request.prompt_id == "loop":
        pass
    return float(completion.text == request.reference["answer"]), {"tokens": len(completion.token_ids)}
"""


def _settings(folder: Path) -> list[str]:
    rows = [{"id": f"p{n}", "prompt": f"1,{n}={n + 1}:", "answer": f"1+{n}", "level": n} for n in range(2, 6)]
    rows += [{"id": name, "prompt": "1,1=2:", "answer": "1+1"} for name in ("crash", "loop")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_reward.py").write_text(REWARD)
    return [
        'task.kind="prompts"',
        f'task.prompts="{folder}/prompts.jsonl"',
        f'task.reward="{folder}/my_reward.py:score"',
        "task.reward_timeout_s=1.0",
        "trainer.groups_per_step=2",
        "trainer.max_attempts=1",
        "run.versions=3",
    ]


def test_user_code_that_crashes_or_loops_costs_its_own_groups_and_nothing_else(site: Site) -> None:
    settings = _settings(site.folder)

    done = up(site, *settings)

    assert 0 == done.returncode, done.stderr
    summary = site.summary()
    assert (3, 0) == (summary["versions_trained"], summary["audit_findings"])
    assert ["reward_failed"] == [name for name in summary["dropped"] if name not in ("run_ended", "zero_variance")]
    assert summary["dropped"]["reward_failed"] >= 8  # two prompts, four answers each; a later epoch may ask them again
    log = "".join(path.read_text() for path in site.run().logs.glob("generator*.log"))
    assert "crash: the reward ended its process with exit code 3" in log
    assert "time-out: the reward took longer than 1 s" in log
    assert [] == leftovers(site)

    (site.folder / "prompts.jsonl").write_text('{"prompt": "1,1=2:"}\n')
    changed = up(site, *settings, "run.versions=4", options=["--accept-changes"])

    assert 2 == changed.returncode
    assert f"{site.folder}/prompts.jsonl is not what run 'tiny' began with" in changed.stderr


def test_what_init_writes_runs(site: Site) -> None:
    _settings(site.folder)
    good = [line for line in (site.folder / "prompts.jsonl").read_text().splitlines() if '"level"' in line]
    (site.folder / "prompts.jsonl").write_text("\n".join(good))
    own = ["--prompts", f"{site.folder}/prompts.jsonl", "--reward", f"{site.folder}/my_reward.py:score"]
    site.config.unlink()

    made = driftlog("init", "--model", "countdown-tiny", *own, "--out", str(site.config), "--max-tokens", "8")
    assert 0 == made.returncode, made.stderr
    assert f"driftlog up --config {site.config}" in made.stderr
    done = up(site, "run.versions=2", f'run.directory="{site.runs}"', "mlflow.enabled=false")

    assert 0 == done.returncode, done.stderr
    summary = site.summary()
    assert (2, 0) == (summary["versions_trained"], summary["audit_findings"])
    assert "reward_failed" not in summary["dropped"]


@pytest.mark.parametrize(
    ("reward", "words"),
    [("nowhere:score", "nowhere cannot be imported: ModuleNotFoundError"), ("nothing", "use one of countdown")],
)
def test_a_reward_that_is_not_there_ends_the_start_with_its_name(site: Site, reward: str, words: str) -> None:
    done = driftlog("up", "--config", str(site.config), "--run", "tiny", "--set", f'task.reward="{reward}"')

    assert 2 == done.returncode
    assert words in done.stderr
    assert site.run().stored_config() is None
