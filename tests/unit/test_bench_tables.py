"""The benchmark page: figures, a busy machine, what is missing; and the pure parts of the suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.bench_async import compared
from benchmarks.bench_memory import groups_at, slope_of
from benchmarks.bench_publish import phases_of
from benchmarks.bench_startup import marks_of
from benchmarks.bench_step import figures
from benchmarks.headline import FIGURES, headline
from benchmarks.suite import BENCHES, PAGE, RESULTS, ROOT, last_result
from benchmarks.transport_pairs import summary
from benchmarks.transport_peers import PEERS
from benchmarks.watching import Sample, cpu_between
from schemas.ledger import Position, StepCompleted
from schemas.policy_events import (
    AnyPolicyEvent,
    SwitchStarted,
    VersionActivated,
    VersionLoaded,
    VersionPublished,
    WorkerJoined,
    WorkerRef,
)

G0 = WorkerRef(worker="g0", incarnation="i1")
MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_gib": 8, "python": "3.11"}


def step(version_out: int, at_us: int, phase_s: dict[str, float], groups: int = 16) -> StepCompleted:
    return StepCompleted(
        run="r", at_us=at_us, position=Position(open_groups=(), next_request=1, prompt_cursor=1, partitions={}),
        policy_read_up_to=0, version_in=version_out - 1, version_out=version_out, groups=groups, trajectories=groups,
        batch_digest="d", metrics={}, phase_s=phase_s, rng_digest="r", config_digest="c", code_revision="v",
    )  # fmt: skip


def entry(**changes: object) -> dict[str, object]:
    return {"date": "2026-01-02 03:04 UTC", "load": 0.1, "quick": False, "arguments": "", "seconds": 3, **changes}


def generator() -> dict[str, object]:
    return {"hf_service_tokens_per_s": 90.0, "hf_bare_tokens_per_s": 100.0, "hf_share": 0.9}


def test_every_benchmark_of_the_suite_has_a_section_and_a_program() -> None:
    assert {section.name for section in tables.SECTIONS} == {bench.name for bench in BENCHES}
    assert all((ROOT / "benchmarks" / f"bench_{bench.name}.py").is_file() for bench in BENCHES)


def test_the_page_says_what_was_never_measured() -> None:
    page = tables.page({"benches": {}})

    assert page.count("Not measured yet: `make bench BENCH_ONLY=") == len(tables.SECTIONS)


def test_the_page_says_machine_date_load_and_figures() -> None:
    page = tables.page({"machine": MACHINE, "benches": {"generator": entry(result=generator())}})

    assert "Some CPU, 2 cores" in page
    assert "2026-01-02 03:04 UTC, load average 0.1 at the start, 3 s." in page
    assert "| hf | 90.0 | 100 | 0.90 |" in page
    assert "**Measured on a busy" not in page
    assert "**A smoke run" not in page


def test_figures_of_a_busy_machine_and_of_a_smoke_run_are_marked() -> None:
    page = tables.page(
        {"machine": MACHINE, "benches": {"generator": entry(result=generator(), load=2.1, quick=True, arguments="-x")}}
    )

    assert "**Measured on a busy machine (2 cores).**" in page
    assert "**A smoke run with small arguments" in page
    assert "with `-x`" in page


def test_a_benchmark_without_figures_says_why() -> None:
    page = tables.page({"machine": MACHINE, "benches": {"codec": entry(failed="it ended with 2")}})

    assert "**No figures: it ended with 2.**" in page


def test_a_missing_and_a_failed_peer_are_named_beside_the_others() -> None:
    round_ = {"groups_per_s": 100.0, "cpu_us_a_group": 5.0, "latency_ms_p50": 1.0, "latency_ms_p99": 2.0}
    peers = summary(
        {"driftlog": [round_], "ZMQ": [{**round_, "groups_per_s": 150.0}], "redis stream, batched": [{"failed": "no"}]}
    )

    assert peers["ZMQ"]["throughput_to_driftlog"] == 1.5
    assert peers["redis stream, batched"] == {"failed": "no"}
    alone = {
        f"{name}_ms_{q}": 1.0
        for name in ("transaction_back_to_back", "transaction_spaced", "latency")
        for q in ("p50", "p99")
    }
    found = {
        **alone,
        "write_groups_per_s": 10,
        "read_groups_per_s": 20,
        "peers": peers,
        "left_out": {"JSONL file": "why"},
    }
    page = tables.page({"machine": MACHINE, "benches": {"transport": entry(result=found)}})
    assert "| redis stream, batched | failed: no |" in page
    assert "Left out: JSONL file (why)." in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (12345, "12,345"),
        (1234.5, "1,234"),
        (123.4, "123"),
        (12.34, "12.3"),
        (0.126, "0.13"),
        (0.0126, "0.013"),
    ],
)
def test_cells_have_the_digits_that_count(value: object, text: str) -> None:
    assert tables.shown(value) == text


def test_the_last_result_line_counts() -> None:
    assert last_result('RESULT {"a": 1}\nwords\nRESULT {"a": 2}\n') == {"a": 2}
    assert last_result("nothing") is None


def test_the_page_in_the_documents_is_the_one_the_results_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == tables.page(json.loads(Path(RESULTS).read_text(encoding="utf-8")))


def test_overhead_is_all_that_the_trainer_does_but_the_update() -> None:
    phases = {"batch": 0.1, "train": 0.5, "learner_update": 0.4, "checkpoint": 0.2, "waiting": 0.2, "whole": 1.0}

    found = figures([step(1, 1, phases)])

    assert found["overhead"] == {"p50_ms": 400.0, "p95_ms": 400.0}
    assert found["waiting"] == {"p50_ms": 200.0, "p95_ms": 200.0}
    assert found["overhead_share"] == 0.5


def test_the_slope_is_of_the_second_half_in_bytes_a_group() -> None:
    steps = [step(number, number * 10, {}) for number in range(1, 11)]
    samples = [
        Sample(at_us=number * 10, resident=2**20, anonymous=5_000 if number < 5 else number * 1_600, cpu_s=number / 10)
        for number in range(1, 11)
    ]

    assert groups_at(steps, [5, 10, 25]) == [0, 16, 32]
    assert slope_of(samples, steps)["bytes_a_group"] == 100
    assert cpu_between({"a": samples, "b": samples}, 20, 100) == pytest.approx(1.6)


def test_the_growth_is_from_the_end_of_the_warm_up_to_the_end_of_the_run() -> None:
    steps = [step(number, number * 10, {}) for number in range(1, 101)]
    samples = [
        Sample(
            at_us=number * 10,
            resident=2**30,
            anonymous=(100 + (number > 50) * 7) * 2**20 - (number < 8) * 2**25,
            cpu_s=0,
        )
        for number in range(1, 101)
    ]

    assert slope_of(samples, steps)["anonymous_growth_mib"] == 7.0


def test_the_overlap_share_is_the_gain_over_the_largest_possible_gain() -> None:
    waiting = {"cpu_s_a_version": 1.0, "success": 0.5, "trainer_idle": 0.5, "training_s": 1.0, "generation_s": 3.0}
    runs = {"asynchronous": [{**waiting, "versions_per_s": 0.3}], "synchronous": [{**waiting, "versions_per_s": 0.25}]}

    found = compared(runs)

    assert (found["versions_per_s_ratio"], found["possible_ratio"], found["overlap_share"]) == (1.2, 1.333, 0.9)


def test_the_headline_has_what_was_measured_and_none_where_nothing_was() -> None:
    found = headline({"codec": {"result": {"encode_to_msgspec": 0.9, "decode_to_msgspec": 0.4, "bytes_to_json": 0.3}}})

    assert (found["encode_vs_msgspec"], found["decode_whole_vs_msgspec"]) == (0.9, 0.4)
    assert found["decode_vs_msgspec"] is None and found["transport_vs_redis"] is None
    page = tables.page({"machine": MACHINE, "benches": {}})
    assert "| `decode_vs_msgspec` | - | <= 0.3 |  |" in page


def test_the_headline_says_which_aims_are_reached() -> None:
    aims = {figure.key: figure for figure in FIGURES}

    assert aims["encode_vs_msgspec"].is_reached(1.2)
    assert not aims["encode_vs_msgspec"].is_reached(1.21)
    assert aims["transport_vs_redis"].is_reached(1.0)
    assert not aims["transport_vs_redis"].is_reached(0.99)


def test_the_headline_compares_with_both_redis_streams_and_aims_at_one() -> None:
    peers = {
        "redis stream, as PipelineRL": {"throughput_to_driftlog": 0.8},
        "redis stream, batched": {"throughput_to_driftlog": 2.0},
    }
    aims = {figure.key: figure.aim for figure in FIGURES}

    found = headline({"transport": {"result": {"peers": peers}}})

    assert (found["transport_vs_redis"], found["transport_vs_redis_batched"]) == (1.25, 0.5)
    assert (aims["transport_vs_redis"], aims["transport_vs_redis_batched"]) == (">= 1", "")
    assert {*peers} < {peer.name for peer in PEERS}


def test_published_to_live_and_its_parts_come_from_the_events() -> None:
    events: list[AnyPolicyEvent] = [
        VersionPublished(
            run="r", at_us=1_000_000, version=1, parent=0, depth=1, manifest_uri="u", manifest_sha256="s", bytes=1,
            optimizer_step=1, oldest_open_request=0,
        ),
        SwitchStarted(
            run="r", at_us=1_100_000, switch="s1", version=1, mode="barrier", read_up_to=1, required=(G0,),
            deadline_s=1,
        ),
        VersionLoaded(
            run="r", at_us=1_400_000, switch="s1", version=1, manifest_sha256="s", probe_diff_new=0, probe_diff_old=1,
            probe_tolerance=1, phase_s={"loading": 0.2},
            worker="g0", incarnation="i1",
        ),
        VersionActivated(run="r", at_us=1_500_000, switch="s1", version=1, acks=(2,)),
    ]  # fmt: skip

    found = phases_of(events, [step(1, 1, {"checkpoint": 0.25, "checkpoint_write": 0.1})])

    assert {name: round(values[0], 3) for name, values in found.items()} == {
        "save: write": 0.1, "save": 0.25, "published to switch": 0.1, "load: loading": 0.2, "switch to proof": 0.3,
        "proof to live": 0.1, "published to live": 0.5, "trained to live": 0.75,
    }  # fmt: skip


def test_a_start_ends_with_the_first_live_version() -> None:
    joined = [
        WorkerJoined(run="r", at_us=at_us, worker=f"g{at_us}", incarnation="i", engine="hf", dtype="float32")
        for at_us in (2_000_000, 3_000_000)
    ]
    live = VersionActivated(run="r", at_us=5_000_000, switch="s", version=0, acks=())

    assert marks_of([*joined, live], 1_000_000) == {"last worker joined": 2.0, "version 0 live": 4.0}
    with pytest.raises(SystemExit):
        marks_of(joined, 1_000_000)
