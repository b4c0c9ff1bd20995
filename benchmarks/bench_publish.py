"""From a trained version to a live one, by phase, for weights of about 1 MB and 500 MB: real services, one worker.

    python -m benchmarks.bench_publish [--versions 6] [--sizes small large]

The models are LLaMAs with random weights over the demo's few characters, so nearly all bytes are layers. Weights only
are saved (checkpoints.state_every is out of reach). A run is stopped as soon as its last version is live. The last line
is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.short_runs import Stage, policy_of, quantiles_ms, stage, steps_of, tell
from infra.model import attention_for, make_policy, save_weights, transformers_module
from infra.model_presets import build_policy
from schemas import policy_events as ev
from schemas.ledger import StepCompleted

LIVE_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int


SHAPES = {
    "small": Shape(hidden=96, intermediate=256, layers=2, heads=4),
    "large": Shape(hidden=1024, intermediate=2816, layers=10, heads=16),
}


def make_model(shape: Shape, directory: Path) -> None:
    """A model directory with random weights and the demo's tokenizer."""
    donor = build_policy("countdown-tiny", 0)
    transformers = transformers_module()
    config = transformers.LlamaConfig(
        vocab_size=len(donor.tokenizer), hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=donor.tokenizer.eos_token_id,
        pad_token_id=donor.tokenizer.pad_token_id, bos_token_id=None, architectures=["LlamaForCausalLM"],
        dtype="float32",
    )  # fmt: skip
    config._attn_implementation = attention_for(config)
    torch.manual_seed(0)
    files = {**donor.static_files, "config.json": config.to_json_string(use_diff=True).encode()}
    directory.mkdir()
    save_weights(make_policy(transformers.LlamaForCausalLM(config), donor.tokenizer, files), directory)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The sizes in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    options = parser.parse_args(arguments)
    with stage("bench-publish") as at:
        found = {size: measure(at, size, options.versions) for size in options.sizes}
    for size, figures in found.items():
        print(f"{size}: {figures}", file=sys.stderr)
    tell(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
