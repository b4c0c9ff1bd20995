"""The x axis of most plots: training steps by the version they made, in at most MAX_POINTS equal parts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from consumers.offline.report.bins import MAX_POINTS, largest, mean, parts, smallest, tidy
from consumers.offline.report.figure import Axis, Curves, Number, Series, Width
from consumers.offline.report.ledger_reading import LedgerReading

VERSION = Axis(label="policy version", unit="")
LINES = tuple[tuple[float, str], ...]


class Steps:
    """The steps of a run as places on an axis."""

    def __init__(self, ledger: LedgerReading, most: int = MAX_POINTS) -> None:
        self.ledger = ledger
        self.parts = parts(len(ledger.versions), most)
        self.places = [mean([float(ledger.versions[i]) for i in part]) or 0.0 for part in self.parts]
        self.labels = [version_label(ledger.versions[part[0]], ledger.versions[part[-1]]) for part in self.parts]

    @property
    def note(self) -> str:
        """What a point stands for, where it is not one version."""
        size = len(self.parts[0]) if self.parts else 1
        return "" if size == 1 else f" Each point stands for {size} versions."

    def values(self, name: str) -> list[Number]:
        """A metric at each place: the mean of its steps; of a largest the largest, of a smallest the smallest."""
        column = self.ledger.column(name)
        take = largest if name.endswith("/max") else smallest if name.endswith("/min") else mean
        return self.each(lambda indexes: take([column[i] for i in indexes]))

    def each(self, take: Callable[[range], Number]) -> list[Number]:
        """A value at each place."""
        return [tidy(take(part)) for part in self.parts]

    def line(self, title: str, name: str, tone: int = 0) -> Series:
        """One metric as a line."""
        return Series(name=title, values=self.values(name), tone=tone)

    def band(self, title: str, lower: str, upper: str, tone: int = 0) -> Series:
        """What lies between two metrics."""
        return Series(name=title, values=self.values(upper), lower=self.values(lower), kind="band", tone=tone)

    def curves(
        self,
        id_: str,
        title: str,
        note: str,
        y: Axis,
        series: Sequence[Series],
        *,
        width: Width = "half",
        zero: bool = False,
        top: float | None = None,
        lines: LINES = (),
        empty: str = "no training step has told it yet",
    ) -> Curves:
        """A plot of values by version."""
        return Curves(
            id=id_, title=title, note=note + self.note, width=width, x=VERSION, y=y, places=self.places,
            labels=self.labels, series=series, zero=zero, top=top, lines=lines, empty=empty,
        )  # fmt: skip


def version_label(first: int, last: int) -> str:
    """A version, or a range of them."""
    return f"version {first}" if first == last else f"versions {first}-{last}"
