"""A page of values as one HTML text: nothing in it is loaded from elsewhere, no text of the run is markup.

The content policy allows the one script by its hash and no connection at all; all words pass `escape`, the numbers
of the plots travel as JSON with < > & escaped, and the script makes text nodes only.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from consumers.offline.report.bins import tidy
from consumers.offline.report.draw import Drawing, bars, curves
from consumers.offline.report.draw_more import heat, lanes, lives, ranges, tree
from consumers.offline.report.figure import (
    Bars,
    Curves,
    Figure,
    Heat,
    Lanes,
    Lives,
    Number,
    Page,
    Quote,
    Ranges,
    Section,
    Series,
    Table,
    Tile,
    Tree,
)

_HERE = Path(__file__).parent


def render(page: Page) -> str:
    """The whole file."""
    style, script = _asset("report.css"), _asset("report.js")
    drawings = {figure.id: _draw(figure) for figure in page.figures() if figure.has_data}
    pool = _Pool()
    figures = [_data(figure, drawings[figure.id], pool) for figure in page.figures() if figure.has_data]
    data = {"lists": pool.lists, "figures": figures}
    body = "\n".join(
        [
            _head(page),
            *[f'<p class="notice">{escape(notice)}</p>' for notice in page.notices],
            f'<div class="tiles">{"".join(map(_tile, page.tiles))}</div>',
            f'<dl class="facts">{"".join(_fact(*fact) for fact in page.facts)}</dl>',
            *[_section(section, drawings) for section in page.sections],
            f"<footer>{escape(page.foot)}</footer>",
        ]
    )
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en">\n<head>\n<meta charset="utf-8">\n{_policy(script)}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(page.run)}: driftlog report</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main>\n{body}\n</main>\n<div id="tip" role="status" hidden></div>\n'
        f'<script type="application/json" id="data">{as_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element.

    >>> as_json("</script>&")
    '"\\\\u003c/script\\\\u003e\\\\u0026"'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@functools.cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="ascii")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


# ---------------------------------------------------------------------- words


def _head(page: Page) -> str:
    links = "".join(f'<a href="#{escape(s.id, quote=True)}">{escape(s.title)}</a>' for s in page.sections)
    state = escape(page.state)
    return (
        f'<header><h1>{escape(page.run)} <span class="state {state.replace(" ", "-")}">{state}</span></h1>'
        f"<p>{escape(page.line)}</p></header>\n<nav>{links}</nav>"
    )


def _tile(tile: Tile) -> str:
    bad = " bad" if tile.is_bad else ""
    return (
        f'<div class="tile{bad}"><h2>{escape(tile.question)}</h2><b>{escape(tile.answer)}</b>'
        f"<p>{escape(tile.detail)}</p></div>"
    )


def _fact(name: str, value: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def _section(section: Section, drawings: dict[str, Drawing]) -> str:
    parts = [
        _figure(part, drawings.get(part.id)) if isinstance(part, Figure) else _table(part) for part in section.parts
    ]
    quotes = f'<div class="quotes">{"".join(map(_quote, section.quotes))}</div>' if section.quotes else ""
    grid = f'<div class="grid">{"".join(parts)}</div>' if parts else ""
    return (
        f'<section id="{escape(section.id, quote=True)}"><h2>{escape(section.title)}</h2>'
        f'<p class="lead">{escape(section.lead)}</p>{grid}{quotes}</section>'
    )


def _quote(quote: Quote) -> str:
    prompt = f'<span class="prompt">{escape(quote.prompt)}</span>' if quote.prompt else ""
    return f"<figure><figcaption>{escape(quote.head)}</figcaption><pre>{prompt}{escape(quote.text)}</pre></figure>"


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        marks = [' class="n"' if index in table.numeric else "" for index in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks, strict=True)) + "</tr>"

    head = f"<thead>{row(table.head, 'th')}</thead>" if any(table.head) else ""
    body = "".join(row(cells, "td") for cells in table.rows) or '<tr><td class="none">none</td></tr>'
    content = f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    if table.is_folded:
        inside = f"<details><summary>{escape(table.title)}</summary>{note}{content}</details>"
    else:
        inside = f"<h3>{escape(table.title)}</h3>{note}{content}"
    return f'<div class="card {table.width}">{inside}</div>'


# ---------------------------------------------------------------------- figures


def _figure(figure: Figure, drawing: Drawing | None) -> str:
    head = f'<h3>{escape(figure.title)}</h3><p class="note">{escape(figure.note)}</p>'
    id_ = escape(figure.id, quote=True)
    if drawing is None:
        none = f'<p class="none">{escape(figure.empty)}</p>'
        return f'<div class="card {figure.width} empty" id="f-{id_}">{head}{none}</div>'
    numbers = '<details class="numbers"><summary>Numbers</summary></details>'
    return f'<div class="card {figure.width}" id="f-{id_}">{head}{_legend(figure)}{drawing.svg}{numbers}</div>'


def _legend(figure: Figure) -> str:
    """Of several series; one alone is named by the axis."""
    if isinstance(figure, Lanes):
        states = dict.fromkeys(state for lane in figure.lanes for state in lane.shares)
        entries = [_state(state) for state in states]
    elif isinstance(figure, Lives):
        entries = [_state(state) for state in dict.fromkeys(state for row in figure.rows for state in row.spans)]
        entries += [f"<li>{_tick(i % 2 + 1)}proof of {escape(who)}</li>" for i, who in enumerate(figure.marks)]
    elif isinstance(figure, Curves | Bars) and len(figure.shown) > 1:
        entries = [f"<li>{_key(figure, series)}{escape(series.name)}</li>" for series in figure.shown]
    else:
        return ""
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _state(name: str) -> str:
    return f'<li><i class="key l-{name.replace(" ", "-")}"></i>{name}</li>'


def _tick(tone: int) -> str:
    return f'<svg class="key" viewBox="0 0 20 10" aria-hidden="true"><path class="mk s{tone}" d="M10 0V10"/></svg>'


def _key(figure: Curves | Bars, series: Series) -> str:
    tone = f"s{series.tone % 6}"
    kind = "stack" if isinstance(figure, Bars) else series.kind
    mark = {
        "line": f'<path class="ln {tone}" d="M0 5H20"/>',
        "step": f'<path class="ln {tone}" d="M0 5H20"/>',
        "band": f'<path class="bd {tone}" d="M0 0H20V10H0Z"/>',
        "stack": f'<path class="ar {tone}" d="M5 0H15V10H5Z"/>',
        "points": f'<circle class="pt {tone}" cx="10" cy="5" r="3"/>',
        "marks": f'<path class="mk {tone}" d="M6.5 1.5l7 7m0 -7l-7 7"/>',
    }[kind]
    # A band inside another is seen through both.
    inner = series.kind == "band" and [one for one in figure.shown if one.kind == "band"].index(series) > 0
    return f'<svg class="key" viewBox="0 0 20 10" aria-hidden="true">{mark * (1 + inner)}</svg>'


def _draw(figure: Figure) -> Drawing:
    if isinstance(figure, Curves):
        return curves(figure)
    if isinstance(figure, Bars):
        return bars(figure)
    if isinstance(figure, Heat):
        return heat(figure)
    if isinstance(figure, Lanes):
        return lanes(figure)
    if isinstance(figure, Lives):
        return lives(figure)
    if isinstance(figure, Ranges):
        return ranges(figure)
    assert isinstance(figure, Tree), f"no drawing for {type(figure).__name__}"
    return tree(figure)


class _Pool:
    """Lists that many figures share, each once: labels of versions are half of the numbers otherwise."""

    def __init__(self) -> None:
        self.lists: list[list[Any]] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def index(self, values: Sequence[Any]) -> int:
        """Where this list is."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = len(self.lists)
            self.lists.append(list(values))
        return self._known[key]


