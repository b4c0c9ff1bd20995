"""Tiled log-probabilities against the plain full-logits formula: time and peak memory.

4,096 tokens, hidden 576, vocabulary 49,152, float32. Every run is a process of its own, so that its
peak of resident memory is its own; plain and ours take turns, so that a busy neighbour hits both.
Memory is counted above what the inputs need. The last line is `RESULT {json}`.

    make bench-objective
    python -m benchmarks.bench_objective --repeats 2 --chunk-tokens 256
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENS, HIDDEN, VOCABULARY = 4096, 576, 49152
MIB = 1024**2
VARIANTS = ("plain", "ours")
TARGETS = {
    "memory_ratio": ("at least", 8.0),
    "time_ratio": ("at most", 1.3),
    "scoring_memory_ratio": ("at least", 10.0),
    "scoring_time_ratio": ("at most", 1.1),
}


def main() -> None:
    """Run all variants in turns and print the ratios, or run one variant (a child process)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="runs of each variant (default 4)")
    parser.add_argument("--chunk-tokens", type=int, default=0, help="0: the library's default")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=["train", "score"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(run_variant(arguments)))
        return
    result = compare(arguments)
    for name, (direction, target) in TARGETS.items():
        print(f"{name}: {result[name]:.3f} (target: {direction} {target})")
    print("RESULT", json.dumps(result))


def compare(arguments: argparse.Namespace) -> dict[str, float]:
    """Runs in turns. A ratio of times is that of the fastest runs: neighbours can only add time.

    The median over neighbouring runs and the processor time are reported beside it.
    """
    result: dict[str, float] = {}
    for mode, prefix in (("train", ""), ("score", "scoring_")):
        pairs = []
        for repeat in range(arguments.repeats):
            order = VARIANTS if repeat % 2 == 0 else VARIANTS[::-1]
            pairs.append({variant: _child(arguments, variant, mode) for variant in order})
        for variant in VARIANTS:
            runs = [pair[variant] for pair in pairs]
            seconds = min(run["seconds"] for run in runs)
            cpu_seconds = min(run["cpu_seconds"] for run in runs)
            peak = statistics.median(run["peak_mib"] for run in runs)
            result |= {
                f"{prefix}{variant}_seconds": seconds,
                f"{prefix}{variant}_cpu_seconds": cpu_seconds,
                f"{prefix}{variant}_peak_mib": peak,
            }
            times = f"{seconds:.2f} s ({cpu_seconds:.2f} s of processor)"
            print(f"{mode} {variant}: {times}, {peak:.0f} MiB above the inputs", flush=True)
        for name in ("seconds", "cpu_seconds"):
            ratio = result[f"{prefix}ours_{name}"] / result[f"{prefix}plain_{name}"]
            result[f"{prefix}{name.replace('seconds', 'time')}_ratio"] = ratio
        result[f"{prefix}median_time_ratio"] = statistics.median(
            pair["ours"]["seconds"] / pair["plain"]["seconds"] for pair in pairs
        )
        result[f"{prefix}memory_ratio"] = result[f"{prefix}plain_peak_mib"] / result[f"{prefix}ours_peak_mib"]
        result[f"{prefix}mean_difference"] = max(abs(pair["plain"]["mean"] - pair["ours"]["mean"]) for pair in pairs)
    return {name: round(value, 9 if "difference" in name else 3) for name, value in result.items()}


def run_variant(arguments: argparse.Namespace) -> dict[str, float]:
    """One timed run in this process, after a small one that loads the kernels."""
    import torch

    from consumers.objective import CHUNK_TOKENS, score_logprobs, token_logprobs

    chunk_tokens = arguments.chunk_tokens or CHUNK_TOKENS

    def plain(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
    ) -> torch.Tensor:
        logits = (hidden @ weight.T) / temperature[:, None]
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]

    def ours(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
    ) -> torch.Tensor:
        function = token_logprobs if arguments.mode == "train" else score_logprobs
        return function(hidden, weight, targets, temperature, chunk_tokens=chunk_tokens).logprobs_N

    formula = plain if arguments.variant == "plain" else ours

    def step(count: int, inputs: tuple[torch.Tensor, ...]) -> float:
        hidden, weight, targets, temperature = inputs
        if arguments.mode == "score":
            with torch.no_grad():
                return float(formula(hidden[:count], weight, targets[:count], temperature[:count]).sum())
        values = formula(hidden[:count], weight, targets[:count], temperature[:count])
        values.sum().backward()
        return float(values.detach().sum())

    torch.manual_seed(0)
    trained = arguments.mode == "train"
    hidden = torch.randn(arguments.tokens, HIDDEN, requires_grad=trained)
    weight = (torch.randn(arguments.vocabulary, HIDDEN) * 0.05).requires_grad_(trained)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,))
    temperature = torch.ones(arguments.tokens)
    small = (torch.randn(64, HIDDEN, requires_grad=trained), torch.randn(256, HIDDEN, requires_grad=trained))
    step(64, (*small, torch.zeros(64, dtype=torch.int64), torch.ones(64)))
    base = _reset_peak()
    start, cpu_start = time.perf_counter(), time.process_time()
    total = step(arguments.tokens, (hidden, weight, targets, temperature))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mib": (_status("VmHWM") - base) / MIB,
        "mean": total / arguments.tokens,
    }


def _child(arguments: argparse.Namespace, variant: str, mode: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--variant", variant, "--mode", mode]
    for name in ("chunk_tokens", "tokens", "vocabulary"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{variant} {mode} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _reset_peak() -> int:
    """Set the kernel's peak counter back to what is resident now (Linux), and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
