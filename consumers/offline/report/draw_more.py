"""The less usual figures as SVG: heat maps, lanes of workers, ranges, the tree of branches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from consumers.offline.report.draw import BOTTOM, LABEL_WIDTH, LEFT, RIGHT, SIZES, TOP, Drawing, captions, frame, text
from consumers.offline.report.figure import Branch, Heat, Lane, Lanes, Lives, Ranges, Tree
from consumers.offline.report.scale import Scale, at, seconds, short, thin, ticks

LANE_HEIGHT, LANE_GAP = 40, 10
_CELL, _ROW, _LIFE = 20, 30, 20
_FAINTEST = 0.12
"""a cell that holds something can be told from one that does not"""


def heat(figure: Heat) -> Drawing:
    """Cells whose strength is their count against the largest one."""
    width, _ = SIZES[figure.width]
    height = TOP + max(3, len(figure.rows)) * _CELL + BOTTOM
    room = (width - LEFT - RIGHT) / len(figure.labels)
    xs = [LEFT + (index + 0.5) * room for index in range(len(figure.labels))]
    most = max(value or 0.0 for row in figure.rows for value in row.values)
    body = [captions(figure.x.words, figure.y.words, width, height)]
    for number, row in enumerate(figure.rows):
        top = height - BOTTOM - (number + 1) * _CELL
        body.append(text(LEFT - 6, top + _CELL / 2 + 4, row.name.split()[0], "t", "e"))
        body.append(f'<path class="g" d="M{LEFT} {at(top + _CELL)}H{width - RIGHT}"/>')
        for x, value in zip(xs, row.values, strict=True):
            if value:
                strength = _FAINTEST + (1 - _FAINTEST) * value / most
                body.append(
                    f'<rect class="ht" x="{at(x - room / 2)}" y="{at(top + 1)}" width="{at(max(1.0, room - 0.6))}" '
                    f'height="{_CELL - 2}" opacity="{strength:.2f}"/>'
                )
    ends = [label.removeprefix("trained at ") for label in figure.labels]
    every = thin(ends, room)
    body += [text(xs[i], height - BOTTOM + 15, ends[i], "t", "m") for i in range(0, len(xs), every)]
    body.append(text(width - RIGHT, 11, f"darkest: {short(most)} an update", "c", "e"))
    return Drawing(svg=frame(figure, "".join(body), width, height), xs=xs)


def lanes(figure: Lanes) -> Drawing:
    """One strip a lane; states are stacked from its lower edge."""
    width, _ = SIZES[figure.width]
    height = TOP + len(figure.lanes) * (LANE_HEIGHT + LANE_GAP) + BOTTOM
    x = Scale(low=0.0, high=figure.end, start=LEFT + 44, end=width - RIGHT)
    body = [captions(figure.x.words, "share of time", width, height)]
    for number, lane in enumerate(figure.lanes):
        top = TOP + number * (LANE_HEIGHT + LANE_GAP)
        body.append(text(LEFT + 36, top + LANE_HEIGHT / 2 + 4, lane.name[:14], "t", "e"))
        body.append(f'<path class="g" d="M{at(x.start)} {top + LANE_HEIGHT}H{width - RIGHT}"/>')
        body += _strip(lane, top, x)
    for value in ticks(0.0, figure.end, about=8):
        if value <= figure.end:
            body.append(text(x(value), height - BOTTOM + 15, short(value), "t", "m"))
    bins = max(len(shares) for lane in figure.lanes for shares in lane.shares.values())
    xs = [x(min(figure.end, (i + 0.5) * figure.lanes[0].bin_width)) for i in range(bins)]
    return Drawing(svg=frame(figure, "".join(body), width, height), xs=xs)


def _strip(lane: Lane, top: float, x: Scale) -> list[str]:
    found = []
    under = [0.0] * max(len(shares) for shares in lane.shares.values())
    for state, shares in lane.shares.items():
        upper = [min(1.0, low + share) for low, share in itertools.zip_longest(under, shares, fillvalue=0.0)]
        if any(shares):
            found.append(f'<path class="la l-{state}" d="{_staircase(upper, under, lane.bin_width, top, x)}"/>')
        under = upper
    return found


def _staircase(upper: Sequence[float], lower: Sequence[float], width: float, top: float, x: Scale) -> str:
    """The area between two step functions, stretch by stretch where they differ."""
    parts = []
    for is_open, indexes in itertools.groupby(range(len(upper)), key=lambda i: upper[i] - lower[i] > 1e-4):
        stretch = list(indexes)
        if is_open:
            there = "".join(f"V{_height(upper[i], top)}H{at(_edge(x, (i + 1) * width))}" for i in stretch)
            back = "".join(f"V{_height(lower[i], top)}H{at(_edge(x, i * width))}" for i in reversed(stretch))
            parts.append(f"M{at(_edge(x, stretch[0] * width))} {_height(lower[stretch[0]], top)}{there}{back}Z")
    return "".join(parts)


def _height(share: float, top: float) -> str:
    return at(top + LANE_HEIGHT * (1 - share))


def _edge(x: Scale, value: float) -> float:
    return min(x.end, x(value))


def lives(figure: Lives) -> Drawing:
    """One row a version: thin until it is live, with a tick at each worker's proof."""
    width, _ = SIZES[figure.width]
    height = TOP + len(figure.rows) * _LIFE + BOTTOM
    x = Scale(low=figure.start, high=figure.end, start=LEFT, end=width - RIGHT)
    body = [captions(figure.x.words, "policy version", width, height)]
    for value in ticks(figure.start, figure.end, about=8):
        if figure.start <= value <= figure.end:
            body.append(f'<path class="g" d="M{at(x(value))} {TOP}V{height - BOTTOM}"/>')
            body.append(text(x(value), height - BOTTOM + 15, short(value), "t", "m"))
    for number, row in enumerate(figure.rows):
        middle = TOP + (number + 0.5) * _LIFE
        body.append(text(LEFT - 8, middle + 4, row.name, "t", "e"))
        for state, (start, end) in row.spans.items():
            thick = 10 if state == "live" else 4
            length = max(1.0, x(end) - x(start))
            body.append(
                f'<rect class="la l-{state.replace(" ", "-")}" x="{at(x(start))}" y="{at(middle - thick / 2)}" '
                f'width="{at(length)}" height="{thick}"/>'
            )
        for who, moment in row.marks.items():
            tone = figure.marks.index(who) % 2 + 1
            body.append(f'<path class="mk s{tone}" d="M{at(x(moment))} {at(middle - 6)}v12"/>')
        if row.failed_at is not None:
            body.append(f'<path class="mk bad" d="M{at(x(row.failed_at) - 4)} {at(middle - 4)}l8 8m0 -8l-8 8"/>')
    return Drawing(svg=frame(figure, "".join(body), width, height))


