"""A run with episodes of several turns, answered by an environment of one's own that crashes now and then."""

from __future__ import annotations

import json

import pyarrow.dataset as ds
import pytest

from tests.e2e.driving import Site, driftlog, leftovers, up

pytestmark = pytest.mark.long

WORLD = """
import os
from driftlog.multi_turn import Turn

class Hint:
    '''Tells the answer after every turn; worth the share of its digits in the turns after that.'''
    def reset(self, start):
        if start.member_seed % 32 == 0: os._exit(3)
        self.target, self.turns = start.request.reference["target"], 0
    def step(self, text):
        self.turns += 1
        reward = float(self.target[0] in text) if self.turns > 1 else 0.0
        return Turn(observation=f"={self.target}:", reward=reward, parts={"digits": sum(map(str.isdigit, text))})
"""


def test_episodes_are_trained_and_every_way_of_looking_back_skips_what_was_not_sampled(site: Site) -> None:
    (site.folder / "world.py").write_text(WORLD)
    settings = [
        f'task.environment="{site.folder}/world.py:Hint"',
        "task.max_turns=2",
        "task.max_tokens=24",
        "task.reward_timeout_s=5.0",
        'generator.in_flight="keep"',
        'generator.batching="group"',
        "run.versions=3",
    ]

    done = up(site, *settings)

    assert 0 == done.returncode, done.stderr
    summary = site.summary()
    assert (3, 0) == (summary["versions_trained"], summary["audit_findings"])
    assert {"reward_failed"} >= set(summary["dropped"]) - {"run_ended", "zero_variance"}
    at = ["--run", "tiny", "--directory", str(site.runs)]
    audit = driftlog("audit", *at, "--recompute", "40", "--json")
    assert 0 == audit.returncode, audit.stdout + audit.stderr
    behaviour = json.loads(audit.stdout)["recompute"]["behaviour"]
    assert sum(entry["tokens"] for entry in behaviour.values()) > 50
    replayed = driftlog("replay", *at, "--version", "2", "--verify", "--json")
    assert 0 == replayed.returncode, replayed.stdout + replayed.stderr
    exported = driftlog("export", *at, "--out", str(site.folder / "out"))
    assert 0 == exported.returncode, exported.stderr
    rows = ds.dataset(site.folder / "out" / "trajectories", format="parquet").to_table().to_pylist()
    masks = [row["loss_mask"] for row in rows]
    assert any(not all(mask) for mask in masks)
    for row in rows:
        assert all(p == 0.0 for p, sampled in zip(row["logprobs"], row["loss_mask"], strict=True) if not sampled)
        assert row["reward_function"].startswith(f"{site.folder}/world.py:Hint@")
    assert [] == leftovers(site)
