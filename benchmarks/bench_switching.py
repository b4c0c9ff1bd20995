"""Barrier against rolling, finish against keep: generator idle time, tokens/s, switch latency and the lag reached.

    python -m benchmarks.bench_switching [--versions 60] [--rounds 2] [--settings short long]

Runs `driftlog up` on the configuration of the demo, one run after the other, the four variants interleaved, all on one
broker and from one initial policy. Measured between the activations of the first version after the warm-up and of the
last one. The last line is `RESULT {json}`. Figures move from machine to machine: compare them side by side only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from consumers.offline.run_log import RunLog
from driftlog.run_directory import RunDirectory
from driftlog.run_reading import opened
from infra import local_broker
from infra.model import save_weights
from infra.model_presets import build_policy, warm_start
from schemas import policy_events as ev
from schemas.heartbeat import Heartbeat
from schemas.policy_fold import PolicyFold

VARIANTS = tuple((mode, in_flight) for mode in ("barrier", "rolling") for in_flight in ("finish", "keep"))
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "short": ('model.init="{folder}/warm"',),
    # Random weights end an answer at every token with equal probability: long completions with a long tail.
    "long": ('model.init="{folder}/random"', "task.max_tokens=48"),
}
WARM_UP_VERSIONS = 10
RUN_LIMIT_S = 900.0
HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run between two activations, or the mean of several."""

    seconds: float
    versions_per_minute: float
    tokens_per_s: float
    """finished by all workers"""
    idle_fraction: float
    """of the workers' time, mean over their heartbeats"""
    live_ms_p50: float
    """published to live"""
    live_ms_p95: float
    proven_ms_p50: float
    """published to a worker's ack: in rolling mode it samples from then on"""
    proven_ms_p95: float
    drain_ms_p50: float
    """of a worker's switch: waiting for running groups"""
    load_ms_p50: float
    """of a worker's switch: loading and probing"""
    stopped_ms_p50: float
    """of a worker's switch: it may not sample, from the start of the load until its ack (rolling) or the activation"""
    stopped_share: float
    """of the workers' time"""
    lag_mean: float
    """policy lag of the trained trajectories, whole run"""
    lag_max: float
    completion_tokens_mean: float
    mixed_share: float
    """of the trajectories were sampled under more than one version"""


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile; 0 of nothing."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def idle_of(beats: Iterable[Heartbeat], from_us: int, to_us: int) -> float:
    """Mean idle fraction of the heartbeats in between. One that repeats the window of the one before counts once."""
    last: dict[tuple[str, str], tuple[float, float]] = {}
    found: list[float] = []
    for beat in beats:
        worker, window = (beat.worker, beat.incarnation), (beat.idle_fraction, beat.tokens_per_s)
        repeats = last.get(worker) == window
        last[worker] = window
        if not repeats and from_us < beat.at_us <= to_us:
            found.append(beat.idle_fraction)
    return statistics.fmean(found) if found else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """When versions were published, proven and live; microseconds and seconds of the machine's one clock."""

    published_us: dict[int, int]
    live_us: dict[int, int]
    loaded: tuple[ev.VersionLoaded, ...]

    def window(self, warm_up: int) -> tuple[int, int, int]:
        """(from, to, versions) between the first activation of a version >= warm_up and the last one."""
        live = sorted(version for version in self.live_us if version >= warm_up)
        if len(live) < 2:
            raise SystemExit(f"only {len(live)} versions went live after the warm-up: use more --versions")
        return self.live_us[live[0]], self.live_us[live[-1]], live[-1] - live[0]


def switches_of(events: Iterable[ev.AnyPolicyEvent]) -> Switches:
    """The legal events of a run, in order."""
    published, live, loaded = {}, {}, []
    for event in events:
        if isinstance(event, ev.VersionPublished):
            published[event.version] = event.at_us
        elif isinstance(event, ev.VersionActivated):
            live[event.version] = event.at_us
        elif isinstance(event, ev.VersionLoaded):
            loaded.append(event)
    return Switches(published_us=published, live_us=live, loaded=tuple(loaded))


def stopped_ms(switches: Switches, loaded: Sequence[ev.VersionLoaded], *, rolling: bool) -> list[float]:
    """For each load: from its start until the worker may sample again. Not the drain: it generates then."""
    found = []
    for event in loaded:
        go_us = event.at_us if rolling else switches.live_us.get(event.version, event.at_us)
        found.append(1e3 * event.phase_s.get("loading", 0.0) + max(0, go_us - event.at_us) / 1e3)
    return found


