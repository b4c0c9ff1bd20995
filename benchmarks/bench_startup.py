"""From the command `driftlog up` to the first live version: its own broker, all services, warm page cache.

    python -m benchmarks.bench_startup [--rounds 3]

`demo` makes its initial policy on the way, `directory` is given one. Times are those of the events in the log, taken
from the moment the command was started. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

from benchmarks.short_runs import Stage, medians, policy_of, stage, tell
from driftlog.broker_access import reading_broker
from driftlog.run_reading import opened
from schemas import policy_events as ev


def marks_of(events: Iterable[ev.AnyPolicyEvent], begun_us: int) -> dict[str, float]:
    """Seconds from the start to the first event of each kind that matters, until version 0 is live."""
    kinds = {
        ev.RunStarted: "run started",
        ev.VersionPublished: "version 0 published",
        ev.WorkerJoined: "last worker joined",
        ev.SwitchStarted: "switch started",
        ev.VersionActivated: "version 0 live",
    }
    found: dict[str, float] = {}
    for event in events:
        name = kinds.get(type(event))
        if name is not None and (name not in found or isinstance(event, ev.WorkerJoined)):
            found[name] = (event.at_us - begun_us) / 1e6
        if isinstance(event, ev.VersionActivated):
            return found
    raise SystemExit("no version went live")


def measure(at: Stage, name: str, sets: Sequence[str]) -> dict[str, float]:
    """One start, and the run of one version behind it."""
    begun_us = time.time_ns() // 1000
    whole_s = at.run(name, ["run.versions=1", *sets])
    run = at.directory(name)
    config = run.stored_config()
    assert config is not None, "up stores it before anything else"
    with reading_broker(config, run) as bootstrap:
        events = policy_of(opened(config, run, bootstrap).log())
    return {**marks_of(events, begun_us), "one version, evaluation and audit": whole_s}


def main(arguments: Sequence[str] | None = None) -> int:
    """Both variants in every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    found: dict[str, list[dict[str, float]]] = {"demo": [], "directory": []}
    with stage("bench-startup", broker=False) as at:
        sets = {"demo": [], "directory": [f'model.init="{at.warm}"']}
        for round_ in range(options.rounds):
            for variant in list(found)[:: -1 if round_ % 2 else 1]:
                found[variant].append(measure(at, f"{variant}-{round_}", sets[variant]))
                print(f"{variant} {round_}: {found[variant][-1]}", file=sys.stderr, flush=True)
    live = {name: [round(run["version 0 live"], 2) for run in runs] for name, runs in found.items()}
    tell({**{name: medians(runs) for name, runs in found.items()}, "rounds": options.rounds, "live_s_by_round": live})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
