"""Bounded summaries of unbounded series: histograms whose bins widen, and equal parts of a run's versions. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_POINTS = 256
"""of one curve: more than a plot of that width can show"""


class Histogram:
    """Weights by value, in bins of equal width from 0; the width doubles when a value lies beyond the last one.

    In which order values come changes nothing but the last bit of a sum. Values below 0 (two clocks disagree) count
    in the first bin and in `below_zero`.

    >>> lengths = Histogram(1, bins=4)
    >>> for length in (0, 1, 1, 5):
    ...     lengths.add(length)
    >>> lengths.width, lengths.weights
    (2, [3.0, 0.0, 1.0, 0.0])
    """

    def __init__(self, width: float, bins: int = MAX_POINTS) -> None:
        if bins < 2 or bins % 2:
            raise ValueError(f"{bins} bins: an even number is needed, or they could not be merged by two")
        self.width = width
        self.weights = [0.0] * bins
        self.below_zero = 0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count one value."""
        if value < 0:
            self.below_zero += 1
            value = 0.0
        self.reach(value)
        self.weights[int(value // self.width)] += weight

    def add_span(self, start: float, end: float) -> None:
        """Spread the length of a stretch over the bins it covers."""
        start, end = max(0.0, start), max(0.0, end)
        if end <= start:
            return
        self.reach(end)
        for index in range(int(start // self.width), int(end // self.width) + 1):
            low, high = index * self.width, (index + 1) * self.width
            self.weights[index] += max(0.0, min(end, high) - max(start, low))

    def reach(self, value: float) -> None:
        """Widen the bins until this value has one."""
        while value >= self.width * len(self.weights):
            half = len(self.weights) // 2
            merged = [self.weights[2 * i] + self.weights[2 * i + 1] for i in range(half)]
            self.weights = merged + [0.0] * half
            self.width *= 2

    @property
    def total(self) -> float:
        """All that was counted."""
        return math.fsum(self.weights)

    def filled(self) -> int:
        """Bins up to and with the last one that holds something."""
        return max((index + 1 for index, weight in enumerate(self.weights) if weight), default=0)

    def quantile(self, share: float) -> float | None:
        """The upper edge of the bin in which that share of the weight is reached; None when nothing was counted."""
        total, seen = self.total, 0.0
        for index, weight in enumerate(self.weights):
            seen += weight
            if weight and seen >= share * total:
                return (index + 1) * self.width
        return None


def parts(count: int, most: int = MAX_POINTS) -> list[range]:
    """Indexes 0 ... count - 1 in at most that many runs of equal length; a remainder of less than half of one belongs
    to the last, where alone it would look like a change.

    >>> parts(5, 2), parts(7, 3)
    ([range(0, 3), range(3, 5)], [range(0, 3), range(3, 7)])
    """
    size = max(1, math.ceil(count / most))
    found = [range(start, min(start + size, count)) for start in range(0, count, size)]
    if len(found) > 1 and 2 * len(found[-1]) < size:
        found[-2:] = [range(found[-2].start, count)]
    return found


def places(found: Sequence[range]) -> list[int]:
    """In which of the parts each index is.

    >>> places(parts(7, 3))
    [0, 0, 0, 1, 1, 1, 1]
    """
    return [place for place, part in enumerate(found) for _ in part]


def mean(values: Sequence[float]) -> float | None:
    """Of those that are numbers; None when there is none."""
    found = [value for value in values if math.isfinite(value)]
    return math.fsum(found) / len(found) if found else None


def largest(values: Sequence[float]) -> float | None:
    """Of those that are numbers."""
    return max((value for value in values if math.isfinite(value)), default=None)


def smallest(values: Sequence[float]) -> float | None:
    """Of those that are numbers."""
    return min((value for value in values if math.isfinite(value)), default=None)


def tidy(value: float | None) -> float | None:
    """Four digits are all that a page needs; nothing that JSON has no word for.

    >>> tidy(0.123456), tidy(123456.7), tidy(float("nan"))
    (0.1235, 123457.0, None)
    """
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}") if abs(value) < 10_000 else float(round(value))
