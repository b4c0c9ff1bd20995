"""Kill services of a real run with kill -9 and see that it ends by itself, whole.

    python -m tests.e2e.chaos_smoke

makes three runs (a generator, the trainer, the coordinator dies) and prints one last line RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.driving import Site, going, kill_service, leftovers, make_site, service_pid, wait_for_version, wait_until

VICTIMS = ("generator-0", "trainer", "coordinator")
END_LIMIT_S = 240.0
_QUICK_LEASE = ("coordinator.lease_s=12.0", "coordinator.switch_deadline_s=12.0", "generator.fetch_timeout_s=1.0")


def run_with_deaths(site: Site, victims: Sequence[str], *, versions: int) -> dict[str, Any]:
    """One run in which these services die in turn, each a few versions after the last; its summary.

    AssertionError when the run does not end by itself with exit 0, or leaves something running.
    """
    with going(site, f"run.versions={versions}", "generator.workers=2", *_QUICK_LEASE) as process:
        for number, victim in enumerate(victims):
            wait_for_version(site, 2 + 3 * number)
            _kill(site, victim)
        code = process.wait(timeout=END_LIMIT_S)
    words = (site.folder / "up-tiny.txt").read_text()
    assert code == 0, words
    assert leftovers(site) == []
    return site.summary()


def check(summary: dict[str, Any], versions: int, group_size: int = 4, groups: int = 4) -> list[str]:
    """What is wrong with the summary of such a run; empty when nothing is."""
    wanted = {
        "versions_trained": versions,
        "groups_trained": versions * groups,
        "trajectories_trained": versions * groups * group_size,
        "undecided": 0,
        "audit_findings": 0,
    }
    wrong = [f"{name} is {summary[name]}, expected {value}" for name, value in wanted.items() if summary[name] != value]
    if summary["trajectories_trained"] + sum(summary["dropped"].values()) != summary["trajectories_in_log"]:
        wrong.append("trained + dropped is not what lies in the log")
    return wrong


def _kill(site: Site, victim: str) -> None:
    killed = kill_service(site, victim)
    wait_until(lambda: _came_back(site, victim, killed), f"{victim} to come back", 30.0)


def _came_back(site: Site, victim: str, killed: int) -> bool:
    try:
        return service_pid(site, victim) != killed
    except (FileNotFoundError, ValueError):
        return False


def main(arguments: Sequence[str]) -> int:
    """Three runs; exit 1 when one of them is not whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=12)
    versions = parser.parse_args(arguments).versions
    results: dict[str, Any] = {}
    for victim in VICTIMS:
        with tempfile.TemporaryDirectory(prefix="driftlog-chaos-") as folder:
            summary = run_with_deaths(make_site(Path(folder)), [victim], versions=versions)
        found = check(summary, versions)
        results[victim] = {
            name: summary[name] for name in ("wall_s", "trajectories_in_log", "dropped", "audit_findings")
        }
        results[victim]["wrong"] = found
        sys.stderr.write(f"killed {victim}: {'; '.join(found) or 'whole'}\n")
    wrong = sum(len(result["wrong"]) for result in results.values())
    result = {"bench": "chaos_smoke", "versions": versions, "wrong": wrong, "runs": results}
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
