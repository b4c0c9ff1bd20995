"""Writes docs/benchmarks.md from benchmarks/results/bench.json: text and tables, no measurement.

Pure: the same file gives the same page. What a file lacks is said on the page, never left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]
BUSY = 1.0
"""load average a core above which a measurement is marked as taken on a busy machine"""

HEAD = """# Benchmarks

<!-- Written by benchmarks/tables.py from benchmarks/results/bench.json; change the text there. -->

    make bench                              everything in turn, 25 minutes on a quiet machine, then this page
    make bench BENCH_ONLY=transport         one of them; the other tables keep their figures
    make bench BENCH_SUITE_ARGS=--quick     does everything still run? (its figures mean little)

The peers live in an environment of their own (`benchmarks/requirements.txt`, `.venv-bench`); one that cannot be had is
left out, and its table says so. Absolute figures move from machine to machine and with whatever else runs there: read
the ratios. What is compared runs in turns in one sitting, and no test asserts anything about time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One benchmark on the page."""

    name: str
    title: str
    words: str
    table: Callable[[Result], str]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(shown(cell) for cell in row) + " |" for row in rows)])


def shown(value: object) -> str:
    """A cell: whole numbers with separators, others with three digits that count."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _codec(found: Result) -> str:
    rows = []
    for name, ratio in found["to_arrow"].items():
        one = found[name]
        cells = (one["encode_us"], one["decode_us"], one["bytes"], one["zstd_bytes"])
        rows.append((name, *cells, ratio["encode"], ratio["decode"], ratio["bytes"]))
    head = (
        "codec",
        "encode us",
        "decode us",
        "bytes",
        "zstd-1 bytes",
        "encode / ours",
        "decode / ours",
        "bytes / ours",
    )
    return table(head, rows)


def _transport(found: Result) -> str:
    rows: list[Sequence[object]] = []
    for name, one in found.get("peers", {}).items():
        if "failed" in one:
            rows.append((name, f"failed: {one['failed']}", None, None, None, None, None))
            continue
        cells = (one["groups_per_s"], one["throughput_to_driftlog"], one["cpu_us_a_group"])
        latency = (one["latency_ms_p50"], one["latency_ms_p99"])
        rows.append((f"{name} ({one['codec']})", one["keeps"], *cells, *latency))
    head = ("path (codec)", "survives", "groups/s", "/ driftlog", "CPU us a group", "p50 ms", "p99 ms")
    own = (
        (
            "transaction, back to back",
            found["transaction_back_to_back_ms_p50"],
            found["transaction_back_to_back_ms_p99"],
        ),
        ("transaction, 0.2 s apart", found["transaction_spaced_ms_p50"], found["transaction_spaced_ms_p99"]),
        ("group, send to poll", found["latency_ms_p50"], found["latency_ms_p99"]),
    )
    left = [f"Left out: {name} ({reason})." for name, reason in found.get("left_out", {}).items()]
    rates = (
        f"Without codec and checks, one end at a time: {shown(found['write_groups_per_s'])} groups/s written and "
        f"acknowledged, {shown(found['read_groups_per_s'])} read."
    )
    return "\n\n".join([table(head, rows), *left, rates, table(("ours alone", "p50 ms", "p99 ms"), own)])


def _quantiles(named: Mapping[str, Mapping[str, float]], first: str) -> str:
    return table((first, "p50 ms", "p95 ms"), [(name, q["p50_ms"], q["p95_ms"]) for name, q in named.items()])


def _step(found: Result) -> str:
    lines = {
        "whole step": found["whole"],
        "learner's update": found["update"],
        "overhead: all the trainer does beside it": found["overhead"],
        "waiting for groups, intake, transaction": found["waiting"],
        **{f"phase {name}": one for name, one in found["phases"].items() if name != "whole"},
    }
    told = (
        f"{found['steps']} steps of {found['trajectories_a_step']} trajectories; overhead / update: "
        f"**{shown(found['overhead_to_update'])}**."
    )
    return f"{told}\n\n{_quantiles(lines, 'part of a step')}"


def _publish(found: Result) -> str:
    sizes = list(found)
    names = list(dict.fromkeys(name for size in sizes for name in found[size]["phases"]))
    rows = []
    for name in names:
        quantiles = [found[size]["phases"].get(name) for size in sizes]
        rows.append((name, *[value for q in quantiles for value in ((q or {}).get("p50_ms"), (q or {}).get("p95_ms"))]))
    heads = [f"{found[size]['weights_mb']:.0f} MB, {end} ms" for size in sizes for end in ("p50", "p95")]
    counts = ", ".join(f"{found[size]['versions']} of {found[size]['weights_mb']:.1f} MB" for size in sizes)
    return f"Versions measured: {counts}.\n\n{table(('phase', *heads), rows)}"


