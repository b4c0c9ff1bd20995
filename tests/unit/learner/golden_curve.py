"""The golden learning curve: a few training steps of the tiny model on stored batches, and how to renew it.

    python -m tests.unit.learner.golden_curve        writes golden_curve.json beside this file

Bits depend on the machine type, the thread count and the libraries, so a curve is kept for each such key.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from infra.model import library_versions
from schemas.checkpoint import WEIGHTS_NAME
from tests.fakes.policy_learners import learner, made_batch

FILE = Path(__file__).with_name("golden_curve.json")
STEPS = 6
METRICS = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/entropy")


def key() -> str:
    """What decides the bits."""
    machine = f"{platform.machine()} {_cpu_model()} {torch.backends.cpu.get_cpu_capability()}"
    versions = library_versions()
    return f"{machine} threads=1 torch={versions['torch']} transformers={versions['transformers']}"


def _cpu_model() -> str:
    """Kernels are chosen by it; "unknown" where the system does not say."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def curve() -> dict[str, Any]:
    """Losses of every step, and the sha256 of the weights after the last."""
    torch.set_num_threads(1)
    made = learner(learning_rate=2e-3, warmup_steps=2, schedule="cosine", total_steps=20)
    # Two batches in turns: the second use of each is off-policy, so that clip and ratio are in the curve.
    batches = [made_batch(seed=seed) for seed in range(2)]
    steps = []
    for step in range(STEPS):
        metrics = made.train(batches[step % 2]).metrics
        steps.append({name: float(metrics[name]).hex() for name in METRICS})
    with TemporaryDirectory() as directory:
        made.save(Path(directory))
        digest = hashlib.sha256((Path(directory) / WEIGHTS_NAME).read_bytes()).hexdigest()
    return {"weights_sha256": digest, "steps": steps}


def main() -> None:
    """Add or replace the curve of this machine."""
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    stored[key()] = curve()
    FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    sys.stderr.write(f"{FILE.name}: {key()}\n")


if __name__ == "__main__":
    main()
