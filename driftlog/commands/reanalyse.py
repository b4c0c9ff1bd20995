"""driftlog reanalyse: what another lag limit, objective or reward function would have done with a run.

Reads the log; needs no model. Every decision is judged again at the instant it was made, and ratios, corrections and
their statistics are taken from the stored log-probabilities, beside what happened. Without --set it repeats the run's
own decisions and statistics. Exit 1: one of them is not repeated, or the log is damaged. docs/reanalyse.md says what
follows from the answer and what does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlog.options import add_json_option, add_run_options
from driftlog.run_reading import OpenedRun, opened_run
from infra.runner import ExitCode
from schemas.errors import UsageError

if TYPE_CHECKING:
    from consumers.offline.reanalyse import Reanalysis
    from consumers.offline.reanalyse.rewards import RewardsAnew
    from consumers.offline.reanalyse.scoring import Rescorer
    from driftlog.retained import Retained

EXAMPLE = "driftlog reanalyse --run demo --set trainer.max_lag=0 --out lag0.parquet"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("reanalyse", help="what other settings would have done with a run")
    add_run_options(parser)
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=C",
        help="change one setting (repeatable); task.reward=NAME|module:function|file.py:function",
    )  # fmt: skip
    parser.add_argument("--model", metavar="N|DIR", help="log-probabilities of version N, or of a model directory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it: .json, or .parquet (a long table)")
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Go through the run; 1 when its own settings do not repeat it."""
    if options.out is not None and options.out.suffix not in (".json", ".parquet"):
        raise UsageError(f"--out {options.out}: end it in .json or .parquet")
    with opened_run(options) as at, ExitStack() as stack:
        return _reanalyse(at, options, stack)


def _reanalyse(at: OpenedRun, options: argparse.Namespace, stack: ExitStack) -> int:
    from consumers.offline.reanalyse.report import NOTES, JsonWriter, ParquetWriter, step_line, totals_lines
    from driftlog.retained import retained
    from infra.clock import SystemClock

    clock, found = SystemClock(), retained(at)
    reanalysis, settings = _prepared(at, options, found, stack)
    steps = reanalysis.steps()  # what the log cannot answer is said before a file is opened
    head = {"run": at.run.name, "settings": settings, "notes": [*NOTES, *found.notes]}
    writers: list[JsonWriter | ParquetWriter] = []
    if options.json:
        writers.append(JsonWriter(sys.stdout.write, head))
    if options.out is not None and options.out.suffix == ".json":
        writers.append(JsonWriter(stack.enter_context(options.out.open("w", encoding="utf-8")).write, head))
    elif options.out is not None:
        writers.append(ParquetWriter(options.out, {"run": at.run.name, "settings": json.dumps(settings)}))
    started_s = clock.monotonic_s()
    for step in steps:
        for writer in writers:
            writer.add(step)
        if not options.json:
            print(step_line(step), file=sys.stderr)
    for writer in writers:
        writer.close(reanalysis.totals)
    seconds, count = clock.monotonic_s() - started_s, reanalysis.totals.trajectories
    print(f"{count} trajectories in {seconds:.1f} s: {count / max(seconds, 1e-9):.0f} a second", file=sys.stderr)
    if not options.json:
        print("\n".join(["", *totals_lines(reanalysis.totals), "", *head["notes"]]), file=sys.stderr)
    return ExitCode.FAILED if reanalysis.totals.failed else ExitCode.OK


def _prepared(
    at: OpenedRun, options: argparse.Namespace, found: Retained, stack: ExitStack
) -> tuple[Reanalysis, dict[str, Any]]:
    """The reanalysis, and what is said of its settings."""
    import torch

    from consumers.offline.reanalyse import Reanalysis, Segment
    from driftlog.reanalysis_rules import changed_config, rules_of, split_reward
    from infra.config import changed_keys, learning_settings

    overrides, reward_name = split_reward(options.overrides)
    segments: dict[str, Segment] = {}
    changes: dict[str, list[str]] = {}
    for digest, config in at.run.configs_by_digest().items():
        own = rules_of(config, found.fingerprint, found.ranks)
        other = own
        if overrides:
            changed = changed_config(config, overrides)
            other = rules_of(changed, found.fingerprint, found.ranks)
            changes[digest] = changed_keys(learning_settings(config), learning_settings(changed))
        segments[digest] = Segment(own=own, other=other)
    torch.set_num_threads(at.config.trainer.threads)  # sums are cut by it
    log = at.log()
    rewards = None if reward_name is None else _rewards(log, reward_name, found, stack)
    rescorer = None if options.model is None else _rescorer(at, options.model)
    settings = {"overrides": options.overrides, "changes": changes, "reward": reward_name, "model": options.model}
    return Reanalysis(log, segments, rewards=rewards, rescorer=rescorer), settings


def _rewards(log: Any, name: str, found: Retained, stack: ExitStack) -> RewardsAnew:
    from consumers.offline.reanalyse.rewards import RewardsAnew
    from driftlog.task_wiring import open_scorer
    from infra.config_task import TaskSection
    from infra.rewards import Awaited

    scorer = open_scorer(TaskSection(reward=name))
    stack.callback(scorer.close)
    return RewardsAnew(log, Awaited(scorer), found.decode)


def _rescorer(at: OpenedRun, model: str) -> Rescorer:
    from consumers.offline.reanalyse.scoring import Rescorer
    from driftlog.policies import base_directory
    from driftlog.retained import version_directory

    directory = version_directory(at, int(model)) if model.isdecimal() else Path(model)
    return Rescorer(
        directory,
        base=base_directory(at.config, at.run),
        dtype=at.config.model.dtype,
        micro_batch_tokens=at.config.trainer.micro_batch_tokens,
        logprob_chunk=at.config.trainer.logprob_chunk,
    )