def _async(found: Result) -> str:
    sides = ("asynchronous", "synchronous")
    rows = [
        (side, found[side]["versions_per_s"], found[side]["success"], found[side]["trainer_idle"]) for side in sides
    ]
    by_seed = ", ".join(shown(ratio) for ratio in found["ratio_by_seed"])
    told = (
        f"{found['versions']} versions, {len(found['seeds'])} seed(s); asynchronous / synchronous versions a second: "
        f"**{shown(found['versions_per_s_ratio'])}** (by seed: {by_seed})."
    )
    return f"{told}\n\n{table(('side', 'versions/s', 'success at the end', 'trainer idle share'), rows)}"


def _offline(found: Result) -> str:
    told = (
        f"A run of {found['versions']} versions and {shown(found['trajectories'])} trajectories trained for "
        f"{shown(found['training_s'])} s, of which the trainer computed {shown(found['computed_s'])} s."
    )
    rows = [(name, one["seconds"], one["times_training"]) for name, one in found["commands"].items() if name != "start"]
    start = found["commands"]["start"]["seconds"]
    head = ("command", "seconds", "training time / its time")
    return f"{told} Starting a command that does nothing takes {shown(start)} s.\n\n{table(head, rows)}"


def _replay(found: Result) -> str:
    rows = [
        ("Kafka, validated in full", found["kafka_trajectories_per_s"], found["kafka_cpu_us_a_trajectory"]),
        (
            "the bare client, undecoded",
            found["bare_client_trajectories_per_s"],
            found["bare_client_cpu_us_a_trajectory"],
        ),
        ("Arrow cache", found["cache_trajectories_per_s"], found["cache_cpu_us_a_trajectory"]),
        ("Arrow cache, asked the log first", found["cache_with_log_check_trajectories_per_s"], None),
        ("bare pyarrow on the same files", found["bare_pyarrow_trajectories_per_s"], None),
    ]
    growth = f"Memory grows by {shown(found['memory_growth_mib'])} MiB from 2,000 trajectories to {{}}."
    told = growth.format(shown(found["trajectories"]))
    return f"{table(('path', 'trajectories/s', 'CPU us each'), rows)}\n\n{told}"


def _startup(found: Result) -> str:
    variants = ("demo", "directory")
    names = list(dict.fromkeys(name for variant in variants for name in found[variant]))
    rows = [(name, *[found[variant].get(name) for variant in variants]) for name in names]
    return table(("seconds after the command, median", "makes its policy", "policy is given"), rows)


def _memory(found: Result) -> str:
    names = ("resident_mib_first", "resident_mib_last", "resident_mib_most", "bytes_a_group")
    rows = [(name, *[one.get(key) for key in names]) for name, one in found["services"].items()]
    head = ("service", "MiB at the first step", "at the last", "most", "bytes a group, second half")
    told = (
        f"{shown(found['groups'])} groups of {found['group_size']} in {found['versions']} versions, "
        f"{shown(found['seconds'])} s."
    )
    return f"{told}\n\n{table(head, rows)}"


def _objective(found: Result) -> str:
    rows = [
        (words, *[found[f"{prefix}{side}_{what}"] for side in ("plain", "ours") for what in ("seconds", "peak_mib")],
         found[f"{prefix}time_ratio"], found[f"{prefix}memory_ratio"])
        for words, prefix in (("forward and backward", ""), ("scoring", "scoring_"))
    ]  # fmt: skip
    return table(("", "plain s", "plain MiB", "ours s", "ours MiB", "time, ours / plain", "memory, plain / ours"), rows)


def _switching(found: Result) -> str:
    columns = {
        "idle_fraction": "idle share", "tokens_per_s": "tokens/s", "versions_per_minute": "versions/min",
        "live_ms_p50": "live ms p50", "live_ms_p95": "p95", "stopped_share": "stopped share", "lag_mean": "lag",
    }  # fmt: skip
    rows = [(name, *[one[key] for key in columns]) for name, one in found["means"].items()]
    return table(("setting, mode, in flight", *columns.values()), rows)


def _generator(found: Result) -> str:
    rows = [
        (kind, found[f"{kind}_service_tokens_per_s"], found[f"{kind}_bare_tokens_per_s"], found[f"{kind}_share"])
        for kind in ("vllm", "hf")
        if f"{kind}_share" in found
    ]
    return table(("engine", "service tokens/s", "bare engine tokens/s", "service / bare"), rows)


