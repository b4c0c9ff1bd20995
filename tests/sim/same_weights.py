"""Are two runs the same training? The batch digest by content: what was sampled, not who stamped it when."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from consumers.trainer.batch import TrainBatch
from infra.policy_follower import PolicyFollower
from tests.sim.world import Plan, World


def content_digest(batch: TrainBatch) -> str:
    """sha256 hex over ids, tokens, log-probabilities and advantages, in order: no clock, no worker."""
    digest = hashlib.sha256()
    for row in batch.rows:
        digest.update(row.trajectory.trajectory_id.encode())
        digest.update(row.trajectory.token_ids.tobytes() + row.trajectory.logprobs.tobytes())
        digest.update(f"/{row.advantage!r}/{row.weight!r}".encode())
    return digest.hexdigest()


def scheduled(plan: Plan, directory: Path, schedule: int) -> World:
    """Run a plan; `schedule` decides who runs when and who dies, not what is asked for or sampled."""
    world = World(plan, directory)
    world.random = random.Random(f"schedule/{schedule}")
    world.run()
    return world


def final_weights(world: World) -> str:
    """The weights of the newest version, read from the store."""
    follower = PolicyFollower(world.log.client("check").reader({"sim.policy": 1}, "beginning"), "sim.policy")
    follower.advance(100_000)
    assert follower.fold.newest is not None
    published = follower.fold.versions[follower.fold.newest].event
    directory, _ = world.store().fetch(published.manifest_uri, published.manifest_sha256)
    return (directory / "model.safetensors").read_text()
