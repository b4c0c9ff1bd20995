"""The figures that the project holds itself to, taken from what the benchmarks said; pure.

A figure that was not measured is None. What is aimed at stands beside each: it is compared on the page, never asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One of them."""

    key: str
    bench: str
    """that gives it"""
    at_most: float | None = None
    at_least: float | None = None
    words: str
    take: Callable[[Mapping[str, Any]], Any]

    def is_reached(self, value: float) -> bool:
        """Whether the aim is."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    @property
    def aim(self) -> str:
        """In words; "" where there is none."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"


def _ours_over(peer: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda found: round(1.0 / found["peers"][peer]["throughput_to_driftlog"], 3)


FIGURES = (
    Figure(key="transport_vs_confluent", bench="transport", at_least=0.8, take=_ours_over("confluent-kafka"),
           words="groups/s, durable and checked, ours / confluent-kafka"),
    Figure(key="transport_vs_redis", bench="transport", at_least=1.0, take=_ours_over("redis stream, as PipelineRL"),
           words="groups/s, ours / a Redis stream of pickles as PipelineRL writes and reads it"),
    Figure(key="transport_vs_redis_batched", bench="transport", take=_ours_over("redis stream, batched"),
           words="the same beside a Redis stream of pickled arrays, up to 1,000 entries a read"),
    Figure(key="transport_p99_ms", bench="transport", at_most=15.0, words="at 50 groups/s, codec and checks included",
           take=lambda found: found["peers"]["driftlog"]["latency_ms_p99"]),
    Figure(key="encode_vs_msgspec", bench="codec", at_most=1.2, words="CPU time, ours / msgspec lists",
           take=lambda found: found["encode_to_msgspec"]),
    Figure(key="decode_vs_msgspec", bench="codec", at_most=0.3, words="the same of decoding, with all checks",
           take=lambda found: found["bare_decode_to_msgspec"]),
    Figure(key="decode_whole_vs_msgspec", bench="codec",
           words="and with what comes after it and costs both the same: trajectory objects and row hashes",
           take=lambda found: found["decode_to_msgspec"]),
    Figure(key="bytes_vs_json_raw", bench="codec", at_most=0.5, words="ours / JSON, uncompressed",
           take=lambda found: found["bytes_to_json"]),
    Figure(key="step_overhead_ms", bench="step", at_most=20.0,
           words="main thread, demo, overlapped publication, without update and waiting",
           take=lambda found: found["overlapped"]["overhead"]["p50_ms"]),
    Figure(key="step_overhead_inline_ms", bench="step", at_most=50.0, words="the same, each version published at once",
           take=lambda found: found["inline"]["overhead"]["p50_ms"]),
    Figure(key="step_overhead_share", bench="step", at_most=0.02, words="of the work of a step of about 2 s",
           take=lambda found: found["two_seconds"]["overhead_share"]),
    Figure(key="overlap_share", bench="async", at_least=0.9, words="of what can run side by side, steps of about 2 s",
           take=lambda found: found["two_seconds"]["overlap_share"]),
    Figure(key="overlap_share_demo", bench="async", words="the same for the demo's short steps",
           take=lambda found: found["demo"]["overlap_share"]),
    Figure(key="cpu_s_a_version_demo", bench="async", words="CPU seconds of all services, asynchronous demo",
           take=lambda found: found["demo"]["asynchronous"]["cpu_s_a_version"]),
    Figure(key="idle_cpu_share", bench="idle", at_most=0.05, words="of a core, the service that takes most when idle",
           take=lambda found: found["most"]),
    Figure(key="publish_mb_per_s", bench="publish", at_least=550.0, words="2 GB of weights: written, hashed, fsynced",
           take=lambda found: found["store"]["mb_per_s"]),
    Figure(key="memory_growth_mib", bench="memory", at_most=50.0,
           words="anonymous, of the service that grows most, over 10,000 groups",
           take=lambda found: found["most_growth_mib"]),
    Figure(key="replay_kafka_trajectories_per_s", bench="replay", at_least=15_000.0,
           words="read from Kafka, all checks", take=lambda found: found["kafka_trajectories_per_s"]),
    Figure(key="replay_cache_trajectories_per_s", bench="replay", at_least=300_000.0,
           words="read from the Arrow cache", take=lambda found: found["cache_trajectories_per_s"]),
)  # fmt: skip


def headline(benches: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Key -> value, from the stored results."""
    told: dict[str, float | None] = {}
    for figure in FIGURES:
        result = benches.get(figure.bench, {}).get("result")
        try:
            told[figure.key] = None if result is None else figure.take(result)
        except KeyError:  # a part that was not run, a peer that is not there
            told[figure.key] = None
    return told
