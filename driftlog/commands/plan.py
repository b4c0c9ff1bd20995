"""driftlog plan: what a run of your size writes, keeps and waits for, before it is started.

The configuration gives group size, lag, retention and precision; the rest is said here. Times are yours to measure:
tokens/s of the generators, seconds of a trainer step, MB/s of the store.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict

from driftlog import options as common
from infra.runner import ExitCode, say_on_stderr
from schemas.errors import ConfigError

EXAMPLE = (
    "driftlog plan --config my.toml --parameters 1.7B --tokens-per-second 8000 --completion-tokens 900 --step-s 25"
)
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("plan", help="sizes, rates and times of a run, before it is started")
    common.add_config_options(parser)
    parser.add_argument("--parameters", required=True, type=count, metavar="N", help="of the model: 135M, 1.7B")
    parser.add_argument(
        "--tokens-per-second", required=True, type=positive, metavar="N", help="all generators together"
    )
    parser.add_argument(
        "--adapter-parameters", type=count, default=0.0, metavar="N", help="with lora.rank: of the adapters"
    )
    parser.add_argument("--completion-tokens", required=True, type=positive, metavar="N", help="in the mean")
    parser.add_argument("--prompt-tokens", type=positive, default=256, metavar="N", help="in the mean (default 256)")
    parser.add_argument(
        "--step-s", required=True, type=positive, metavar="S", help="the trainer's compute for one step"
    )
    parser.add_argument(
        "--store-mb-s", type=positive, default=500, metavar="N", help="writing a checkpoint, sustained (default 500)"
    )
    parser.add_argument(
        "--fetch-mb-s", type=positive, default=1000, metavar="N", help="store to one generator (default 1000)"
    )
    common.add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the bill; exit 1 when something in it cannot work."""
    from driftlog.sizing import Workload, plan, warnings

    config, _ = common.config_of(options)
    load = Workload(
        parameters=options.parameters,
        adapter_parameters=options.adapter_parameters,
        completion_tokens=int(options.completion_tokens),
        prompt_tokens=int(options.prompt_tokens),
        tokens_per_s=options.tokens_per_second,
        step_s=options.step_s,
        write_bytes_per_s=options.store_mb_s * 1e6,
        fetch_bytes_per_s=options.fetch_mb_s * 1e6,
    )
    found = plan(config, load)
    problems = list(warnings(config, load, found))
    if options.json:
        print(json.dumps({**asdict(found), "problems": problems}))
    else:
        print(_words(asdict(found), config.checkpoints.keep))
    for problem in problems:
        say_on_stderr(problem)
    return ExitCode.FAILED if problems else ExitCode.OK


def count(text: str) -> float:
    """A number with K, M or B behind it.

    >>> count("135M"), count("1.7B"), count("42")
    (135000000.0, 1700000000.0, 42.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters: write 135M or 1.7B")
    return float(match[1]) * _UNITS[match[2]]


def positive(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def size(bytes_: float) -> str:
    """For people.

    >>> size(500), size(2.5 * 1024**3)
    ('500 B', '2.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if bytes_ < 1024:
            return f"{bytes_:.0f} B" if unit == "B" else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.1f} TiB"


def _words(found: dict[str, object], keep: object) -> str:
    def number(name: str) -> float:
        value = found[name]
        if not isinstance(value, int | float):
            raise ConfigError(f"{name} is {value!r}")
        return float(value)

    store = (
        f'{size(number("store_bytes_per_hour"))} an hour (checkpoints.keep = "all")'
        if found["store_bytes"] is None
        else f"{size(number('store_bytes'))} at most (checkpoints.keep = {keep})"
    )
    lines = {
        "a step every": f"{number('step_s'):.1f} s, bound by {found['bound_by']}; "
        f"{number('versions_per_hour'):.0f} versions and {number('groups_per_hour'):.0f} groups an hour",
        "a group": f"{size(number('group_bytes'))} as a record, {size(number('group_stored_bytes'))} in the log with "
        "its scores and decisions (compressed)",
        "the log": f"{size(number('log_bytes_per_hour'))} an hour, {size(24 * number('log_bytes_per_hour'))} a day; "
        f"worth {found['partitions_worth']} partition(s)",
        "a version": f"{size(number('version_bytes'))} of weights, {size(number('state_bytes'))} of trainer state",
        "the store": store,
        "publishing": f"{number('publish_s'):.1f} s; loaded everywhere {number('switch_s'):.1f} s after the step",
        "age": f"{number('age_s'):.1f} s from a request to the end of the step that trains it",
        "trainer memory": f"{size(number('trainer_bytes'))} for weights, gradients and optimizer; activations on top",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {words}" for name, words in lines.items())