SECTIONS = (
    Section(name="codec", title="The codec", table=_codec, words="""
A group of 8 trajectories with 128 prompt and 512 completion tokens, all columns. Every codec does the same job: checked
trajectories to bytes, and bytes back to checked trajectories with their row hashes. CPU microseconds, the fastest of
interleaved rounds. Pickle, cloudpickle and msgpack carry arrays as raw bytes (pickle also stores what the rows share
only once); JSON, orjson and msgspec carry lists. Unpickling runs whatever code the bytes name: a log that others can
write to must not be read so. Below 1 a peer needs less than ours."""),
    Section(name="transport", title="The transport", table=_transport, words="""
Such groups between two processes, both ends with the codec in brackets and all checks: sent as fast as they go
(groups/s, CPU time of both ends; what a broker or server uses is not in it), and at 50 groups a second (latency from
before the encoding to after the checks). Medians of interleaved rounds; `/ driftlog` is the median of the rounds' own
ratios, above 1 the peer is faster. Kafka has acks=all, zstd and idempotence with both clients; Redis has an
append-only file that is not fsynced; the file is read every 10 ms. What survives is
what is left when both processes are gone."""),
    Section(name="step", title="A training step", table=_step, words="""
The demo, each step by phase, from the ledger. `overhead` is batch, scoring, metrics and checkpoint: everything the
trainer does for a step but the update of the weights. A phase of the publication that runs behind the compute would be
that of the version before. `train` holds the `learner` phases, `checkpoint` those named after it; quantiles are each
phase's own, so they do not add up."""),
    Section(name="publish", title="From trained to live", table=_publish, words="""
Real services, one worker, LLaMAs with random weights; weights only are saved. `save` and its parts are the trainer's,
`load` and its parts the worker's (its proof by the probe included); `published to live` ends when the coordinator has
written that the version is live, and `trained to live` adds the save."""),
    Section(name="async", title="Asynchronous against synchronous", table=_async, words="""
The demo with `max_lag = 1, run_ahead = 1` and with `max_lag = 0`: the same code, seeds, cores and number of versions,
runs in turns. Success is the mean reward over the last quarter of the versions."""),
    Section(name="offline", title="Audit, replay, reanalysis", table=_offline, words="""
Commands of their own process, start and imports included, on one run of the demo. The second column says how many
times faster than the training they are: above 1 they are faster."""),
    Section(name="replay", title="Reading a run again", table=_replay, words="""
20,000 trajectories of 512 tokens unless the arguments say otherwise; the best of interleaved rounds."""),
    Section(name="startup", title="Starting", table=_startup, words="""
`driftlog up` with a broker of its own, on a warm page cache: when each event was written, after the command was
given."""),
    Section(name="memory", title="Memory over a long run", table=_memory, words="""
Every service's resident memory, each second, with MLflow (the projector). The slope is that of anonymous memory over
the second half of the groups."""),
    Section(name="objective", title="The maths", table=_objective, words="""
Log-probabilities of 4,096 tokens over a vocabulary of 49,152 unless the arguments say otherwise: the plain formula and
ours; memory above the inputs. [Objectives](objectives.md) says how."""),
    Section(name="switching", title="Switching", table=_switching, words="""
A short version of what [Switching](switching.md) explains and measures at length."""),
    Section(name="generator", title="The generator beside its engine", table=_generator, words="""
The whole service, Kafka included, beside the bare engine on the same requests (`make bench-generator`)."""),
)  # fmt: skip


def page(stored: Mapping[str, Any]) -> str:
    """The whole page."""
    host = stored.get("machine")
    parts = [HEAD]
    if host:
        parts.append(
            f"Measured on: {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB, Python {host['python']}.\n"
        )
    cores = host["cores"] if host else 1
    parts += [_section(one, stored["benches"].get(one.name), cores) for one in SECTIONS]
    return "\n".join(parts)


def _section(section: Section, entry: Mapping[str, Any] | None, cores: int) -> str:
    text = f"## {section.title}\n{section.words}\n\n"
    if entry is None:
        return f"{text}Not measured yet: `make bench BENCH_ONLY={section.name}`.\n"
    arguments = f" with `{entry['arguments']}`" if entry["arguments"] else ""
    when = f"{entry['date']}, load average {entry['load']} at the start, {entry['seconds']} s{arguments}."
    marks = []
    if entry["quick"]:
        marks.append("**A smoke run with small arguments: only its order of magnitude means anything.**")
    if entry["load"] > BUSY * cores:
        marks.append(f"**Measured on a busy machine ({cores} cores).**")
    if "failed" in entry:
        return f"{text}{when} **No figures: {entry['failed']}.**\n"
    return f"{text}{' '.join([when, *marks])}\n\n{section.table(entry['result'])}\n"
