"""What staleness costs, and what clip and correction give back: the demo task at several lags, seed by seed.

Weights that generate are exactly `lag` steps old once running, as with run_ahead = max_lag. One process, one
thread. Raw numbers go to benchmarks/results/lag_study.json; --from-results draws table and plot from them again.

    make lag-study
    make lag-study LAG_ARGS=--from-results

Prints the table of docs/objectives.md and, last, RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from benchmarks.learning_curve import CurveLoop, CurveSettings
from consumers.objective.options import CorrectionKind, Objective
from consumers.objective.settings import ObjectiveSettings, preset
from infra.model_presets import warm_start

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lag_study.json"
PLOT = ROOT / "docs" / "lag_study.png"

LAGS = (0, 2, 8, 32)
REMEDIES = {
    "clip": preset("grpo"),
    "correction": ObjectiveSettings(
        objective=Objective.REINFORCE, correction=CorrectionKind.TOKEN_TIS, correction_cap=2.0
    ),
    "neither": ObjectiveSettings(objective=Objective.REINFORCE),
}
FRESH = "all"
"""the remedy of lag 0: there every ratio is 1, so the three are the same loss"""
CUT_METRIC = {
    FRESH: "actor/pg_clipfrac",
    "clip": "actor/pg_clipfrac",
    "correction": "mismatch/capped_fraction",
    "neither": None,
}
"""the share of tokens that the remedy cuts"""

LAST_SHARE = 0.15
"""of the steps: what counts as the end of a run"""
ROUNDS = 6
"""times the newest weights are sampled in that end: one version alone swings by several points"""
ROUND_SAMPLES = 4
"""answers to each prompt of the mixture (124 prompts) a round"""
EVALUATION_EPOCH = 1_000_000
"""random numbers that no training step draws"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Raw numbers of one run, one value a step where it is a list."""

    lag: int
    remedy: str
    seed: int
    success: list[float]
    """mean reward of the answers that were trained on: of weights `lag` steps old"""
    ess: list[float]
    """effective sample size of theta/behaviour, as a share"""
    cut: list[float]
    newest: list[float]
    """sampled success of the newest weights, ROUNDS times over the end of the run"""
    greedy: float
    """greedy success of the last weights"""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a lag and a remedy, over seeds."""

    lag: int
    remedy: str
    success: tuple[float, float, float]
    """mean, lowest and highest seed, over the end of the run"""
    newest: tuple[float, float, float]
    ess: float
    """mean over the steps at full lag"""
    ess_lowest: float
    """lowest mean over seeds of any ten steps in a row at full lag"""
    cut: float | None
    """share of tokens, mean over the steps at full lag; None: this remedy cuts nothing"""


def main(arguments: Sequence[str]) -> int:
    """Run or read the study, draw it, print table and summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lags", type=int, nargs="+", default=list(LAGS))
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="as in configs/countdown.toml")
    parser.add_argument("--from-results", action="store_true", help="run nothing: read --results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args(arguments)
    if options.steps <= max(options.lags):
        parser.error(f"--steps {options.steps} must be above the largest lag, {max(options.lags)}")
    if options.from_results:
        study = json.loads(options.results.read_text())
    else:
        study = run_study(options.lags, options.seeds, options.steps, options.learning_rate)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(as_text(study))
    runs = [Run(**run) for run in study["runs"]]
    rows = summarise(runs)
    draw(runs, options.plot)
    print(table(rows))
    summary = {"bench": "lag_study", **study["settings"], "seconds": study["seconds"], "rows": list(map(asdict, rows))}
    print("RESULT " + json.dumps(summary))
    return 0


# ---------------------------------------------------------------- running


def run_study(lags: Sequence[int], seeds: Sequence[int], steps: int, learning_rate: float) -> dict[str, Any]:
    """All runs in turn; settings, machine and raw numbers."""
    started_s = time.perf_counter()
    runs = []
    with TemporaryDirectory(prefix="lag-study-") as folder:
        for seed in seeds:
            warm = Path(folder) / f"warm-{seed}"
            warm_start("countdown-tiny", seed, warm)
            for lag in lags:
                for remedy in REMEDIES if lag else (FRESH,):
                    run = run_one(lag, remedy, seed, steps, learning_rate, warm)
                    runs.append(asdict(run))
                    end = np.mean(run.success[-end_steps(steps) :])
                    print(f"seed {seed} lag {lag} {remedy}: {end:.3f}, {run.seconds:.0f} s", file=sys.stderr)
    return {
        "settings": {"steps": steps, "seeds": list(seeds), "lags": list(lags), "learning_rate": learning_rate},
        "machine": {
            "processors": os.cpu_count(),
            "architecture": platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "seconds": round(time.perf_counter() - started_s),
        "runs": sorted(runs, key=lambda run: (run["lag"], run["remedy"], run["seed"])),
    }


def run_one(lag: int, remedy: str, seed: int, steps: int, learning_rate: float, warm: Path) -> Run:
    """One training from the warm start."""
    started_s = time.perf_counter()
    settings = CurveSettings(
        seed=seed,
        steps=steps,
        lag=lag,
        groups=16,
        group_size=16,
        learning_rate=learning_rate,
        objective=REMEDIES["clip" if remedy == FRESH else remedy],
        batching="mixed",
        threads=1,
        # Old data without any ratio is refused at start-up. Here it is the point, so the learner is told lag 0.
        declared_lag=0 if remedy == "neither" else lag,
    )
    success, ess, cut, newest = [], [], [], []
    with TemporaryDirectory(prefix="lag-run-") as folder:
        shutil.copytree(warm, Path(folder) / "warm")
        loop = CurveLoop(settings, Path(folder))
        rounds = rounds_after(steps)
        for step in range(steps):
            metrics = loop.step(step).metrics
            success.append(round(metrics["critic/rewards/mean"], 4))
            ess.append(round(metrics["actor/ratio_ess"], 4))
            metric = CUT_METRIC[remedy]
            cut.append(round(metrics[metric], 4) if metric else 0.0)
            if step in rounds:
                newest.append(round(loop.sampled(size=ROUND_SAMPLES, epoch=EVALUATION_EPOCH + step), 4))
        greedy = round(loop.greedy(held_out=False), 4)
    seconds = round(time.perf_counter() - started_s, 1)
    return Run(
        lag=lag, remedy=remedy, seed=seed, success=success, ess=ess, cut=cut, newest=newest, greedy=greedy,
        seconds=seconds,
    )  # fmt: skip


def end_steps(steps: int) -> int:
    """How many steps are the end of a run.

    >>> end_steps(120)
    18
    """
    return max(1, round(LAST_SHARE * steps))


def rounds_after(steps: int) -> frozenset[int]:
    """The steps after which the newest weights are sampled: evenly over the end, the last step among them.

    >>> sorted(rounds_after(120))
    [104, 107, 110, 113, 116, 119]
    """
    end = end_steps(steps)
    return frozenset(steps - 1 - round(place * end / ROUNDS) for place in range(min(ROUNDS, end)))


def as_text(study: dict[str, Any]) -> str:
    """JSON with one run a line."""
    head = {name: value for name, value in study.items() if name != "runs"}
    lines = ",\n".join(json.dumps(run) for run in study["runs"])
    return f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n'


# ---------------------------------------------------------------- table and plot


def summarise(runs: Sequence[Run]) -> list[Row]:
    """One row for each lag and remedy, in the order of the table."""
    rows = []
    for lag in sorted({run.lag for run in runs}):
        for remedy in (FRESH, *REMEDIES):
            chosen = [run for run in runs if (run.lag, run.remedy) == (lag, remedy)]
            if not chosen:
                continue
            end = end_steps(len(chosen[0].success))
            ess = np.mean([run.ess[lag:] for run in chosen], axis=0)
            cut = float(np.mean([run.cut[lag:] for run in chosen]))
            rows.append(
                Row(
                    lag=lag,
                    remedy=remedy,
                    success=_spread([float(np.mean(run.success[-end:])) for run in chosen]),
                    newest=_spread([float(np.mean(run.newest)) for run in chosen]),
                    ess=round(float(np.mean(ess)), 3),
                    ess_lowest=round(float(np.min(_smooth(ess, 10))), 3),
                    cut=round(cut, 4) if CUT_METRIC[remedy] else None,
                )
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The table of docs/objectives.md."""
    lines = [
        "| lag | remedy | success, last 15 % | newest weights | ESS | lowest ESS | tokens cut |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cut = "-" if row.cut is None else f"{100 * row.cut:.1f} %"
        sizes = f"{row.ess:.2f} | {row.ess_lowest:.2f}"
        lines.append(f"| {row.lag} | {row.remedy} | {_range(row.success)} | {_range(row.newest)} | {sizes} | {cut} |")
    return "\n".join(lines)


COLOURS = {"clip": "#0072b2", "correction": "#e69f00", "neither": "#d55e00", FRESH: "#808080"}
SMOOTH_STEPS = 6


def draw(runs: Sequence[Run], path: Path) -> None:
    """Success above, effective sample size below, one column a lag; lag 0 in grey in each."""
    lags = [lag for lag in sorted({run.lag for run in runs}) if lag] or [0]
    figure = Figure(figsize=(3.5 * len(lags), 5.6), dpi=100, layout="constrained")
    panels = figure.subplots(2, len(lags), sharex=True, sharey="row", squeeze=False)
    for column, lag in enumerate(lags):
        for remedy in (FRESH, *REMEDIES):
            chosen = [run for run in runs if run.remedy == remedy and run.lag in (0, lag)]
            if not chosen:
                continue
            label = "lag 0" if remedy == FRESH else remedy
            start = chosen[0].lag
            _band(panels[0][column], [run.success for run in chosen], 0, COLOURS[remedy], label)
            _band(panels[1][column], [run.ess for run in chosen], start, COLOURS[remedy], label)
        panels[0][column].set_title(f"lag {lag}")
        panels[1][column].set_xlabel("training step")
        for panel in panels[:, column]:
            panel.set_ylim(0, 1.02)
            panel.grid(alpha=0.25)
            if lag:
                # Until here generation still uses version 0.
                panel.axvline(lag, color="black", linewidth=0.8, linestyle=":")
    panels[0][0].set_ylabel("success of what is trained on")
    panels[1][0].set_ylabel("effective sample size")
    panels[0][0].legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _band(panel: Any, curves: Sequence[Sequence[float]], start: int, colour: str, label: str) -> None:
    """Mean line over seeds, and a band from the lowest to the highest."""
    smooth = np.array([_smooth(np.array(curve[start:]), SMOOTH_STEPS) for curve in curves])
    steps = len(curves[0]) - smooth.shape[1] + np.arange(smooth.shape[1])
    panel.fill_between(steps, smooth.min(axis=0), smooth.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    panel.plot(steps, smooth.mean(axis=0), color=colour, linewidth=1.6, label=label)


def _smooth(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Means of `width` values in a row; of all where there are fewer."""
    width = min(width, len(values))
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return round(float(np.mean(values)), 4), round(min(values), 4), round(max(values), 4)


def _range(spread: tuple[float, float, float]) -> str:
    mean, low, high = (f"{value:.2f}".removeprefix("0") for value in spread)
    return f"{mean} ({low} to {high})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
