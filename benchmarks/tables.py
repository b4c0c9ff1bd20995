"""Writes docs/benchmarks.md from benchmarks/results/bench.json: text and tables, no measurement.

Pure: the same file gives the same page. What a file lacks is said on the page, never left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.headline import FIGURES, headline

Result = Mapping[str, Any]
BUSY = 1.0
"""load average a core above which a measurement is marked as taken on a busy machine"""

HEAD = """# Benchmarks

<!-- Written by benchmarks/tables.py from benchmarks/results/bench.json; change the text there. -->

    make bench                              everything in turn, half an hour on a quiet machine, then this page
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
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3}f}"


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
    return table(head, rows) + f"\n\nTrajectory objects and row hashes: {found['common_us']} us of every decoding."


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
    sides = {"inline": "demo, inline", "overlapped": "demo, overlapped", "two_seconds": "long steps, overlapped"}
    lines = {"whole step": "whole", "learner's update": "update", "overhead": "overhead", "waiting": "waiting"}
    rows: list[Sequence[object]] = [
        (words, *[value for side in sides for value in (found[side][key]["p50_ms"], found[side][key]["p95_ms"])])
        for words, key in lines.items()
    ]
    names = dict.fromkeys(name for side in sides for name in found[side]["phases"] if name not in ("whole", "waiting"))
    for name in names:
        quantiles = [found[side]["phases"].get(name, {}) for side in sides]
        rows.append((f"phase {name}", *[value for q in quantiles for value in (q.get("p50_ms"), q.get("p95_ms"))]))
    heads = [f"{words}, {end} ms" for words in sides.values() for end in ("p50", "p95")]
    told = "; ".join(
        f"{words}: {found[side]['steps']} steps of {found[side]['trajectories_a_step']} trajectories, overhead "
        f"{shown(100 * found[side]['overhead_share'])} % of the work"
        for side, words in sides.items()
    )
    return f"{told}.\n\n{table(('part of a step', *heads), rows)}"


def _publish(found: Result) -> str:
    sizes = [size for size in found if size != "store"]
    names = list(dict.fromkeys(name for size in sizes for name in found[size]["phases"]))
    rows = []
    for name in names:
        quantiles = [found[size]["phases"].get(name) for size in sizes]
        rows.append((name, *[value for q in quantiles for value in ((q or {}).get("p50_ms"), (q or {}).get("p95_ms"))]))
    heads = [f"{found[size]['weights_mb']:.0f} MB, {end} ms" for size in sizes for end in ("p50", "p95")]
    counts = ", ".join(f"{found[size]['versions']} of {found[size]['weights_mb']:.1f} MB" for size in sizes)
    told = f"Versions measured: {counts}.\n\n{table(('phase', *heads), rows)}"
    if "store" not in found:
        return told
    store = found["store"]
    parts = ", ".join(f"{name} {shown(store[f'{name}_s'])} s" for name in ("write", "hash", "fsync", "publish"))
    return (
        f"{told}\n\nThe store alone, {shown(store['megabytes'])} MB of weights: **{shown(store['mb_per_s'])} MB/s** "
        f"({parts}; hash and fsync run side by side)."
    )


def _async(found: Result) -> str:
    sides = ("asynchronous", "synchronous")
    keys = ("versions_per_s", "training_s", "generation_s", "trainer_idle", "cpu_s_a_version", "success")
    sizes = {"two_seconds": "long steps", "demo": "demo"}
    rows = [
        (f"{words}, {side}", *[found[size][side][key] for key in keys])
        for size, words in sizes.items()
        if size in found
        for side in sides
    ]
    told = "; ".join(
        f"{words}: {found[size]['versions']} versions, {len(found[size]['seeds'])} seed(s), asynchronous / synchronous "
        f"**{shown(found[size]['versions_per_s_ratio'])}** of {shown(found[size]['possible_ratio'])} possible: "
        f"overlap share **{shown(found[size]['overlap_share'])}**"
        for size, words in sizes.items()
        if size in found
    )
    head = ("run", "versions/s", "T: training s", "G: generation s", "trainer idle", "CPU s a version", "success")
    return f"{told}.\n\n{table(head, rows)}"


def _idle(found: Result) -> str:
    return table(("service", "CPU share of a core"), list(found["services"].items()))


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
    names = ("resident_mib_first", "resident_mib_last", "resident_mib_most", "anonymous_growth_mib", "bytes_a_group")
    rows = [(name, *[one.get(key) for key in names]) for name, one in found["services"].items()]
    head = ("service", "MiB at the first step", "at the last", "most", "anonymous growth", "bytes a group, second half")
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
only once); JSON, orjson, msgspec and pickle of lists (of one dict a row) carry lists. Unpickling runs whatever code the
bytes name: a log that others can write to must not be read so. Below 1 a peer needs less than ours.

