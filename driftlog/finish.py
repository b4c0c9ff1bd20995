"""The end of a run: greedy evaluation, audit, summary.json, and what to try next.

The evaluation runs in a process of its own (it needs torch, this one does not) with a time limit; when it
fails the run is still summed up, without those numbers.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from driftlog.processes import child_environment, driftlog_command
from driftlog.run_directory import RunDirectory, write_json
from driftlog.run_reading import OpenedRun, audit_run, opened
from infra.config import Config
from infra.runner import ExitCode
from schemas.errors import DriftlogError
from schemas.policy_fold import PolicyFold

Say = Callable[[str], None]
GREEDY_LIMIT_S = 300.0


def sum_up(
    config: Config, run: RunDirectory, bootstrap: str, say: Say, interrupted: Sequence[object]
) -> dict[str, Any]:
    """Evaluate, audit and add up a run that has ended; writes summary.json. `interrupted` not empty: no evaluation."""
    at = opened(config, run, bootstrap)
    say("the run has ended: greedy evaluation and audit ...")
    greedy = start_greedy(at)
    try:
        summary = summarise_run(at, say)
        if greedy is not None:
            await_greedy(greedy, run, say, interrupted)
    finally:
        if greedy is not None and greedy.poll() is None:
            greedy.kill()
            greedy.wait(timeout=10)
    summary |= {name: value for name, value in _stored_greedy(run).items() if name != "manifest_sha256"}
    write_json(run.summary, summary)
    return summary


def report(summary: dict[str, Any], run: RunDirectory, say: Say, *, as_json: bool) -> int:
    """Tell it; 1 when the audit found an error."""
    for line in (*summary_text(summary), *next_commands(summary, run)):
        say(line)
    if as_json:
        print(json.dumps(summary))
    return ExitCode.FAILED if summary["audit_findings"] else ExitCode.OK


def summarise_run(at: OpenedRun, say: Say) -> dict[str, Any]:
    """Audit and summary of a run, from its log and store."""
    from consumers.offline.summary import summarise

    report = audit_run(at)
    if report.errors:
        say(report.text())
    summary = summarise(at.log(), audit_findings=report.errors, audit_notices=report.notices)
    return summary.to_dict()


def start_greedy(at: OpenedRun) -> subprocess.Popen[bytes] | None:
    """Begin the evaluation of the newest version, beside the audit; None when it was evaluated before."""
    fold = PolicyFold()
    for _ in at.log().policy(fold):
        pass
    if fold.newest is None:
        raise DriftlogError(f"run {at.run.name} has no version to evaluate")
    event = fold.versions[fold.newest].event
    if at.config.task.kind != "countdown":
        return None  # what a right answer is, is known of the built-in problems alone
    if _stored_greedy(at.run).get("manifest_sha256") == event.manifest_sha256:
        return None
    at.run.greedy.unlink(missing_ok=True)
    arguments = ["greedy", "--config", str(at.run.config_files()[-1]), "--out", str(at.run.greedy)]
    arguments += ["--manifest", event.manifest_uri, "--sha256", event.manifest_sha256]
    with (at.run.logs / "greedy.log").open("ab") as log:
        return subprocess.Popen(
            driftlog_command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment({"OMP_NUM_THREADS": "1"}),
            start_new_session=True,
        )


def await_greedy(process: subprocess.Popen[bytes], run: RunDirectory, say: Say, interrupted: Sequence[object]) -> None:
    """Wait for the evaluation, at most GREEDY_LIMIT_S; say when it gave nothing."""
    deadline_s = time.monotonic() + GREEDY_LIMIT_S
    while (code := process.poll()) is None:
        if interrupted or time.monotonic() > deadline_s:
            say("the greedy evaluation was ended before it was done")
            return
        time.sleep(0.05)
    if code != ExitCode.OK:
        say(f"the greedy evaluation failed (code {code}): see {run.logs / 'greedy.log'}")


def _stored_greedy(run: RunDirectory) -> dict[str, Any]:
    if not run.greedy.exists():
        return {}
    found: dict[str, Any] = json.loads(run.greedy.read_text(encoding="utf-8"))
    return found


def summary_text(summary: dict[str, Any]) -> list[str]:
    """The summary for a person."""
    from consumers.offline.branches import BranchStart

    dropped = ", ".join(f"{count} {reason}" for reason, count in summary["dropped"].items()) or "none"
    first, last = _percent(summary["success_first"]), _percent(summary["success_last"])
    rows = [("success", f"{first} in the first tenth, {last} in the last")]
    for label, prefix, which in (
        ("greedy", "", "trained problems"),
        ("held out", "held_out_", "problems it never saw"),
    ):
        if summary.get(f"{prefix}greedy_success_after") is not None:
            before, after = (_percent(summary[f"{prefix}greedy_success_{when}"]) for when in ("before", "after"))
            rows.append(
                (label, f"{before} before, {after} after, on {summary[f'{prefix}greedy_problems']:.0f} {which}")
            )
    rows += [("evaluation", words) for words in summary["evaluation"]["words"]]
    total, trained = summary["trajectories_in_log"], summary["trajectories_trained"]
    rows += [
        (
            "trajectories",
            f"{total} in the log = {trained} trained + {sum(summary['dropped'].values())} dropped ({dropped})",
        ),
        ("policy lag", ", ".join(f"{lag}: {count}" for lag, count in summary["policy_lag_histogram"].items())),
        ("audit", f"{summary['audit_findings']} errors, {summary['audit_notices']} notices"),
    ]
    rows += [(label, words) for label, words in cost_rows(summary["costs"]) if words]
    if summary["branches"]:
        newest = f"newest version {summary['newest_version']}, step {summary['newest_step']}"
        rows.append(("branches", "; ".join([*(BranchStart(**start).words for start in summary["branches"]), newest])))
    head = f"run {summary['run']}: {summary['versions_trained']} versions trained in {summary['wall_s']:.0f} s, "
    return ["", f"{head}{summary['versions_live']} were live", *(f"  {label:<14} {words}" for label, words in rows)]


def cost_rows(costs: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the seconds of a step and of a switch went, and how well trainer and generators agreed."""
    from consumers.offline.costs import Agreement, agreement_words

    def told(prefix: str) -> str:
        names = [name for name in costs["phase_s"] if name.startswith(f"{prefix}.")]
        spelt = [name.removeprefix(f"{prefix}.").replace("_", " ") for name in names]
        return ", ".join(
            f"{words} {costs['phase_s'][name]['p50']:.2g}" for words, name in zip(spelt, names, strict=True)
        )

    made = costs["bytes"]
    return [
        ("a step, s", told("step")),
        ("a load, s", told("load")),
        ("bytes", f"{made['checkpoints']:,} in checkpoints, {made['trajectories']:,} of trajectories"),
        ("agreement", agreement_words(Agreement(**costs["agreement"]))),
    ]


def next_commands(summary: dict[str, Any], run: RunDirectory) -> list[str]:
    """What to try next."""
    directory = str(run.path.parent)
    where = f"--run {run.name}" + ("" if directory == "runs" else f" --directory {directory}")
    return [
        "",
        f"summary: {run.summary}. Try next:",
        f"  driftlog samples {where} --version {summary['newest_version']} --best",
        f"  driftlog trace {where} TRAJECTORY_ID",
        f"  driftlog audit {where}",
        f"  mlflow ui --backend-store-uri sqlite:///{run.path.parent / 'mlflow.db'}",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