def ranges(figure: Ranges) -> Drawing:
    """A dot at the middle, a bar to the upper value, both as numbers at the end of the row."""
    width, height = SIZES[figure.width]
    height = max(height, TOP + _ROW * len(figure.labels) + BOTTOM)
    middle, upper = figure.series
    columns = ticks(0.0, max(value or 0.0 for value in upper.values), about=3)
    x = Scale(low=0.0, high=columns[-1], start=LABEL_WIDTH, end=width - 92)
    room = (height - TOP - BOTTOM) / len(figure.labels)
    body = [captions(figure.x.words, "", width, height, LABEL_WIDTH)]
    for value in columns:
        body.append(f'<path class="g" d="M{at(x(value))} {TOP}V{height - BOTTOM}"/>')
        body.append(text(x(value), height - BOTTOM + 15, short(value), "t", "m"))
    for number, (label, low, high) in enumerate(zip(figure.labels, middle.values, upper.values, strict=True)):
        y = TOP + (number + 0.5) * room
        low, high = low or 0.0, high or 0.0
        tone = "s0" if number == 0 else "s2"
        body.append(text(LABEL_WIDTH - 10, y + 4, label, "t", "e"))
        body.append(f'<path class="rg {tone}" d="M{at(x(low))} {at(y)}H{at(x(high))}"/>')
        body.append(f'<circle class="pt {tone}" cx="{at(x(low))}" cy="{at(y)}" r="4"/>')
        body.append(text(width, y + 4, f"{seconds(low)} / {seconds(high)}", "t", "e"))
    return Drawing(svg=frame(figure, "".join(body), width, height))


def tree(figure: Tree) -> Drawing:
    """One line a branch, from the depth it was begun at to the depth it reached."""
    width, _ = SIZES[figure.width]
    height = TOP + _ROW * len(figure.branches) + BOTTOM
    low = min(branch.first_depth for branch in figure.branches)
    high = max(branch.last_depth for branch in figure.branches)
    x = Scale(low=low, high=max(high, low + 1), start=LEFT, end=width - 150)
    body = [captions(figure.x.words, "", width, height)]
    for value in ticks(low, max(high, low + 1), about=8):
        if low <= value <= max(high, low + 1) and value % 1 == 0:
            body.append(f'<path class="g" d="M{at(x(value))} {TOP}V{height - BOTTOM}"/>')
            body.append(text(x(value), height - BOTTOM + 15, short(value), "t", "m"))
    for number, branch in enumerate(figure.branches):
        body.append(_branch(branch, number, x))
    return Drawing(svg=frame(figure, "".join(body), width, height))


def _branch(branch: Branch, number: int, x: Scale) -> str:
    y = TOP + (number + 0.5) * _ROW
    first, last = x(branch.first_depth), x(branch.last_depth)
    tone = "s0" if branch.is_current else "s3"
    found = []
    if branch.from_version is not None:
        above = TOP + 2 if branch.from_branch is None else TOP + (branch.from_branch + 0.5) * _ROW
        found.append(f'<path class="cn" d="M{at(first)} {at(above)}V{at(y)}"/>')
    found.append(f'<path class="rg {tone}" d="M{at(first)} {at(y)}H{at(max(last, first + 1))}"/>')
    found.append(f'<circle class="pt {tone}" cx="{at(first)}" cy="{at(y)}" r="4"/>')
    found.append(f'<circle class="pt {tone}" cx="{at(last)}" cy="{at(y)}" r="4"/>')
    came = "" if branch.from_version is None else f" (from {branch.from_version})"
    words = f"{branch.first}-{branch.last}{came}" if branch.last != branch.first else f"{branch.first}{came}"
    found.append(text(last + 10, y + 4, words + (", newest" if branch.is_current else ""), "t"))
    return "".join(found)
