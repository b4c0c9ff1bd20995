"""From values to places on paper: round ticks, linear scales, numbers as people write them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values that enclose low ... high, some `about` of them.

    >>> ticks(0.0, 0.93, 4)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if high <= low:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, high + abs(low) / 2)
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number at an axis.

    >>> short(1500.0), short(0.25), short(-3.0), short(2500000.0), short(0.000012)
    ('1.5k', '0.25', '-3', '2.5M', '1.2e-5')
    """
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g}{prefix}"
    text = f"{value:.4g}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def seconds(value: float) -> str:
    """A duration that may be short.

    >>> seconds(0.0748), seconds(1.5), seconds(0.00012), seconds(0.0)
    ('75 ms', '1.5 s', '0.1 ms', '0 s')
    """
    if value == 0 or value >= 0.9995:
        return f"{value:.3g} s"
    return f"{value * 1000:.0f} ms" if value >= 0.00095 else f"{value * 1000:.1f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Linear: low ... high to start ... end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value stands."""
        if self.high <= self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def thin(labels: Sequence[str], room: float, per_character: float = 6.4, gap: float = 12.0) -> int:
    """Every how many labels one can stand, where each has `room`."""
    widest = max((len(label) for label in labels), default=1) * per_character + gap
    return max(1, math.ceil(widest / room)) if room > 0 else 1


def at(value: float) -> str:
    """A coordinate; a tenth of a pixel is enough.

    >>> at(12.0), at(3.14159)
    ('12', '3.1')
    """
    text = f"{value:.1f}"
    return text.removesuffix(".0")
