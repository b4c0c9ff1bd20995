"""The formulas of docs/objectives.md as plain loops over lists, written without looking at the library.

Numbers are Python floats, rows are lists, gradients are central differences. Whatever the formulas
put behind a stop-gradient is taken from `frozen`, which does not move when theta is moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

Rows = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch and one choice of everything, in words and lists."""

    prox: Rows
    beh: Rows
    mask: list[list[bool]]
    adv: list[float]
    u: list[float]
    ref: Rows | None = None
    objective: str = "ppo_clip"
    den: str = "behaviour"
    level: str = "token"
    lo: float = 0.2
    hi: float = 0.2
    dual: float | None = None
    delta: float | None = None
    cap: float = 5.0
    floor: float = 0.0
    correction: str = "none"
    C: float = 2.0
    band: tuple[float, float] = (0.5, 2.0)
    after: str = "original"
    agg: str = "token_mean"
    L: int = 8
    beta: float = 0.0
    kl: str = "k3"


def loss(theta: Rows, case: Case, frozen: Rows | None = None) -> float:
    """The loss of the whole batch."""
    frozen = theta if frozen is None else frozen
    keep = [[keeps(case, i, t) for t in range(len(row))] for i, row in enumerate(theta)]
    counted = keep if case.after == "kept" else case.mask
    tokens = sum(sum(row) for row in counted)
    live = [i for i, row in enumerate(counted) if any(row)]
    if tokens == 0:
        return 0.0
    sums = [0.0] * len(theta)
    for i, row in enumerate(theta):
        for t in range(len(row)):
            if not keep[i][t]:
                continue
            value = token_loss(theta, frozen, case, i, t) * weight(case, i, t) * case.u[i]
            if case.beta and case.ref is not None:
                value += case.beta * kl(row[t] - case.ref[i][t], case.kl)
            sums[i] += value
    if case.agg == "token_mean":
        return sum(sums) / tokens
    if case.agg == "seq_mean_token_mean":
        return sum(sums[i] / sum(counted[i]) for i in live) / len(live)
    if case.agg == "seq_mean_token_sum":
        return sum(sums[i] for i in live) / len(live)
    if case.agg == "seq_sum_constant":
        return sum(sums) / (len(live) * case.L)
    raise AssertionError(case.agg)


def gradient(theta: Rows, case: Case, step: float = 1e-6) -> Rows:
    """Central differences at the masked tokens, 0 elsewhere."""
    result = [[0.0] * len(row) for row in theta]
    for i, row in enumerate(theta):
        for t in range(len(row)):
            if case.mask[i][t]:
                sides = []
                for sign in (1.0, -1.0):
                    moved = [list(other) for other in theta]
                    moved[i][t] += sign * step
                    sides.append(loss(moved, case, frozen=theta))
                result[i][t] = (sides[0] - sides[1]) / (2 * step)
    return result


def token_loss(theta: Rows, frozen: Rows, case: Case, i: int, t: int) -> float:
    """Section "objectives": the loss of one token, before weight, age and divergence."""
    advantage = case.adv[i]
    if case.objective == "reinforce":
        return -advantage * theta[i][t]
    if case.objective == "cispo":
        return -min(max(ratio(frozen, case, i, t), case.floor), case.cap) * advantage * theta[i][t]
    r = ratio(theta, case, i, t)
    if case.objective == "unclipped":
        return -r * advantage
    first = r if case.delta is None else min(r, case.delta)
    clipped = min(max(r, 1 - case.lo), 1 + case.hi)
    surrogate = min(first * advantage, clipped * advantage)
    if case.dual is not None and advantage < 0:
        surrogate = max(surrogate, case.dual * advantage)
    return -surrogate


def ratio(theta: Rows, case: Case, i: int, t: int) -> float:
    """Section "ratio": theta over its denominator at the level asked for."""
    below = case.beh if case.den == "behaviour" else case.prox
    differences = [theta[i][s] - below[i][s] for s in range(len(theta[i])) if case.mask[i][s]]
    if case.level == "token":
        return safe_exp(theta[i][t] - below[i][t])
    if case.level == "sequence":
        return safe_exp(sum(differences) / len(differences))
    return safe_exp(sum(differences))


def mismatch(case: Case, i: int, t: int) -> tuple[float, float, float]:
    """Section "corrections": e, g and p of a token."""
    m = [case.prox[i][s] - case.beh[i][s] for s in range(len(case.prox[i])) if case.mask[i][s]]
    e = safe_exp(case.prox[i][t] - case.beh[i][t])
    return e, safe_exp(sum(m) / len(m)), safe_exp(sum(m))


def weight(case: Case, i: int, t: int) -> float:
    """The applied weight of an accepted token."""
    e, _, p = mismatch(case, i, t)
    return {
        "none": 1.0,
        "geometric": 1.0,
        "token_mask": 1.0,
        "sequence_mask": 1.0,
        "token_tis": min(e, case.C),
        "geometric_token_tis": min(e, case.C),
        "sequence_tis": min(p, case.C),
        "icepop": e,
        "mis": p,
    }[case.correction]


def keeps(case: Case, i: int, t: int) -> bool:
    """Whether a token is in the mask and accepted."""
    if not case.mask[i][t]:
        return False
    e, g, p = mismatch(case, i, t)
    judged = {
        "icepop": e,
        "token_mask": e,
        "geometric": g,
        "geometric_token_tis": g,
        "mis": p,
        "sequence_mask": p,
    }.get(case.correction)
    return judged is None or case.band[0] <= judged <= case.band[1]


def kl(difference: float, estimator: str) -> float:
    """Section "divergence": one estimate."""
    x = min(max(difference, -10.0), 10.0)
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]


def safe_exp(x: float) -> float:
    """exp after the clamp to +-20."""
    return math.exp(min(max(x, -20.0), 20.0))


def advantages(groups: list[list[float]], estimator: str, kind: str = "sample") -> list[list[float]]:
    """Section "advantages", for usable members only."""
    everyone = [reward for group in groups for reward in group]
    result = []
    for group in groups:
        largest = max(abs(reward) for reward in group)
        if max(group) - min(group) <= 1e-6 * max(1.0, largest):
            result.append([0.0] * len(group))
            continue
        mean = sum(group) / len(group)
        values = []
        for i, reward in enumerate(group):
            others = [r for j, r in enumerate(group) if j != i]
            values.append(
                {
                    "group_mean_std": (reward - mean) / (deviation(group, kind) + 1e-4),
                    "leave_one_out": reward - sum(others) / len(others),
                    "mean_only": reward - mean,
                    "batch_std": (reward - mean) / (deviation(everyone, kind) + 1e-4),
                }[estimator]
            )
        result.append(values)
    return result


def deviation(values: list[float], kind: str) -> float:
    """Standard deviation, divisor n - 1 (sample) or n (population)."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1 if kind == "sample" else len(values)))


def change(case: Case, **changes: object) -> Case:
    """A case with some choices changed."""
    return replace(case, **changes)  # type: ignore[arg-type]
