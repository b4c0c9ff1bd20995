"""kill -9, SIGSTOP, a dying broker, a locked MLflow and a full disk against the real stack.

    python -m tests.e2e.chaos [--seed N] [--only storm-1,slow] [--kills 3] [--versions 60]

Makes the runs of chaos_plan, one after the other, checks each against its own log and store, and prints one last line
RESULT {json}; exit 1 when anything is off. Words go to stderr.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.kafka_clients import quiet_client_loggers
from tests.e2e.chaos_plan import BASELINE, SAME, TRAINER, Phase, RunPlan, What, plans, shortened
from tests.e2e.chaos_price import by_phase, median
from tests.e2e.chaos_run import Outcome, carry_out

KILLS, TRAINER_KILLS, BROKER_KILLS = 30, 10, 3
RECOVERY_MEDIAN_S = 15.0


def result(
    outcomes: Mapping[str, Outcome], planned: Sequence[RunPlan], *, whole: bool, wall_s: float
) -> dict[str, Any]:
    """The last line. `whole`: all runs were asked for, so the numbers of kills must be reached."""
    hits = [hit for outcome in outcomes.values() for hit in outcome.priced.get("hits", ())]
    killed = [hit for hit in hits if hit["what"] == What.KILL]
    trainer = Counter(hit["phase"] for hit in killed if hit["service"] == TRAINER)
    services = Counter(hit["service"].partition("-")[0] for hit in killed)
    recoveries = [hit["recovery_s"] for hit in hits if hit["recovery_s"] is not None]
    in_flight = [hit["in_flight_loss_s"] for hit in killed if hit["in_flight_loss_s"] is not None]
    wrong = [f"{name}: {finding}" for name, outcome in outcomes.items() for finding in outcome.wrong]
    if BASELINE in outcomes and SAME in outcomes:
        digests = {outcomes[name].weights_sha256 for name in (BASELINE, SAME)}
        if len(digests) != 1 or "" in digests:
            wrong.append(f"the final weights of {BASELINE} and {SAME} differ: {sorted(digests)}")
    if whole:
        wrong += count_findings(services, trainer)
        if median(recoveries) > RECOVERY_MEDIAN_S:
            wrong.append(f"the median recovery took {median(recoveries):.0f} s, at most {RECOVERY_MEDIAN_S:g}")
    return {
        "bench": "chaos",
        "kills": len(killed),
        "faults_planned": sum(len(plan.faults) for plan in planned),
        "faults_fired": len(hits),
        "audit_findings": sum(outcome.summary.get("audit_findings", 0) for outcome in outcomes.values()),
        "generation_seconds_lost_finished": round(sum(hit["finished_loss_s"] for hit in hits), 3),
        "generation_seconds_lost_in_flight_median": median(in_flight),
        "generation_seconds_lost_in_flight_max": max(in_flight, default=0.0),
        "recovery_s_median": median(recoveries),
        "recovery_s_max": max(recoveries, default=0.0),
        "recovery_s_by_fault": _recoveries(hits),
        "kills_by_service": dict(sorted(services.items())),
        "kills_by_phase": by_phase(hits),
        "trainer_kills_by_phase": {str(phase): count for phase, count in sorted(trainer.items())},
        "open_transactions_hit": sum(1 for hit in hits if hit["open_transaction"]),
        "broker_deaths": [death for outcome in outcomes.values() for death in outcome.priced.get("broker_deaths", ())],
        "final_sha256_equal": _equal(outcomes),
        "runs": {name: len(outcome.wrong) for name, outcome in outcomes.items()},
        "wrong": wrong,
        "wall_s": round(wall_s, 1),
    }


def count_findings(services: Mapping[str, int], trainer: Mapping[str, int]) -> list[str]:
    """What is missing in the numbers of kills."""
    between = trainer.get(Phase.BETWEEN, 0)
    wanted = (
        ("kills", sum(services.values()), KILLS),
        ("kills of the trainer", services.get("trainer", 0), TRAINER_KILLS),
        ("kills of the broker", services.get("broker", 0), BROKER_KILLS),
        ("kills of the trainer between checkpoint and commit", between, -(-services.get("trainer", 0) // 2)),
    )
    return [f"{count} {what}, at least {least} wanted" for what, count, least in wanted if count < least]


def _equal(outcomes: Mapping[str, Outcome]) -> bool | None:
    if BASELINE not in outcomes or SAME not in outcomes:
        return None
    return outcomes[BASELINE].weights_sha256 == outcomes[SAME].weights_sha256 != ""


def _recoveries(hits: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {}
    for hit in hits:
        if hit["recovery_s"] is not None:
            found.setdefault(f"{hit['what']} {hit['service'].partition('-')[0]}", []).append(hit["recovery_s"])
    return {name: {"count": len(v), "median": median(v), "max": max(v)} for name, v in sorted(found.items())}


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults and of their moments")
    parser.add_argument("--only", default="", metavar="RUN[,RUN]", help="these runs alone")
    parser.add_argument("--kills", type=int, metavar="N", help="only the first N faults of each run")
    parser.add_argument("--versions", type=int, metavar="N", help="another length of each run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs there instead of deleting them")
    parser.add_argument("--no-mount", action="store_true", help="fill the disk by a limit on the trainer's files")
    return parser.parse_args(arguments)


def _kept(folder: Path, name: str) -> Path:
    """What the services said in a run that was not whole: the runs themselves are deleted."""
    kept = Path("build/chaos") / name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for path in (*folder.glob("up-*.txt"), *folder.glob("runs/*/logs/*.log"), *folder.glob("runs/*/broker/*.log")):
        shutil.copy(path, kept)
    return kept


def main(arguments: Sequence[str]) -> int:
    """All runs; exit 1 when one of them is not whole."""
    options = _options(arguments)
    quiet_client_loggers()
    wanted = [name for name in options.only.split(",") if name]
    chosen = [plan for plan in plans(options.seed) if not wanted or plan.name in wanted]
    is_whole = not wanted and options.kills is None and options.versions is None
    faults = 10_000 if options.kills is None else options.kills
    chosen = [shortened(plan, faults, options.versions) for plan in chosen]
    outcomes: dict[str, Outcome] = {}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="driftlog-chaos-") as scratch:
        for plan in chosen:
            run_s = time.monotonic()
            _say(f"{plan.name}: {plan.versions} versions, {len(plan.faults)} faults")
            folder = (options.keep or Path(scratch)) / plan.name
            outcome = carry_out(plan, folder, seed=options.seed, say=_say, mount=not options.no_mount)
            outcomes[plan.name] = outcome
            if outcome.wrong and options.keep is None:
                _say(f"  its logs are in {_kept(folder, plan.name)}")
            _say(f"{plan.name}: {'; '.join(outcome.wrong) or 'whole'} ({time.monotonic() - run_s:.0f} s)")
    found = result(outcomes, chosen, whole=is_whole, wall_s=time.monotonic() - started_s)
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