Part of `decode` is no decoding: trajectory objects and row hashes are made by the same code whatever the bytes were.
`decode_vs_msgspec` above is without that part on both sides, `decode_whole_vs_msgspec` with it."""),
    Section(name="transport", title="The transport", table=_transport, words="""
Such groups between two processes, both ends with the codec in brackets and all checks: sent as fast as they go
(groups/s, CPU time of both ends; what a broker or server uses is not in it), and at 50 groups a second (latency from
before the encoding to after the checks). Medians of interleaved rounds; `/ driftlog` is the median of the rounds' own
ratios, above 1 the peer is faster. Kafka has acks=all, zstd and idempotence with both clients; the file is read every
10 ms. What survives is what is left when both processes are gone.

Both Redis streams write one entry a round trip, to one server whose append-only file is not fsynced: what they keep is
in the page cache, like the broker's log. *As PipelineRL* does what that project's streams do, with our columns: a group
is a pickle (default protocol) of a list of dicts whose arrays are Python lists, an entry holds it and its index, the
stream is cut at about 1,000,000 entries, and the reader asks for one entry a round trip and checks the index. *Batched*
is the strongest Redis that we could build: pickled arrays, and up to 1,000 entries a read. PipelineRL itself starts
Redis with `--save` and no append-only file, so less is left there when the server dies than is measured here."""),
    Section(name="step", title="A training step", table=_step, words="""
By phase, from the ledger. `overhead` is the main thread's time of a step but the update of the weights: batch, scores,
metrics, and what it does itself of checkpoint and transaction (records are decoded by the thread that reads them);
`waiting` is the time in which it had nothing to do. Inline, a version is published before the next step; overlapped,
behind its compute, and the phases of the checkpoint are then those of the version before. The long steps are those of a
larger model with one worker. `train` holds the `learner` phases, `checkpoint` those named after it; quantiles are each
phase's own: they do not add up. Compare two commits by runs in turns, not by this table: four runs of one commit on one
day gave 51 to 57 ms of inline overhead beside updates of 206 to 219 ms."""),
    Section(name="publish", title="From trained to live", table=_publish, words="""
Real services, one worker, LLaMAs with random weights; weights only are saved. `save` and its parts are the trainer's,
`load` and its parts the worker's (its proof by the probe included); `published to live` ends when the coordinator has
written that the version is live, and `trained to live` adds the save."""),
    Section(name="async", title="Asynchronous against synchronous", table=_async, words="""
`max_lag = 1, run_ahead = 1` with overlapped publication, and `max_lag = 0`: the same code, seeds, cores and number of
versions, runs in turns; the demo, and a larger model with steps of about two seconds and one worker. T and G are what a
version needs of training and of generation, each alone, as in the synchronous runs. The overlap share is the gain
(versions a second, asynchronous / synchronous) as a share of the largest possible one, (G + T) / max(G, T). Success is
the mean reward over the last quarter of the versions."""),
    Section(name="idle", title="Doing nothing", table=_idle, words="""
Every service of a run that waits: the trainer is stopped while the others are measured, then the workers while the
trainer is."""),
    Section(name="offline", title="Audit, replay, reanalysis", table=_offline, words="""
Commands of their own process, start and imports included, on one run of the demo. The second column says how many
times faster than the training they are: above 1 they are faster."""),
    Section(name="replay", title="Reading a run again", table=_replay, words="""
20,000 trajectories of 512 tokens unless the arguments say otherwise; the best of interleaved rounds."""),
    Section(name="startup", title="Starting", table=_startup, words="""
`driftlog up` with a broker of its own, on a warm page cache: when each event was written, after the command was
given."""),
    Section(name="memory", title="Memory over a long run", table=_memory, words="""
Every service's memory, each second, with MLflow (the projector). The growth is that of anonymous memory from the end of
the warm-up, a tenth of the groups, to the end; the slope is over the second half of the groups."""),
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
    parts.append(_glance(stored["benches"]))
    parts += [_section(one, stored["benches"].get(one.name), cores) for one in SECTIONS]
    return "\n".join(parts)


def _glance(benches: Mapping[str, Any]) -> str:
    values = headline(benches)
    rows = []
    for figure in FIGURES:
        value = values[figure.key]
        reached = "" if value is None or not figure.aim else "yes" if figure.is_reached(value) else "no"
        rows.append((f"`{figure.key}`", value, figure.aim, reached, figure.words))
    lines = ["| figure | value | aim | reached | what it is |", "|---|---:|---:|---|---|"]
    lines += ["| " + " | ".join(shown(cell) for cell in row) + " |" for row in rows]
    return "## At a glance\n\n" + "\n".join(lines) + "\n"


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