def _data(figure: Figure, drawing: Drawing, pool: _Pool) -> dict[str, Any]:
    """What the script needs: labels of the places and where they stand (by their index in the pool), series."""
    labels, head, series = _columns(figure)
    return {
        "id": figure.id,
        "title": figure.title,
        "head": head,
        "labels": pool.index(labels),
        "xs": pool.index([round(x, 1) for x in drawing.xs]),
        "series": [{"name": name, "values": list(values)} for name, values in series],
    }


def _columns(figure: Figure) -> tuple[Sequence[str], str, list[tuple[str, Sequence[Number]]]]:
    if isinstance(figure, Lanes):
        width = figure.lanes[0].bin_width
        bins = max(len(shares) for lane in figure.lanes for shares in lane.shares.values())
        found = [
            (f"{lane.name} {state}", [round(share, 3) for share in shares])
            for lane in figure.lanes
            for state, shares in lane.shares.items()
        ]
        return [f"{i * width:.4g} {figure.x.unit}" for i in range(bins)], figure.x.words, list(found)
    if isinstance(figure, Lives):
        states = dict.fromkeys(state for row in figure.rows for state in row.spans)
        starts = [(f"{s} from", [tidy(r.spans[s][0]) if s in r.spans else None for r in figure.rows]) for s in states]
        proofs = [(f"proof of {who}", [tidy(row.marks.get(who)) for row in figure.rows]) for who in figure.marks]
        failed = [("failed at", [tidy(row.failed_at) for row in figure.rows])]
        return [f"version {row.name}" for row in figure.rows], figure.x.words, [*starts, *proofs, *failed]
    if isinstance(figure, Tree):
        branches = figure.branches
        return (
            [f"{b.first}-{b.last}" for b in branches],
            "versions",
            [
                ("from version", [b.from_version for b in branches]),
                ("first depth", [b.first_depth for b in branches]),
                ("last depth", [b.last_depth for b in branches]),
            ],
        )
    assert isinstance(figure, Curves | Bars | Heat | Ranges)
    series = figure.rows if isinstance(figure, Heat) else figure.series if isinstance(figure, Ranges) else figure.shown
    columns: list[tuple[str, Sequence[Number]]] = []
    for one in series:
        if one.lower:
            columns.append((f"{one.name}, lower", one.lower))
            columns.append((f"{one.name}, upper", one.values))
        else:
            columns.append((one.name, one.values))
    return figure.labels, figure.x.words, columns
