"""From a trained version to a live one, by phase, for weights of about 1 MB and 500 MB: real services, one worker.

    python -m benchmarks.bench_publish [--versions 6] [--sizes small large] [--store-mb 2000]

The models are LLaMAs with random weights (benchmarks/models.py). Weights only are saved (checkpoints.state_every is out
of reach). A run is stopped as soon as its last version is live. Then the checkpoint store alone saves larger weights:
write, hash, fsync, rename. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.models import SHAPES, make_model
from benchmarks.short_runs import Stage, medians, policy_of, quantiles_ms, stage, steps_of, tell
from infra.checkpoint_store import FsspecCheckpointStore
from schemas import policy_events as ev
from schemas.checkpoint import WEIGHTS_NAME, Manifest
from schemas.ledger import StepCompleted

LIVE_LIMIT_S = 240.0
SIZES = ("small", "large")
TENSORS = 64
"""of the weights that are saved alone"""


def phases_of(events: Iterable[ev.AnyPolicyEvent], steps: Iterable[StepCompleted]) -> dict[str, list[float]]:
    """Seconds of each phase of each trained version that went live (0 is not trained)."""
    saved = {step.version_out: step.phase_s for step in steps}
    published: dict[int, int] = {}
    started: dict[int, int] = {}
    loaded: dict[int, ev.VersionLoaded] = {}
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if isinstance(event, ev.VersionPublished):
            published[event.version] = event.at_us
        elif isinstance(event, ev.SwitchStarted):
            started[event.version] = event.at_us
        elif isinstance(event, ev.VersionLoaded):
            loaded[event.version] = event
        elif isinstance(event, ev.VersionActivated) and event.version in saved.keys() & loaded.keys():
            version, proof = event.version, loaded[event.version]
            saving_s = saved[version].get("checkpoint", 0.0)
            live_s = (event.at_us - published[version]) / 1e6
            rows = {
                **{f"save: {name.removeprefix('checkpoint_')}": seconds
                   for name, seconds in saved[version].items() if name.startswith("checkpoint_")},
                "save": saving_s,
                "published to switch": (started[version] - published[version]) / 1e6,
                **{f"load: {name}": seconds for name, seconds in proof.phase_s.items()},
                "switch to proof": (proof.at_us - started[version]) / 1e6,
                "proof to live": (event.at_us - proof.at_us) / 1e6,
                "published to live": live_s,
                "trained to live": saving_s + live_s,
            }  # fmt: skip
            for name, seconds in rows.items():
                found[name].append(seconds)
    return dict(found)


def measure(at: Stage, size: str, versions: int) -> dict[str, object]:
    """One run of that size."""
    model = at.folder / f"model-{size}"
    make_model(SHAPES[size], model)
    sets = [
        "run.versions=1000", f'model.init="{model}"', "generator.workers=1", "coordinator.min_workers=1",
        "task.group_size=4", "trainer.groups_per_step=2", "trainer.learning_rate=1e-4", "checkpoints.state_every=1000",
        "checkpoints.keep=4", "coordinator.switch_deadline_s=120.0",
    ]  # fmt: skip
    with at.started(size, sets) as up:
        at.until_live(up, size, versions, LIVE_LIMIT_S)
    log = at.log(size)
    events = policy_of(log)
    made = [event for event in events if isinstance(event, ev.VersionPublished)]
    phases = phases_of(events, steps_of(log))
    shutil.rmtree(model)
    shutil.rmtree(at.directory(size).path / "checkpoints", ignore_errors=True)
    return {
        "weights_mb": round((made[-1].bytes if made else 0) / 1e6, 1),
        "versions": len(phases.get("published to live", ())),
        "phases": {name: quantiles_ms(seconds) for name, seconds in phases.items()},
    }


def store_rate(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """MB/s of the checkpoint store: what a learner holds to a complete, hashed, fsynced directory; the median."""
    tensors = {f"layer.{number}": torch.rand(megabytes * 1_000_000 // 4 // TENSORS) for number in range(TENSORS)}
    store = FsspecCheckpointStore(str(folder / "store"), "bench")
    rates, phases = [], []
    for number in range(rounds):
        manifest = Manifest(
            run="bench", attempt_id=f"a{number}", parent=None, dtype={"weights": "float32"},
            fingerprint={}, optimizer_step=number, has_state=False, library_versions={}, threads=1, device_type="cpu",
            logprob_chunk=1, code_revision="", config_digest="",
        )  # fmt: skip
        begun_s = time.perf_counter()
        saved = store.save(
            f"a{number}", lambda at: save_file(tensors, at / WEIGHTS_NAME, metadata={"format": "pt"}), manifest
        )
        rates.append(saved.bytes / 1e6 / (time.perf_counter() - begun_s))
        phases.append(dict(saved.phase_s))
        store.delete(saved.manifest_uri)
    told = {f"{name}_s": round(value, 3) for name, value in medians(phases).items()}
    return {"megabytes": megabytes, "rounds": rounds, "mb_per_s": round(statistics.median(rates), 1), **told}


def main(arguments: Sequence[str] | None = None) -> int:
    """The sizes in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--store-mb", type=int, default=2_000, help="weights for the store alone; 0: not measured")
    parser.add_argument("--rounds", type=int, default=3, help="of the store alone")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, Any]] = {}
    with stage("bench-publish") as at:
        if options.store_mb:
            found["store"] = store_rate(at.folder, options.store_mb, options.rounds)
        found |= {size: measure(at, size, options.versions) for size in options.sizes}
    for size, figures in found.items():
        print(f"{size}: {figures}", file=sys.stderr)
    tell(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