def measure(log: RunLog, lags: Mapping[str, int], warm_up: int, *, rolling: bool, workers: int) -> Measured:
    """Read one run. `lags`: policy lag -> trained trajectories."""
    entries = log.policy(PolicyFold())
    switches = switches_of(entry.event for entry in entries if entry.is_legal and entry.event is not None)
    from_us, to_us, versions = switches.window(warm_up)
    seconds = (to_us - from_us) / 1e6
    rows = [row.trajectory for entry in log.trajectories() for row in entry.rows if row.trajectory is not None]
    rows = [row for row in rows if from_us < row.finished_at_us <= to_us]
    loaded = [e for e in switches.loaded if from_us < e.at_us <= to_us and e.version in switches.published_us]
    live_ms = [
        (at_us - switches.published_us[version]) / 1e3
        for version, at_us in switches.live_us.items()
        if from_us < at_us <= to_us
    ]
    proven_ms = [(e.at_us - switches.published_us[e.version]) / 1e3 for e in loaded]
    stopped = stopped_ms(switches, loaded, rolling=rolling)
    tokens = [len(row.token_ids) for row in rows]
    trained = {int(lag): count for lag, count in lags.items()}
    return Measured(
        seconds=seconds,
        versions_per_minute=versions / seconds * 60,
        tokens_per_s=sum(tokens) / seconds,
        idle_fraction=idle_of(log.heartbeats(), from_us, to_us),
        live_ms_p50=quantile(live_ms, 0.5),
        live_ms_p95=quantile(live_ms, 0.95),
        proven_ms_p50=quantile(proven_ms, 0.5),
        proven_ms_p95=quantile(proven_ms, 0.95),
        drain_ms_p50=quantile([1e3 * e.phase_s.get("draining", 0.0) for e in loaded], 0.5),
        load_ms_p50=quantile([1e3 * e.phase_s.get("loading", 0.0) for e in loaded], 0.5),
        stopped_ms_p50=quantile(stopped, 0.5),
        stopped_share=sum(stopped) / 1e3 / (seconds * workers),
        lag_mean=sum(lag * count for lag, count in trained.items()) / max(1, sum(trained.values())),
        lag_max=float(max(trained, default=0)),
        completion_tokens_mean=statistics.fmean(tokens) if tokens else 0.0,
        mixed_share=statistics.fmean([float(len(row.segments) > 1) for row in rows]) if rows else 0.0,
    )


def mean_of(runs: Sequence[Measured]) -> dict[str, float]:
    """Field by field."""
    plain = [asdict(run) for run in runs]
    return {name: round(statistics.fmean(run[name] for run in plain), 4) for name in plain[0]}


def make_policies(folder: Path) -> None:
    """The initial policies of all runs: the demo's, and one with random weights."""
    warm_start("countdown-tiny", 0, folder / "warm")
    (folder / "random").mkdir()
    save_weights(build_policy("countdown-tiny", 0), folder / "random")


def run_once(name: str, sets: Sequence[str], folder: Path, bootstrap: str, warm_up: int) -> Measured:
    """One `driftlog up` to its end, then what its log says."""
    words = [word for setting in sets for word in ("--set", setting)]
    command = [sys.executable, "-m", "driftlog", "up", "--config", "configs/countdown.toml", "--run", name, *words]
    environment = {**os.environ, "DRIFTLOG_KAFKA": bootstrap, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    run = RunDirectory(folder / "runs", name)
    config = run.stored_config()
    assert config is not None, "up stores it before anything else"
    lags = json.loads(run.summary.read_text())["policy_lag_histogram"]
    rolling, workers = config.coordinator.mode == "rolling", config.generator.workers
    return measure(opened(config, run, bootstrap).log(), lags, warm_up, rolling=rolling, workers=workers)


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """What a person reads, in Markdown."""
    lines = [
        "| run | idle | tokens/s | versions/min | live ms p50 / p95 | proven p50 / p95 | drain, load | stopped | lag |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, m in rows.items():
        lines.append(
            f"| {name} | {m['idle_fraction']:.0%} | {m['tokens_per_s']:.0f} | {m['versions_per_minute']:.0f} "
            f"| {m['live_ms_p50']:.0f} / {m['live_ms_p95']:.0f} | {m['proven_ms_p50']:.0f} / {m['proven_ms_p95']:.0f} "
            f"| {m['drain_ms_p50']:.0f}, {m['load_ms_p50']:.0f} | {m['stopped_ms_p50']:.0f} ({m['stopped_share']:.1%}) "
            f"| {m['lag_mean']:.2f}, {m['lag_max']:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Every round has every variant of every setting once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    found: dict[str, list[Measured]] = {}
    jars = local_broker.ensure_jars(local_broker.default_cache_dir())
    with tempfile.TemporaryDirectory(prefix="bench-switching-") as name:
        folder = Path(name)
        make_policies(folder)
        broker = local_broker.start(folder / "broker", jars=jars, die_with_parent=True)
        common = (
            f"run.versions={options.versions}", f'run.directory="{folder / "runs"}"',
            "mlflow.enabled=false", f"generator.heartbeat_s={HEARTBEAT_S}", f"generator.workers={options.workers}",
        )  # fmt: skip
        try:
            for round_ in range(options.rounds):
                for setting in options.settings:
                    for mode, in_flight in VARIANTS:
                        sides = (f'coordinator.mode="{mode}"', f'generator.in_flight="{in_flight}"')
                        sets = [*common, *sides, *(words.format(folder=folder) for words in SETTINGS[setting])]
                        run = f"{setting}-{mode}-{in_flight}-{round_}"
                        one = run_once(run, sets, folder, broker.bootstrap_servers, WARM_UP_VERSIONS)
                        found.setdefault(f"{setting} {mode} {in_flight}", []).append(one)
                        print(f"{run}: {json.dumps(mean_of([one]))}", file=sys.stderr, flush=True)
        finally:
            local_broker.stop(folder / "broker")
    means = {name: mean_of(runs) for name, runs in sorted(found.items())}
    print(table(means))
    result = {
        "bench": "switching", "versions": options.versions, "rounds": options.rounds, "workers": options.workers,
        "cores": os.cpu_count(), "load_before": round(load_before, 2), "means": means,
        "idle_fraction_by_round": {name: [round(r.idle_fraction, 3) for r in runs] for name, runs in found.items()},
        "tokens_per_s_by_round": {name: [round(r.tokens_per_s) for r in runs] for name, runs in found.items()},
    }  # fmt: skip
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
