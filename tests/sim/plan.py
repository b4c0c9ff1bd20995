"""One simulated run as a value: what is configured, and how hard it is hit. A seed draws one (`plan_of`)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from consumers.trainer.branching import BranchWish
from consumers.trainer.replay import ReplayRules

EVERYBODY = ("trainer", "coordinator", "g", "evaluator")
_OVERLAP_SHARE = 0.4
_EVALUATE_SHARE = 0.5
_WEIGHS_SHARE = 0.25
_LATE_SHARE = 0.7
_PINS_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One simulated run."""

    seed: int
    versions: int = 6
    groups_per_step: int = 2
    group_size: int = 3
    max_lag: int = 2
    run_ahead: int = 1
    generators: int = 2
    crash_probability: float = 0.0
    """of each port call, before and after, while faults are on"""
    crashable: tuple[str, ...] = EVERYBODY
    """process name prefixes that may die"""
    faults_until_s: float = 30.0
    limit_s: float = 400.0
    """virtual seconds; a run that is not over by then has hung"""
    restart_s: tuple[float, float] = (0.2, 3.0)
    group_timeout_s: float = 12.0
    max_attempts: int = 3
    replay: ReplayRules = field(default_factory=ReplayRules)
    filter_zero_variance: bool = False
    state_every: int = 1
    branch: BranchWish | None = None
    then_branch_from: int | None = None
    """once the run has ended, go on from this version"""
    mode: Literal["barrier", "rolling"] = "barrier"
    in_flight: Literal["finish", "keep"] = "finish"
    order: Literal["issue", "ready"] = "issue"
    hold_for_in_flight: bool = False
    """stale.action = wait"""
    hard_max_lag: int | None = None
    """stale.action = down_weight up to this lag; None: what is above max_lag is dropped"""
    stale_decay: float = 1.0
    keep: int | Literal["all"] = "all"
    """versions whose weights are kept"""
    batching: Literal["group", "mixed"] = "group"
    """one group after the other, or all that run together"""
    polls_per_group: int = 2
    groups_in_flight: int = 4
    straggler_share: float = 0.0
    """of the groups take very long"""
    slow_share: float = 0.0
    """of the calls on a worker's executor (fetch, load, probe) take up to 4 s"""
    lag_share: float = 0.0
    """of the polls of a reader that bring less than what is there"""
    stall_s: float = 3.0
    """what a reader gets of a topic may also stand still for up to that long"""
    die_at: str = ""
    """only places that hold these words, where a place to die is chosen"""
    skew_s: float = 0.0
    """wall clocks of two processes differ by up to twice that, and some jump"""
    poison_prompt: int | None = None
    """index of a prompt that kills every worker that generates it"""
    prompts: int = 7
    drain_timeout_s: float = 2.0
    overlap: bool = False
    """versions are published while the next step computes"""
    prefix_cache: bool = False
    """engines keep keys and values of prompts beyond a request"""
    evaluate: bool = False
    """an evaluator runs beside"""
    pin_version: int | None = None
    """a person pins this version as soon as it is published"""
    turns: int = 1
    """of an episode; above 1 an environment answers in between, after a while"""

    @property
    def largest_lag(self) -> int:
        """Policy lag above which nothing is trained."""
        return self.max_lag if self.hard_max_lag is None else self.hard_max_lag

    @property
    def barrier(self) -> bool:
        """A token counts only once its version is live."""
        return self.mode == "barrier"


def plan_of(seed: int, crash_probability: float | None = None) -> Plan:
    """The plan of a seed: short runs, so that many are affordable, and every setting that changes the protocol."""
    rng = random.Random(f"plan/{seed}")
    max_lag, run_ahead = rng.choice(((0, 0), (1, 1), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2)))
    crashable = rng.choice((EVERYBODY, EVERYBODY, ("trainer",), ("coordinator",), ("g",)))
    crash = rng.choice((0.002, 0.005, 0.01, 0.02, 0.04)) if crash_probability is None else crash_probability
    plan = Plan(
        seed=seed,
        versions=rng.choice((3, 4, 4, 5, 7)),
        groups_per_step=rng.choice((1, 2, 2, 3)),
        group_size=rng.choice((2, 2, 3)),
        crash_probability=crash,
        crashable=crashable,
        faults_until_s=12.0,
        limit_s=300.0,
        max_lag=max_lag,
        run_ahead=run_ahead,
        generators=rng.choice((1, 2, 2, 3)),
        replay=rng.choice((ReplayRules(), ReplayRules(), ReplayRules(steps=2, groups_per_step=1, max_use=2))),
        filter_zero_variance=rng.random() < 0.25,
        state_every=rng.choice((1, 1, 1, 2, 3)),
        mode=rng.choice(("barrier", "barrier", "rolling")),
        in_flight=rng.choice(("finish", "finish", "keep")),
        order=rng.choice(("issue", "issue", "ready")),
        hold_for_in_flight=rng.random() < 0.15,
        keep=rng.choice(("all", "all", max_lag + 2)),
        batching=rng.choice(("group", "mixed")),
        polls_per_group=rng.choice((1, 2, 2, 4)),
        groups_in_flight=rng.choice((1, 2, 4, 4)),
        straggler_share=rng.choice((0.0, 0.0, 0.05, 0.2)),
        slow_share=rng.choice((0.0, 0.0, 0.3)),
        lag_share=rng.choice((0.0, 0.1, 0.4)),
        skew_s=rng.choice((0.0, 5.0, 3600.0)),
    )
    if rng.random() < 0.08:
        plan = replace(plan, poison_prompt=rng.randrange(plan.prompts))
    if rng.random() < 0.06:
        plan = replace(plan, then_branch_from=rng.randrange(plan.versions))
    overlap = random.Random(f"overlap/{seed}").random() < _OVERLAP_SHARE
    evaluate = random.Random(f"evaluate/{seed}").random() < _EVALUATE_SHARE
    plan = replace(plan, prefix_cache=rng.random() < 0.5, overlap=overlap, evaluate=evaluate)
    return _pinning(_weighing(plan))


# What came later draws from streams of its own, so that the other seeds keep their plans.
def _weighing(plan: Plan) -> Plan:
    """stale.action = down_weight, in some of those that do not hold the step; mostly where groups come late enough."""
    rng = random.Random(f"down_weight/{plan.seed}")
    if plan.hold_for_in_flight or rng.random() >= _WEIGHS_SHARE:
        return plan
    if rng.random() < _LATE_SHARE:
        plan = replace(
            plan, max_lag=1, run_ahead=1, order="ready", batching="mixed", versions=7,
            straggler_share=rng.choice((0.2, 0.4)), generators=max(plan.generators, 2),
        )  # fmt: skip
    hard_max_lag = plan.max_lag + rng.choice((1, 2, 4))
    keep = "all" if plan.keep == "all" else hard_max_lag + 2
    return replace(plan, hard_max_lag=hard_max_lag, stale_decay=rng.choice((0.5, 0.25)), keep=keep)


def _pinning(plan: Plan) -> Plan:
    """Somebody pins a version, in some of those that retire any."""
    rng = random.Random(f"pin/{plan.seed}")
    if plan.keep == "all" or rng.random() >= _PINS_SHARE:
        return plan
    return replace(plan, pin_version=rng.randrange(plan.versions))
