"""A run that publishes adapters, by the real services: audited, computed again, and trained again to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftlog.policies import base_directory
from driftlog.run_directory import read_config
from infra.model_adapter import load_served
from schemas.checkpoint import MANIFEST_NAME, WEIGHTS_NAME, decode_manifest
from tests.e2e.driving import driftlog, leftovers, make_site, up

pytestmark = [pytest.mark.long, pytest.mark.soak]

SETTINGS = (
    "lora.rank=4", "lora.publish=adapter", "trainer.learning_rate=1e-2", "objective.overrides={kl_coefficient = 0.01}",
)  # fmt: skip


def test_a_run_of_adapters_is_whole_and_every_version_is_trained_again_to_the_same_bits(
    tmp_path: Path, kafka_jars: Path
) -> None:
    site = make_site(tmp_path)
    done = up(site, "run.versions=3", *SETTINGS)
    assert done.returncode == 0, done.stderr

    run = site.run()
    places = sorted(run.path.rglob(MANIFEST_NAME))
    manifests = [decode_manifest(path.read_bytes()) for path in places]
    assert len(manifests) == 4
    assert all(WEIGHTS_NAME not in {entry.name for entry in manifest.files} for manifest in manifests)
    assert len({manifest.lora.base_sha256 for manifest in manifests if manifest.lora}) == 1

    audit = driftlog("audit", "--directory", str(site.runs), "--recompute", "8", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr

    replay = driftlog("replay", "--directory", str(site.runs), "--version", "1", "--to", "-1", "--verify", "--json")
    assert replay.returncode == 0, replay.stderr
    *steps, total = [json.loads(line) for line in replay.stdout.splitlines()]
    assert (total["replayed"], total["mismatched"]) == (3, 0)
    served = {"adapter_model.safetensors", "adapter_config.json", "base.json"}
    assert all(served | {"optimizer.safetensors"} <= set(step["files_compared"]) for step in steps)
    assert leftovers(site) == []

    policy = load_served(places[0].parent, base_directory(read_config(run.config_files()[-1]), run))
    assert policy.vocabulary_size > 0
