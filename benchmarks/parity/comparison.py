"""One option, both sides, all batches and dtypes: the largest differences, and what they are called.

Guarantees that no difference passes in silence: above TOLERANCE an option needs a name that docs/objectives.md
explains and a second option that shows no difference once the cause is taken away; a name without a difference fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.parity.batches import Batch, Variant, same

TOLERANCE = 1e-5
DTYPES = {"float64": torch.float64, "float32": torch.float32}
EQUAL, UNEXPLAINED = "equal", "UNEXPLAINED"
NOT_NEEDED, NOT_EXERCISED = "NAME WITHOUT DIFFERENCE", "NOT EXERCISED"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What one side made of a batch."""

    value: Tensor
    gradient: Tensor | None = None
    """by every log-probability (and entropy, or hidden state); None where the option has none"""


Side = Callable[[Batch], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One option that both have."""

    option: str
    oracle: str
    ours: Side
    theirs: Side
    plain: Side | None = None
    """our side with the option switched off: it must differ somewhere, or the batches do not exercise the option"""
    variant: Variant = same
    explained: str = ""
    """name of the expected difference, a heading of docs/objectives.md"""
    proof: str = ""
    """option that is equal because the cause of this difference is taken away there"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The table's row for a case."""

    option: str
    oracle: str
    values: dict[str, float]
    """largest difference of the values by dtype, see difference"""
    gradients: dict[str, float]
    """likewise; empty where the option has no gradient"""
    verdict: str

    @property
    def failed(self) -> bool:
        """Whether the command has to exit 1."""
        return not (self.verdict == EQUAL or self.verdict.startswith("explained"))


def difference(ours: Tensor, theirs: Tensor, *, unit: float) -> float:
    """Largest difference, as a share of the largest element of theirs where that is above unit, else of unit.

    NaN on one side only is infinite.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes differ: ours {list(ours.shape)}, theirs {list(theirs.shape)}")
    ours, theirs = ours.detach().double(), theirs.detach().double()
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    ours, theirs = ours.nan_to_num(0.0), theirs.nan_to_num(0.0)
    return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), unit)


def compare(case: Case, batches: Iterable[Batch]) -> Row:
    """Run a case on every batch in every dtype."""
    values, gradients = dict.fromkeys(DTYPES, 0.0), dict.fromkeys(DTYPES, 0.0)
    has_gradient, exercised = False, case.plain is None
    for batch in batches:
        for name, dtype in DTYPES.items():
            cast = case.variant(batch.to(dtype))
            ours, theirs = case.ours(cast), case.theirs(cast)
            value, gradient = _differences(ours, theirs)
            values[name] = max(values[name], value)
            if gradient is not None:
                has_gradient = True
                gradients[name] = max(gradients[name], gradient)
            if case.plain is not None:
                value, gradient = _differences(ours, case.plain(cast))
                exercised = exercised or max(value, gradient or 0.0) > TOLERANCE
    largest = max(*values.values(), *gradients.values())
    return Row(
        option=case.option,
        oracle=case.oracle,
        values=values,
        gradients=gradients if has_gradient else {},
        verdict=_verdict(case, largest) if exercised else NOT_EXERCISED,
    )


def _differences(ours: Outcome, theirs: Outcome) -> tuple[float, float | None]:
    """Of the values and of the gradients.

    Values are held to 1 or their own size: a loss may well cancel to nearly 0. A gradient is about 1 / tokens in size,
    so it is held to its largest element.
    """
    value = difference(ours.value, theirs.value, unit=1.0)
    if ours.gradient is None or theirs.gradient is None:
        return value, None
    return value, difference(ours.gradient, theirs.gradient, unit=1e-6)


def unproved(cases: Sequence[Case], rows: Sequence[Row]) -> list[str]:
    """Explained options whose proof is missing or not equal itself."""
    equal = {(row.oracle, row.option) for row in rows if row.verdict == EQUAL}
    return [
        f"{case.option} ({case.oracle}): its proof '{case.proof}' is not an equal row"
        for case in cases
        if case.explained and (case.oracle, case.proof) not in equal
    ]


def unnamed(cases: Sequence[Case], document: str) -> list[str]:
    """Names that the document does not explain."""
    return sorted({case.explained for case in cases if case.explained and f"**{case.explained}**" not in document})


def _verdict(case: Case, largest: float) -> str:
    if largest <= TOLERANCE:
        return NOT_NEEDED if case.explained else EQUAL
    return f"explained: {case.explained}" if case.explained else UNEXPLAINED
