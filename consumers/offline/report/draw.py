"""Figures as inline SVG: the common frame, curves and bars. Colours and dashes are classes, so a style sheet decides.

Every function gives the drawing and where on it each value of the x axis stands, which the page's script needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from consumers.offline.report.figure import Bars, Curves, Figure, Number, Series
from consumers.offline.report.scale import Scale, at, short, thin, ticks

SIZES = {"full": (1080, 272), "half": (532, 236), "third": (350, 206)}
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 26, 38
LABEL_WIDTH = 132
"""of what stands left of horizontal bars and lanes"""
_BAR_SHARE = 0.78
_MOST_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """An SVG and the x positions of its values, in its own pixels."""

    svg: str
    xs: Sequence[float] = ()


def frame(figure: Figure, body: str, width: int, height: int) -> str:
    """The element around a drawing; what it shows stands in its label."""
    words = escape(f"{figure.title}. {figure.note}", quote=True)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{words}" tabindex="0">{body}'
        f'<line class="cross" y1="{TOP}" y2="{height - BOTTOM}"/></svg>'
    )


def text(x: float, y: float, words: str, kind: str = "t", anchor: str = "") -> str:
    """Words on the drawing; `anchor`: m middle, e end."""
    classes = f"{kind} {anchor}".strip()
    return f'<text class="{classes}" x="{at(x)}" y="{at(y)}">{escape(words)}</text>'


def captions(x_words: str, y_words: str, width: int, height: int, left: int = LEFT) -> str:
    """What the axes are."""
    below = text((left + width - RIGHT) / 2, height - 4, x_words, "c", "m")
    return below + (text(0, 9, y_words, "c") if y_words else "")


# ---------------------------------------------------------------------- curves


def curves(figure: Curves) -> Drawing:
    """Lines, steps, bands, stacks, points and marks over numbers."""
    width, height = SIZES[figure.width]
    rows = ticks(*_extent(figure), about=4 if figure.width == "full" else 3)
    y = Scale(low=rows[0], high=rows[-1], start=height - BOTTOM, end=TOP)
    x = Scale(low=figure.places[0], high=figure.places[-1], start=LEFT + 4, end=width - RIGHT - 4)
    xs = [x(place) for place in figure.places]
    body = [grid(rows, y, width), captions(figure.x.words, figure.y.words, width, height)]
    columns = ticks(figure.places[0], figure.places[-1], about=8 if figure.width == "full" else 4)
    whole = figure.x.label == "policy version"
    for value in columns:
        if figure.places[0] <= value <= figure.places[-1] and not (whole and value % 1):
            body.append(text(x(value), height - BOTTOM + 15, short(value), "t", "m"))
    for value, name in figure.lines:
        if rows[0] <= value <= rows[-1]:
            body.append(f'<path class="rf" d="M{LEFT} {at(y(value))}H{width - RIGHT}"/>')
            body.append(text(width - RIGHT - 2, y(value) - 4, name, "t", "e") if name else "")
    under = [0.0] * len(xs)
    for series in sorted(figure.shown, key=_order):
        body.append(_series(series, xs, y, under))
    return Drawing(svg=frame(figure, "".join(body), width, height), xs=xs)


def grid(rows: Sequence[float], y: Scale, width: int) -> str:
    """Horizontal lines with their values."""
    lines = [f'<path class="g" d="M{LEFT} {at(y(value))}H{width - RIGHT}"/>' for value in rows]
    return "".join(lines + [text(LEFT - 6, y(value) + 3.5, short(value), "t", "e") for value in rows])


def _order(series: Series) -> int:
    """Areas lie below, single points on top."""
    return {"band": 0, "stack": 0, "line": 2, "step": 2, "points": 3, "marks": 4}[series.kind]


def _extent(figure: Curves) -> tuple[float, float]:
    """Of everything drawn."""
    values = [v for s in figure.shown if s.kind != "stack" for v in (*s.values, *s.lower) if v is not None]
    stacks = [s.values for s in figure.shown if s.kind == "stack"]
    values += [sum(v or 0.0 for v in column) for column in zip(*stacks, strict=True)]
    if figure.zero:
        values.append(0.0)
    if figure.top is not None:
        values.append(figure.top)
    values += [value for value, _ in figure.lines]
    return min(values), max(values)


def _series(series: Series, xs: Sequence[float], y: Scale, under: list[float]) -> str:
    tone = f"s{series.tone % 6}"
    if series.kind == "points":
        return "".join(
            f'<circle class="pt {tone}" cx="{at(x)}" cy="{at(y(v))}" r="3"/>'
            for x, v in zip(xs, series.values, strict=True)
            if v is not None
        )
    if series.kind == "marks":
        marks = [
            f"M{at(x - 3.5)} {at(y(v) - 3.5)}l7 7m0 -7l-7 7"
            for x, v in zip(xs, series.values, strict=True)
            if v is not None
        ]
        return f'<path class="mk {tone}" d="{"".join(marks)}"/>'
    if series.kind == "band":
        return _area(xs, [_y(v, y) for v in series.values], [_y(v, y) for v in series.lower], f"bd {tone}")
    if series.kind == "stack":
        low = [y(value) for value in under]
        for index, value in enumerate(series.values):
            under[index] += value or 0.0
        return _area(xs, [y(value) for value in under], low, f"ar {tone}")
    return _line(xs, [_y(v, y) for v in series.values], tone, is_step=series.kind == "step")


def _y(value: Number, y: Scale) -> float | None:
    return None if value is None else y(value)


def _line(xs: Sequence[float], ys: Sequence[Number], tone: str, *, is_step: bool) -> str:
    """A path with gaps where there is no value; a value alone is a dot."""
    found, path = [], []
    for stretch in _stretches(ys):
        points = [(xs[i], ys[i] or 0.0) for i in stretch]
        if len(points) == 1:
            found.append(f'<circle class="pt {tone}" cx="{at(points[0][0])}" cy="{at(points[0][1])}" r="2"/>')
            continue
        joins = [f"H{at(px)}V{at(py)}" if is_step else f"L{at(px)} {at(py)}" for px, py in points[1:]]
        path.append(f"M{at(points[0][0])} {at(points[0][1])}" + "".join(joins))
    if path:
        found.append(f'<path class="ln {tone}" d="{"".join(path)}"/>')
    return "".join(found)


def _area(xs: Sequence[float], upper: Sequence[Number], lower: Sequence[Number], classes: str) -> str:
    both = [None if u is None or low is None else u for u, low in zip(upper, lower, strict=True)]
    path = []
    for stretch in _stretches(both):
        there = [f"{at(xs[i])} {at(upper[i] or 0.0)}" for i in stretch]
        back = [f"{at(xs[i])} {at(lower[i] or 0.0)}" for i in reversed(stretch)]
        path.append("M" + "L".join(there + back) + "Z")
    return f'<path class="{classes}" d="{"".join(path)}"/>' if path else ""


def _stretches(values: Sequence[Number]) -> list[range]:
    """Indexes of values that stand together."""
    found: list[range] = []
    start: int | None = None
    for index, value in enumerate([*values, None]):
        if value is not None and start is None:
            start = index
        elif value is None and start is not None:
            found.append(range(start, index))
            start = None
    return found


# ---------------------------------------------------------------------- bars


def bars(figure: Bars) -> Drawing:
    """Upright bars beside each other; long names lie, with their bars."""
    if figure.lies:
        return _lying(figure)
    width, height = SIZES[figure.width]
    values = [value or 0.0 for series in figure.shown for value in series.values]
    rows = ticks(0.0, max(values), about=3)
    y = Scale(low=rows[0], high=rows[-1], start=height - BOTTOM, end=TOP)
    room = (width - LEFT - RIGHT) / len(figure.labels)
    body = [grid(rows, y, width), captions(figure.x.words, figure.y.words, width, height)]
    xs = [LEFT + (index + 0.5) * room for index in range(len(figure.labels))]
    if figure.bin_width is None:
        for index in range(0, len(xs), thin(figure.labels, room)):
            body.append(text(xs[index], height - BOTTOM + 15, figure.labels[index], "t", "m"))
    else:
        end = figure.bin_width * len(xs)
        edges = Scale(low=0.0, high=end, start=LEFT, end=width - RIGHT)
        body += [text(edges(v), height - BOTTOM + 15, short(v), "t", "m") for v in ticks(0.0, end, about=5) if v <= end]
    # A few bars alone would be walls.
    whole = min(room * _BAR_SHARE, 72.0)
    each = whole / len(figure.shown)
    for number, series in enumerate(figure.shown):
        path = [
            f"M{at(x - whole / 2 + number * each)} {at(y(0))}V{at(y(value))}h{at(max(0.5, each - 0.5))}V{at(y(0))}Z"
            for x, value in zip(xs, series.values, strict=True)
            if value
        ]
        body.append(f'<path class="br s{series.tone % 6}" d="{"".join(path)}"/>')
    return Drawing(svg=frame(figure, "".join(body), width, height), xs=xs)


def _lying(figure: Bars) -> Drawing:
    """One row a label, its number at the end; what does not fit stands in the numbers below."""
    width, _ = SIZES[figure.width]
    shown = list(zip(figure.labels, figure.series[0].values, strict=True))[:_MOST_ROWS]
    height = max(SIZES[figure.width][1], TOP + 24 * len(shown) + BOTTOM)
    x = Scale(low=0.0, high=max(value or 0.0 for _, value in shown), start=LABEL_WIDTH, end=width - 70)
    body = [captions(figure.y.words, figure.x.words, width, height, LABEL_WIDTH)]
    for number, (label, value) in enumerate(shown):
        middle = TOP + 24 * number + 14
        body.append(text(LABEL_WIDTH - 8, middle + 4, label if len(label) < 22 else label[:20] + "..", "t", "e"))
        length = at(max(1.0, x(value or 0.0) - LABEL_WIDTH))
        path = f"M{LABEL_WIDTH} {at(middle - 8)}h{length}v16h-{length}Z"
        body.append(f'<path class="br s{figure.series[0].tone}" d="{path}"/>')
        body.append(text(x(value or 0.0) + 6, middle + 4, f"{value or 0.0:,.0f}", "t"))
    return Drawing(svg=frame(figure, "".join(body), width, height))
