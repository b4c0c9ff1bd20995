"""Runs the benchmarks in turn, each as a process with a time limit, and writes benchmarks/results/bench.json.

    make bench                                    all of them, half an hour on a quiet machine
    make bench BENCH_ONLY=transport               one (or "codec step"); the others keep their figures
    make bench BENCH_SUITE_ARGS=--quick           a smoke run with small arguments: do not read its figures

Then docs/benchmarks.md is written from that file (benchmarks/tables.py). Nothing is judged by the clock: exit 1 means
that a benchmark gave no figures. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.headline import headline

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "bench.json"
PAGE = ROOT / "docs" / "benchmarks.md"
STOP_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One benchmark: benchmarks/bench_<name>.py."""

    name: str
    limit_s: float
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    usual: bool = True
    """runs when none is named"""


BENCHES = (
    Bench(name="codec", limit_s=120, full=("--rounds", "40"), quick=("--rounds", "4")),
    Bench(name="transport", limit_s=600, full=("--rounds", "4", "--groups", "2000", "--seconds", "4"),
          quick=("--rounds", "1", "--groups", "300", "--seconds", "2", "--transactions", "10")),
    Bench(name="step", limit_s=420, full=("--versions", "100"),
          quick=("--versions", "20", "--long-versions", "8", "--warm-up", "5")),
    Bench(name="publish", limit_s=360, full=("--versions", "8"), quick=("--versions", "3", "--store-mb", "200")),
    Bench(name="async", limit_s=900, full=("--versions", "60"),
          quick=("--versions", "20", "--seeds", "0", "--long-versions", "10", "--long-seeds", "0")),
    Bench(name="idle", limit_s=180, quick=("--seconds", "5")),
    Bench(name="offline", limit_s=480, full=("--versions", "60"), quick=("--versions", "20", "--rounds", "1")),
    Bench(name="startup", limit_s=360, full=("--rounds", "3"), quick=("--rounds", "1")),
    Bench(name="memory", limit_s=900, full=("--groups", "10000"), quick=("--groups", "480")),
    Bench(name="replay", limit_s=240, quick=("--trajectories", "4000", "--rounds", "1")),
    Bench(name="objective", limit_s=300, full=("--repeats", "2"), quick=("--repeats", "1", "--tokens", "512")),
    Bench(name="switching", limit_s=420, full=("--versions", "40", "--rounds", "1", "--settings", "short"),
          quick=("--versions", "20", "--rounds", "1", "--settings", "short")),
    # Needs the vLLM environment and a model directory: `make bench-generator` makes both.
    Bench(name="generator", limit_s=900, quick=("--rounds", "1"), usual=False),
)  # fmt: skip


def last_result(text: str) -> dict[str, Any] | None:
    """What the last RESULT line says."""
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return None
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }  # fmt: skip


def run(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """One benchmark to its end: its figures, or why it has none."""
    arguments = bench.quick if quick else bench.full
    load, begun_s = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.bench_{bench.name}", *arguments]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        told, _ = child.communicate(timeout=bench.limit_s)
        code: int | str = child.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGINT)  # it stops its run and its broker, and removes its folder
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        told, _ = child.communicate()
        code = f"no end within {bench.limit_s:.0f} s"
    result = last_result(told)
    entry: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "load": round(load, 1), "quick": quick,
        "arguments": " ".join(arguments), "seconds": round(time.monotonic() - begun_s),
    }  # fmt: skip
    return {**entry, "result": result} if result is not None else {**entry, "failed": f"it ended with {code}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, store, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[bench.name for bench in BENCHES], default=[])
    parser.add_argument("--quick", action="store_true", help="small arguments: does everything run?")
    parser.add_argument("--tables-only", action="store_true", help="run nothing: write the page again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    stored: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {"benches": {}}
    # A shell that starts us in the background has it ignored, and the children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = []
    chosen = [bench for bench in BENCHES if (bench.name in options.only if options.only else bench.usual)]
    for bench in () if options.tables_only else chosen:
        print(f"== {bench.name} (at most {bench.limit_s:.0f} s)", file=sys.stderr, flush=True)
        entry = run(bench, quick=options.quick)
        stored["machine"], stored["benches"][bench.name] = machine(), entry
        if "failed" in entry:
            failed.append(bench.name)
            print(f"{bench.name}: {entry['failed']}", file=sys.stderr)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    options.page.write_text(tables.page(stored), encoding="utf-8")
    seconds = {name: entry["seconds"] for name, entry in stored["benches"].items()}
    print(
        "RESULT " + json.dumps({"bench": "suite", "failed": failed, **headline(stored["benches"]), "seconds": seconds})
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
