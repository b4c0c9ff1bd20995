"""Makes a failing seed smaller: fewer faults, fewer crashes, a shorter window, a smaller run, while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from consumers.trainer.replay import ReplayRules
from tests.sim.faults import Fault
from tests.sim.plan import Plan
from tests.sim.verdict import judged

_SIMPLE: dict[str, tuple[object, ...]] = {
    "crash_probability": (0.0,), "crashable": (("trainer",), ("coordinator",), ("g",)), "generators": (1,),
    "versions": (1, 2, 3), "faults_until_s": (2.0, 4.0, 8.0), "groups_per_step": (1,), "skew_s": (0.0,),
    "lag_share": (0.0,), "slow_share": (0.0,), "straggler_share": (0.0,), "replay": (ReplayRules(),),
    "filter_zero_variance": (False,), "state_every": (1,), "mode": ("barrier",), "in_flight": ("finish",),
    "order": ("issue",), "hold_for_in_flight": (False,), "keep": ("all",), "batching": ("group",),
    "then_branch_from": (None,), "poison_prompt": (None,), "evaluate": (False,), "hard_max_lag": (None,),
    "pin_version": (None,),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The smallest failing run that was found."""

    plan: Plan
    faults: tuple[Fault, ...]
    problem: str
    tries: int


def shrink(
    plan: Plan, faults: Sequence[Fault], problems: Sequence[str], directory: Path, *, max_tries: int = 60,
    judge: Callable[[Plan, Path, Sequence[Fault]], tuple[object, list[str]]] = judged,
) -> Shrunk:  # fmt: skip
    """Greedy: each simpler plan that fails in the same way (the same guarantee) is kept, until none is left."""
    best = Shrunk(plan=plan, faults=tuple(faults), problem=problems[0], tries=0)
    sign, tries, again = problems[0].partition(":")[0], 0, True
    while again and tries < max_tries:
        again = False
        for simpler_plan, simpler_faults in _simpler(best):
            tries += 1
            _, found = judge(simpler_plan, directory, simpler_faults)
            same = [problem for problem in found if problem.startswith(sign)]
            if same:
                best = Shrunk(plan=simpler_plan, faults=simpler_faults, problem=same[0], tries=tries)
                again = True
                break
            if tries >= max_tries:
                break
    return replace(best, tries=tries)


def _simpler(best: Shrunk) -> Iterator[tuple[Plan, tuple[Fault, ...]]]:
    for left_out in range(len(best.faults)):
        yield best.plan, best.faults[:left_out] + best.faults[left_out + 1 :]
    for name, values in _SIMPLE.items():
        now = getattr(best.plan, name)
        for value in values:
            if value != now and not (isinstance(value, (int, float)) and isinstance(now, (int, float)) and value > now):
                # A branch needs its version, a window its faults: what makes no sense simply does not fail.
                yield replace(best.plan, **{name: value}), best.faults
            if value == now:
                break


def differences(plan: Plan, original: Plan) -> dict[str, object]:
    """Settings of the plan that are not the seed's own."""
    names = [item.name for item in fields(Plan)]
    return {name: getattr(plan, name) for name in names if getattr(plan, name) != getattr(original, name)}
