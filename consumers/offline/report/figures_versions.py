"""Plots of the life of versions: when each was published, loaded and live, what a switch costs, branches. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from consumers.offline.report.bins import MAX_POINTS, largest, mean, parts, tidy
from consumers.offline.report.figure import (
    Axis,
    Branch,
    Curves,
    Figure,
    Lane,
    Lanes,
    Life,
    Lives,
    Number,
    Ranges,
    Section,
    Series,
    Table,
    Tree,
)
from consumers.offline.report.policy_reading import PHASES, WHOLE, PolicyReading, VersionLife
from consumers.offline.report.reading import RunReading
from consumers.offline.report.steps import VERSION, version_label
from consumers.offline.switch_latency import quantile
from schemas.headers import rfc3339
from schemas.policy_state import VersionStatus

SHOWN_VERSIONS = 60
SHOWN_BRANCHES = 24
SHOWN_LANES = 12
SHOWN_LIVES = 16
_LANE_BINS = 160
_GRID = 2 * MAX_POINTS
_UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"))


def time_axis(wall_s: float) -> tuple[Axis, float]:
    """The axis of seconds since the start of the run in a unit that suits its length, and how many seconds that is."""
    for above, size, unit in _UNITS:
        if wall_s > above:
            return Axis(label="since the start of the run", unit=unit), size
    return Axis(label="since the start of the run", unit="s"), 1.0


def versions(reading: RunReading) -> Section:
    """When each version was published, loading, live, failed, retired; and what the workers did."""
    return Section(
        id="versions",
        title="Versions and switches",
        lead="A version is published by the trainer, loaded and proven by every worker, and then live. Horizontal "
        "distance between the lines is latency, vertical distance is how many versions behind.",
        parts=[
            _timeline(reading), _lives(reading), _lanes(reading), _phases(reading.policy), _latency(reading.policy),
            *_troubles(reading), _version_table(reading),
        ],
    )  # fmt: skip


def _timeline(reading: RunReading) -> Curves:
    policy = reading.policy
    axis, unit = time_axis(policy.wall_s)
    lives = list(policy.lives.values())
    zero = policy.started_us or 0
    tracks = {
        "published": [(life.published_us, life.version) for life in lives],
        "loading": [(life.started_us, life.version) for life in lives if life.started_us is not None],
        "live": [(life.live_us, life.version) for life in lives if life.live_us is not None],
        "retired": [(life.retired_us, life.version) for life in lives if life.retired_us is not None],
    }
    failed = sorted((life.failed_us, life.version) for life in lives if life.failed_us is not None)
    starts = [(policy.lives[b.version].published_us, b.version) for b in reading.branches]
    times = sorted({at for track in (*tracks.values(), failed, starts) for at, _ in track})
    if len(times) > _GRID:
        span = times[-1] - times[0]
        times = [times[0] + round(span * i / (_GRID - 1)) for i in range(_GRID)]
    series = [
        Series(name=name, values=_held(track, times), kind="step", tone=tone)
        for tone, (name, track) in zip((3, 4, 0, 5), tracks.items(), strict=True)
    ]
    series += [
        Series(name="switch failed", values=_at(failed, times), kind="marks", tone=1),
        Series(name="branch start", values=_at(starts, times), kind="points", tone=2),
    ]
    seconds = [(at - zero) / 1e6 for at in times]
    return Curves(
        id="timeline", title="Version timeline", width="full", zero=True,
        note="The newest version that was published, in a switch (loading), live, retired at that time.",
        x=axis, y=VERSION, places=[s / unit for s in seconds], labels=[f"{tidy(s):g} s" for s in seconds],
        series=series, empty="no version was published yet",
    )  # fmt: skip


def _held(track: Sequence[tuple[int, int]], times: Sequence[int]) -> list[Number]:
    """The version of the last change at or before each time."""
    ordered = sorted(track)
    changes = [at for at, _ in ordered]
    found = [bisect.bisect_right(changes, at) for at in times]
    return [float(ordered[index - 1][1]) if index else None for index in found]


def _at(events: Sequence[tuple[int, int]], times: Sequence[int]) -> list[Number]:
    """The version of an event at the time at or after it, which is the same one unless times are a grid."""
    values: list[Number] = [None] * len(times)
    for at, version in events:
        values[min(bisect.bisect_left(times, at), len(times) - 1)] = float(version)
    return values


def _lanes(reading: RunReading) -> Figure:
    axis, unit = time_axis(reading.policy.wall_s)
    lanes = []
    for worker, (width, shares) in list(reading.policy.lane_shares().items())[:SHOWN_LANES]:
        size = max(1, math.ceil(max(map(len, shares.values()), default=0) / _LANE_BINS))
        merged = {state: _merged(values, size) for state, values in shares.items()}
        if merged:
            _fill_the_last(merged, reading.policy.wall_s / (size * width))
            lanes.append(Lane(name=worker, bin_width=size * width / unit, shares=merged))
    hidden = len(reading.policy.lanes) - len(lanes)
    more = f" {hidden} more workers are not shown." if hidden > 0 else ""
    return Lanes(
        id="workers", title="What the workers did", width="full", x=axis, end=reading.policy.wall_s / unit, lanes=lanes,
        note="Share of each stretch of time. Fetching goes beside serving; loading (drain, load, prove) and waiting "
        "for the other workers' proofs do not." + more, empty="no worker joined yet",
    )  # fmt: skip


def _merged(values: Sequence[float], size: int) -> list[float]:
    """Means of so many bins each; beyond the last one nothing was done."""
    return [math.fsum(values[i : i + size]) / size for i in range(0, len(values), size)]


def _fill_the_last(merged: Mapping[str, list[float]], bins: float) -> None:
    """The run ended inside the last bin: shares are of what there was of it."""
    last = int(bins)
    if bins > last:
        for values in merged.values():
            values[last:] = [min(1.0, value / (bins - last)) for value in values[last:]]


def _lives(reading: RunReading) -> Lives:
    """The last versions one by one."""
    policy = reading.policy
    axis, unit = time_axis(policy.wall_s)
    zero = policy.started_us or 0
    lives = list(policy.lives.values())[-SHOWN_LIVES:]
    live_times = sorted(life.live_us for life in policy.lives.values() if life.live_us is not None)

    def place(at_us: int) -> float:
        return (at_us - zero) / 1e6 / unit

    rows = []
    for life in lives:
        ended = [at for at in (life.live_us, life.failed_us, policy.end_us) if at is not None]
        until_us = life.started_us if life.started_us is not None else policy.end_us
        spans = {"published": (place(life.published_us), place(max(life.published_us, until_us)))}
        if life.started_us is not None:
            spans["in a switch"] = (place(life.started_us), place(max(life.started_us, ended[0])))
        if life.live_us is not None:
            later = bisect.bisect_right(live_times, life.live_us)
            spans["live"] = place(life.live_us), place(live_times[later] if later < len(live_times) else policy.end_us)
        rows.append(
            Life(
                name=str(life.version), spans=spans,
                marks={worker: place(at) for worker, at in policy.recent_proofs.get(life.version, ())},
                failed_at=None if life.failed_us is None else place(life.failed_us),
            )
        )  # fmt: skip
    return Lives(
        id="lives", title=f"The last {len(rows)} versions", width="full", x=axis,
        note="Published until its switch begins, then loading until the last proof (ticks, by worker), then live until "
        "the next one is. A cross is a failed switch.",
        start=min((place(life.published_us) for life in lives), default=0.0), end=place(policy.end_us), rows=rows,
        marks=sorted({worker for row in rows for worker in row.marks}), empty="no version was published yet",
    )  # fmt: skip


# ---------------------------------------------------------------------- switches


def _phases(policy: PolicyReading) -> Ranges:
    names = [name for name in PHASES if name in policy.phases]
    values = [list(policy.phases[name]) for name in names]
    return Ranges(
        id="phases", title="Switch latency by phase", x=Axis(label="duration", unit="s"), labels=names,
        note="Dot: median; bar: up to the 95th percentile. Fetch, drain, load are what each worker says of itself.",
        series=[
            Series(name="median", values=[tidy(quantile(v, 0.5)) for v in values]),
            Series(name="95th percentile", values=[tidy(quantile(v, 0.95)) for v in values]),
        ],
        empty="no version went live yet",
    )  # fmt: skip


def _latency(policy: PolicyReading) -> Curves:
    seconds, versions = list(policy.phases.get(WHOLE, ())), policy.switch_versions
    shown = parts(len(versions))
    size = len(shown[0]) if shown else 1
    note = "From publication until live." + ("" if size == 1 else f" Each point stands for {size} switches.")
    middle = Series(name="mean", values=[tidy(mean([seconds[i] for i in part])) for part in shown])
    slowest = Series(name="slowest", values=[tidy(largest([seconds[i] for i in part])) for part in shown], tone=1)
    return Curves(
        id="latency", title="Publish to live by version", note=note, x=VERSION, y=Axis(label="latency", unit="s"),
        places=[mean([float(versions[i]) for i in part]) or 0.0 for part in shown],
        labels=[version_label(versions[part[0]], versions[part[-1]]) for part in shown],
        series=[middle, *[slowest] * (size > 1)],
        zero=True, empty="no version went live yet",
    )  # fmt: skip


def _troubles(reading: RunReading) -> list[Table]:
    policy = reading.policy
    if not policy.troubles:
        return []
    zero = policy.started_us or 0
    rows = [
        (f"{(trouble.at_us - zero) / 1e6:.1f}", trouble.what, trouble.subject, trouble.detail)
        for trouble in policy.troubles
    ]
    counts = ", ".join(f"{count} x {what}" for what, count in sorted(policy.trouble_counts.items()))
    note = f"In all: {counts}." + ("" if sum(policy.trouble_counts.values()) == len(rows) else " The last are shown.")
    return [
        Table(title="Failed loads and switches", head=("s", "what", "of", "why"), rows=rows, note=note, numeric=(0,))
    ]


def _version_table(reading: RunReading) -> Table:
    lives = list(reading.policy.lives.values())[-SHOWN_VERSIONS:]
    zero = reading.policy.started_us or 0

    def seconds(at_us: int | None) -> str:
        return "" if at_us is None else f"{(at_us - zero) / 1e6:.2f}"

    rows = [
        (
            str(life.version), "" if life.parent is None else str(life.parent), str(life.depth),
            state_words(life, reading.statuses), f"{life.size_bytes / 1e6:,.1f}", seconds(life.published_us),
            seconds(life.started_us), seconds(life.live_us), seconds(life.failed_us), seconds(life.retired_us),
        )
        for life in reversed(lives)
    ]  # fmt: skip
    begun = rfc3339(zero) if reading.policy.started_us else "-"
    return Table(
        title=f"The last {len(rows)} of {len(reading.policy.lives)} versions", is_folded=True, rows=rows,
        head=("version", "parent", "depth", "state", "MB", "published", "loading", "live", "failed", "retired"),
        note=f"Times in seconds since {begun}.", numeric=(0, 1, 2, 4, 5, 6, 7, 8, 9),
    )  # fmt: skip


def state_words(life: VersionLife, statuses: Mapping[int, VersionStatus]) -> str:
    """What became of a version."""
    return statuses[life.version].value.replace("_", " ") + (", pinned" if life.is_pinned else "")


# ---------------------------------------------------------------------- lineage


def lineage(reading: RunReading) -> Section:
    """Which version goes back to which."""
    found = branches(reading.policy.lives, reading.newest)
    hidden = len(found) - SHOWN_BRANCHES
    note = "Left to right: training steps from version 0. A branch start is an older version under a new number."
    if hidden > 0:
        note += f" {hidden} older branches are left out."
    rows = [(b.words,) for b in reading.branches[-SHOWN_BRANCHES:]]
    table = [Table(title="What each left behind", head=("",), rows=rows)] if rows else []
    return Section(
        id="lineage",
        title="Lineage",
        lead="Each version has one parent. Where training went on from an older version, what came after that one "
        "stays in the log as another branch.",
        parts=[
            Tree(
                id="tree", title="Branches", note=note, width="full", x=Axis(label="depth", unit="training steps"),
                branches=_newest_branches(found), empty="no version was published yet",
            ),
            *table,
        ],
    )  # fmt: skip


def branches(lives: dict[int, VersionLife], newest: int | None) -> list[Branch]:
    """Unbroken stretches, parent to child, in the order in which they were begun."""
    found: list[Branch] = []
    on: dict[int, int] = {}
    for life in lives.values():
        index = None if life.parent is None else on.get(life.parent)
        tip = None if index is None else found[index]
        if tip is not None and index is not None and (life.parent, life.depth) == (tip.last, tip.last_depth + 1):
            found[index] = replace(tip, last=life.version, last_depth=life.depth)
        else:
            found.append(
                Branch(
                    first=life.version, last=life.version, first_depth=life.depth, last_depth=life.depth,
                    from_version=life.parent, from_branch=index, is_current=False,
                )
            )  # fmt: skip
            index = len(found) - 1
        on[life.version] = index
    return [replace(branch, is_current=branch.last == newest) for branch in found]


def _newest_branches(found: Sequence[Branch]) -> list[Branch]:
    """The last ones, and those that they go back to as far as they are shown."""
    start = max(0, len(found) - SHOWN_BRANCHES)
    shown = []
    for branch in found[start:]:
        origin = None if branch.from_branch is None or branch.from_branch < start else branch.from_branch - start
        shown.append(replace(branch, from_branch=origin))
    return shown
