"""The objective beside TRL and verl, option by option; exit 1 on a difference that has no name.

make parity
.venv-parity/bin/python -m benchmarks.parity --seeds 20 --only gspo
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.parity.batches import fixture, random_batch
from benchmarks.parity.comparison import DTYPES, TOLERANCE, Case, Row, compare, unnamed, unproved

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "objectives.md"
SECTION = "## Parity with TRL and verl"


def main() -> int:
    """Print the table and what is wrong with it; the last line is RESULT {json}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="random batches beside the fixture (default 5)")
    parser.add_argument("--only", default="", help="options whose name holds this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    # Read when the oracles are imported: nothing may leave this machine, and their deprecations are not ours.
    os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    warnings.filterwarnings("ignore")
    try:
        from benchmarks.parity import tokens, trl_cases, verl_cases
    except ModuleNotFoundError as error:
        print(f"parity: {error}; the oracles live in an environment of their own: make parity", file=sys.stderr)
        return 2
    imported = time.monotonic()
    every = [*tokens.cases(), *trl_cases.cases(), *verl_cases.cases()]
    cases = [case for case in every if arguments.only in case.option]
    batches = [fixture(), *map(random_batch, range(arguments.seeds))]
    rows = [compare(case, batches) for case in cases]
    _print_table(rows)
    problems = [f"{row.option} ({row.oracle}): {row.verdict}" for row in rows if row.failed]
    if not arguments.only:
        problems += unproved(cases, rows)
        section = DOCUMENT.read_text(encoding="utf-8").partition(SECTION)[2]
        problems += [f"'{name}' is not explained in docs/{DOCUMENT.name}" for name in unnamed(cases, section)]
    for problem in problems:
        print("parity:", problem, file=sys.stderr)
    print(
        f"{len(batches)} batches x {len(DTYPES)} dtypes; imports {imported - started:.1f} s, "
        f"comparison {time.monotonic() - imported:.1f} s"
    )
    print("RESULT", json.dumps(_result(cases, rows, problems)))
    return 1 if problems else 0


def _print_table(rows: Sequence[Row]) -> None:
    names = " / ".join(DTYPES)
    print(f"largest difference in {names}; gradients relative to their largest element; equal up to {TOLERANCE:g}\n")
    print("| option | oracle | max difference in value | in gradient | verdict |")
    print("|---|---|---|---|---|")
    for row in rows:
        gradient = _both(row.gradients) if row.gradients else "-"
        print(f"| {row.option} | {row.oracle} | {_both(row.values)} | {gradient} | {row.verdict} |")
    print()


def _both(found: dict[str, float]) -> str:
    return " / ".join("0" if found[name] == 0 else f"{found[name]:.1e}" for name in DTYPES)


def _result(cases: Sequence[Case], rows: Sequence[Row], problems: Sequence[str]) -> dict[str, object]:
    equal = [row for row in rows if row.verdict == "equal"]
    largest = {
        f"equal_max_{name}": max((max(row.values[name], row.gradients.get(name, 0.0)) for row in equal), default=0.0)
        for name in DTYPES
    }
    explained = sum(row.verdict.startswith("explained") for row in rows)
    return {
        "options": len(rows),
        "by_oracle": dict(Counter(row.oracle for row in rows)),
        "equal": len(equal),
        "explained": explained,
        "explanations": len({case.explained for case in cases if case.explained}),
        "unexplained": len(rows) - len(equal) - explained,
        "problems": len(problems),
        **largest,
        "trl": version("trl"),
        "verl": version("verl"),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
