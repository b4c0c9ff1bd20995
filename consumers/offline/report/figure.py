"""What a page is made of, as values: figures with series, tables, sections. How they are drawn is not known here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Number = float | None
"""None: there is no value"""
Width = Literal["full", "half", "third"]
Kind = Literal["line", "step", "points", "marks", "band", "stack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What runs along one side of a plot."""

    label: str
    unit: str

    @property
    def words(self) -> str:
        """Label and unit as they stand at the axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One thing that is plotted; `values` has one entry a place on the x axis."""

    name: str
    values: Sequence[Number]
    kind: Kind = "line"
    tone: int = 0
    """0 ... 5: a colour, together with a dash pattern for lines"""
    lower: Sequence[Number] = ()
    """band: its lower edge, `values` being the upper one"""

    @property
    def has_data(self) -> bool:
        """Some value is there."""
        return any(value is not None for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One plot. Without data it is shown with the words of `empty` in its place."""

    id: str
    title: str
    note: str
    """one line: what it says, or how to read it"""
    width: Width = "half"
    empty: str = "the log has no such values"

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves(Figure):
    """Series over numbers: versions or seconds."""

    x: Axis
    y: Axis
    places: Sequence[float]
    """ascending"""
    labels: Sequence[str]
    """of the places, as a person says them"""
    series: Sequence[Series]
    zero: bool = False
    """the y axis begins at 0"""
    top: float | None = None
    """the y axis reaches at least to there"""
    lines: Sequence[tuple[float, str]] = ()
    """values with a name that are drawn across"""

    @property
    def shown(self) -> list[Series]:
        """Series that have data."""
        return [series for series in self.series if series.has_data]

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        return bool(self.places) and bool(self.shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Figure):
    """Series over named places or bins, beside each other."""

    x: Axis
    y: Axis
    labels: Sequence[str]
    series: Sequence[Series]
    bin_width: float | None = None
    """the places are equal bins of a number, from 0; None: they are names"""
    lies: bool = False
    """bars lie beside their names, which may be long; one series"""

    @property
    def shown(self) -> list[Series]:
        """Series that have data."""
        return [series for series in self.series if series.has_data]

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        return any(value for series in self.series for value in series.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(Figure):
    """Rows with a middle and an upper value each: p50 and p95 of something."""

    x: Axis
    labels: Sequence[str]
    series: Sequence[Series]
    """exactly two: middle and upper"""

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        return bool(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat(Figure):
    """Counts by column and row."""

    x: Axis
    y: Axis
    labels: Sequence[str]
    """of the columns"""
    rows: Sequence[Series]
    """the first one lowest"""

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        return any(value for row in self.rows for value in row.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes(Figure):
    """For each lane shares of a stretch of time, stacked; all lanes have the same x axis."""

    x: Axis
    end: float
    """where the x axis ends"""
    lanes: Sequence[Lane]

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        return any(lane.shares for lane in self.lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One of them."""

    name: str
    bin_width: float
    shares: Mapping[str, Sequence[float]]
    """state -> share of each bin, in the order of stacking"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives(Figure):
    """Versions as rows: what state each was in from when to when."""

    x: Axis
    start: float
    end: float
    rows: Sequence[Life]
    marks: Sequence[str]
    """who may have set one"""

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        return bool(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One of them; times on the x axis."""

    name: str
    spans: Mapping[str, tuple[float, float]]
    """state -> from, to"""
    marks: Mapping[str, float]
    """who -> when"""
    failed_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree(Figure):
    """Branches of a run: each a stretch of versions at its depth."""

    x: Axis
    branches: Sequence[Branch]

    @property
    def has_data(self) -> bool:
        """There is something to draw."""
        return bool(self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An unbroken stretch of versions, parent to child."""

    first: int
    last: int
    first_depth: int
    last_depth: int
    from_version: int | None
    """None: the trunk"""
    from_branch: int | None
    """index of the branch that version is on"""
    is_current: bool
    """the newest version is on it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of words and numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    width: Width = "full"
    is_folded: bool = False
    numeric: Sequence[int] = ()
    """columns that are set as numbers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A text of the run, to be read."""

    head: str
    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with what stands under it."""

    id: str
    title: str
    lead: str
    parts: Sequence[Figure | Table] = ()
    quotes: Sequence[Quote] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One of the numbers on top."""

    question: str
    answer: str
    detail: str
    is_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole report."""

    run: str
    state: str
    """ended, running, not started"""
    line: str
    """what it is, in one line under the name"""
    foot: str
    tiles: Sequence[Tile]
    facts: Sequence[tuple[str, str]]
    notices: Sequence[str] = field(default=())
    """what a reader must know before reading on"""
    sections: Sequence[Section] = ()

    def figures(self) -> list[Figure]:
        """All of them, in order."""
        return [part for section in self.sections for part in section.parts if isinstance(part, Figure)]
