"""Plots of throughput and of who waited: tokens over time, training by version, idle shares. Pure."""

from __future__ import annotations

import math

from consumers.offline.report.bins import MAX_POINTS, Histogram, parts, tidy
from consumers.offline.report.figure import Axis, Curves, Figure, Number, Section, Series
from consumers.offline.report.figures_versions import time_axis
from consumers.offline.report.reading import RunReading
from consumers.offline.report.steps import Steps

SHOWN_WORKERS = 5
"""workers that have a curve of their own; the others are added up"""
_TIME_POINTS = MAX_POINTS // 5
"""few enough that a bin holds several groups"""


def speed(reading: RunReading, steps: Steps) -> Section:
    """How fast, and who waited for whom."""
    return Section(
        id="speed",
        title="Throughput and idle shares",
        lead="Where both sides wait, the switch or the log is in the way; where only one waits, the other is the "
        "bottleneck.",
        parts=[_tokens(reading), _trained(steps), _idle(reading), _phases(steps)],
    )


def _tokens(reading: RunReading) -> Figure:
    tokens = dict(sorted(reading.rows.tokens.items(), key=lambda item: -item[1].total))
    wall_s = reading.policy.wall_s
    axis, unit = time_axis(wall_s)
    for histogram in tokens.values():
        histogram.reach(wall_s)
    width = max((histogram.width for histogram in tokens.values()), default=1.0)
    for histogram in tokens.values():
        while histogram.width < width:
            histogram.reach(histogram.width * len(histogram.weights))
    shown = parts(max((histogram.filled() for histogram in tokens.values()), default=0), _TIME_POINTS)
    series = [
        Series(name=name, values=_per_second(histograms, shown, width), kind="stack", tone=number)
        for number, (name, histograms) in enumerate(_named(tokens).items())
    ]
    seconds = [(part[0] + len(part) / 2) * width for part in shown]
    return Curves(
        id="tokens", title="Tokens sampled by worker", note="By the time at which sampling of a completion ended.",
        x=axis, y=Axis(label="tokens", unit="1/s"), places=[s / unit for s in seconds],
        labels=[f"{tidy(s):g} s" for s in seconds], series=series, zero=True, empty="no completion is in the log yet",
    )  # fmt: skip


def _named(tokens: dict[str, Histogram]) -> dict[str, list[Histogram]]:
    items = list(tokens.items())
    named = {name: [histogram] for name, histogram in items[:SHOWN_WORKERS]}
    if rest := [histogram for _, histogram in items[SHOWN_WORKERS:]]:
        named[f"{len(rest)} others"] = rest
    return named


def _per_second(histograms: list[Histogram], shown: list[range], width: float) -> list[Number]:
    sums = (math.fsum(histogram.weights[i] for histogram in histograms for i in part) for part in shown)
    return [tidy(total / (len(part) * width)) for total, part in zip(sums, shown, strict=True)]


def _trained(steps: Steps) -> Curves:
    ledger = steps.ledger

    def rate(part: range) -> float | None:
        before = part[0] - 1
        if before < 0:
            part, before = part[1:], part[0]
        elapsed_s = (ledger.times_us[part[-1]] - ledger.times_us[before]) / 1e6 if part else 0.0
        return sum(ledger.trajectories[i] for i in part) / elapsed_s if elapsed_s > 0 else None

    return steps.curves(
        "trained", "Trajectories trained", "Between the commit of a step and the one before.",
        Axis(label="trajectories", unit="1/s"),
        [Series(name="trained", values=steps.each(rate))], zero=True, empty="fewer than two steps were made",
    )  # fmt: skip


def _idle(reading: RunReading) -> Curves:
    axis, unit = time_axis(reading.policy.wall_s)
    zero = reading.policy.started_us or 0
    bin_s = max(reading.policy.wall_s / _TIME_POINTS, 1e-6)
    series = []
    for tone, (worker, idle) in enumerate(sorted(reading.idle.items())[:SHOWN_WORKERS]):
        sums: dict[int, tuple[float, int]] = {}
        for at_us, share in zip(idle.times_us, idle.shares, strict=True):
            place = max(0, min(_TIME_POINTS - 1, int((at_us - zero) / 1e6 / bin_s)))
            total, count = sums.get(place, (0.0, 0))
            sums[place] = total + share, count + 1
        values = [tidy(sums[p][0] / sums[p][1]) if p in sums else None for p in range(_TIME_POINTS)]
        series.append(Series(name=f"generator {worker}", values=values, tone=tone))
    trainer = _trainer_idle(reading, bin_s)
    series.append(Series(name="trainer", values=trainer, tone=5))
    seconds = [(place + 0.5) * bin_s for place in range(_TIME_POINTS)]
    return Curves(
        id="idle", title="Idle shares",
        note="Trainer: of each step. Generators: of the heartbeats that compaction has left.",
        x=axis, y=Axis(label="idle", unit="share"), places=[s / unit for s in seconds],
        labels=[f"{tidy(s):g} s" for s in seconds], series=series, zero=True, top=1.0,
        empty="no step and no heartbeat tells it",
    )  # fmt: skip


def _trainer_idle(reading: RunReading, bin_s: float) -> list[Number]:
    ledger, zero = reading.ledger, reading.policy.started_us or 0
    sums: dict[int, tuple[float, int]] = {}
    for at_us, share in zip(ledger.times_us, ledger.column("trainer/idle_fraction"), strict=True):
        if math.isfinite(share):
            place = max(0, min(_TIME_POINTS - 1, int((at_us - zero) / 1e6 / bin_s)))
            total, count = sums.get(place, (0.0, 0))
            sums[place] = total + share, count + 1
    values = [tidy(sums[p][0] / sums[p][1]) if p in sums else None for p in range(_TIME_POINTS)]
    for place in range(_TIME_POINTS - 2, -1, -1):
        # A share holds for the whole of its step, which ended with the next value.
        values[place] = values[place + 1] if values[place] is None else values[place]
    return values


def _phases(steps: Steps) -> Curves:
    names = ("batch", "train", "checkpoint")
    known = {name: steps.values(f"time/{name}") for name in (*names, "whole")}
    shown = (("train", "train", 0), ("batch", "batch", 2), ("checkpoint", "checkpoint and commit", 1))
    series = [Series(name=words, values=known[name], kind="stack", tone=tone) for name, words, tone in shown]
    waited: list[Number] = []
    for place, whole in enumerate(known["whole"]):
        parts_s = [known[name][place] for name in names]
        waited.append(None if whole is None else tidy(max(0.0, whole - math.fsum(s for s in parts_s if s is not None))))
    series.append(Series(name="waiting", values=waited, kind="stack", tone=5))
    return steps.curves(
        "step-time", "Where a training step's time goes", "From the end of the step before.",
        Axis(label="duration", unit="s"), series, zero=True,
    )  # fmt: skip
