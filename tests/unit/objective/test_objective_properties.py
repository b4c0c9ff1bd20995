"""What must hold for every batch: shifts, orders, padding, cuts, and agreement with the slow loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.objective import (
    AdvantageEstimator,
    Aggregation,
    CorrectionKind,
    KlEstimator,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    RatioLevel,
    RejectionDenominator,
    StdKind,
    group_advantages,
    preset,
    step_metrics,
)
from tests.unit.objective import slow_oracle
from tests.unit.objective.fixture_f import Batch, run_step

FEW = settings(max_examples=40, deadline=None)
GARBAGE = [math.nan, math.inf, -math.inf, 1e30, 0.0]
REWARDS = st.lists(st.floats(-5, 5, allow_nan=False).map(lambda r: round(r, 3)), min_size=2, max_size=8)


def rows_of(rng: random.Random, mask: list[list[bool]]) -> list[list[float]]:
    return [[rng.uniform(-3.0, -0.05) if on else rng.choice(GARBAGE) for on in row] for row in mask]


@st.composite
def cases(draw: st.DrawFn) -> tuple[slow_oracle.Case, list[list[float]], ObjectiveSettings]:
    """A random batch with garbage outside the mask, random settings, in words and as a value."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    width = draw(st.integers(1, 5))
    mask = [[rng.random() < 0.75 for _ in range(width)] for _ in range(draw(st.integers(1, 4)))]
    objective, denominator = draw(st.sampled_from(list(Objective))), draw(st.sampled_from(list(RatioDenominator)))
    level, correction = draw(st.sampled_from(list(RatioLevel))), draw(st.sampled_from(list(CorrectionKind)))
    aggregation, after = draw(st.sampled_from(list(Aggregation))), draw(st.sampled_from(list(RejectionDenominator)))
    dual, delta = draw(st.sampled_from([None, 1.5, 3.0])), draw(st.sampled_from([None, 1.7]))
    estimator, beta = draw(st.sampled_from([KlEstimator.K2, KlEstimator.K3])), draw(st.sampled_from([0.0, 0.1]))
    case = slow_oracle.Case(
        prox=rows_of(rng, mask),
        beh=rows_of(rng, mask),
        ref=rows_of(rng, mask),
        mask=mask,
        adv=[rng.uniform(-2, 2) for _ in mask],
        u=[rng.choice([1.0, 0.5]) for _ in mask],
        objective=str(objective),
        den=str(denominator),
        level=str(level),
        dual=dual,
        delta=delta,
        cap=1.3,
        correction=str(correction),
        after=str(after),
        agg=str(aggregation),
        beta=beta,
        kl=str(estimator),
    )
    ours = ObjectiveSettings(
        objective=objective,
        denominator=denominator,
        level=level,
        dual_clip=dual,
        two_sided_delta=delta,
        cispo_cap=1.3,
        correction=correction,
        denominator_after_rejection=after,
        aggregation=aggregation,
        constant_length=8,
        kl_coefficient=beta,
        kl_estimator=estimator,
    )
    return case, rows_of(rng, mask), ours


def batch_of(case: slow_oracle.Case, theta: list[list[float]], dtype: torch.dtype = torch.float64) -> Batch:
    return Batch(
        theta=torch.tensor(theta, dtype=dtype),
        proximal=torch.tensor(case.prox, dtype=dtype),
        behaviour=torch.tensor(case.beh, dtype=dtype),
        reference=torch.tensor(case.ref, dtype=dtype),
        mask=torch.tensor(case.mask),
        advantages=torch.tensor(case.adv, dtype=dtype),
        row_weights=torch.tensor(case.u, dtype=dtype),
        policy_lag=torch.zeros(len(case.mask), dtype=torch.int64),
    )


@FEW
@given(cases())
def test_any_batch_and_any_settings_agree_with_the_slow_loops(drawn: tuple) -> None:
    case, theta, ours = drawn

    result = run_step(batch_of(case, theta), ours)

    assert result.loss == pytest.approx(slow_oracle.loss(theta, case), rel=1e-9, abs=1e-9)
    assert torch.all(result.gradient[~torch.tensor(case.mask)] == 0.0)


@FEW
@given(cases(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_cut_gives_the_same_loss_gradient_and_metrics(drawn: tuple, parts: int, rng: random.Random) -> None:
    """C25, in float32."""
    case, theta, ours = drawn
    batch = batch_of(case, theta, torch.float32)
    rows = list(range(len(case.mask)))
    rng.shuffle(rows)
    cut = [rows[start::parts] for start in range(parts)]

    whole, split = run_step(batch, ours), run_step(batch, ours, cut=cut)

    assert split.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=1e-5, atol=1e-6)
    assert step_metrics(split.tally, ours) == pytest.approx(step_metrics(whole.tally, ours), rel=1e-5, abs=1e-5)


@FEW
@given(cases(), st.integers(1, 6), st.booleans(), st.sampled_from(GARBAGE))
def test_any_padding_on_either_side_changes_nothing(drawn: tuple, width: int, left: bool, value: float) -> None:
    """C24, C35."""
    case, theta, ours = drawn

    def widen(rows: list, filler: object) -> list:
        return [([filler] * width + row) if left else (row + [filler] * width) for row in rows]

    wide = slow_oracle.change(
        case,
        prox=widen(case.prox, value),
        beh=widen(case.beh, value),
        ref=widen(case.ref, value),
        mask=widen(case.mask, False),
    )

    plain, padded = run_step(batch_of(case, theta), ours), run_step(batch_of(wide, widen(theta, value)), ours)

    assert padded.loss == pytest.approx(plain.loss, rel=1e-12, abs=1e-12)
    real = padded.gradient[:, width:] if left else padded.gradient[:, :-width]
    torch.testing.assert_close(real, plain.gradient)


@FEW
@given(cases(), st.sampled_from(["grpo", "dapo", "gspo", "decoupled"]))
def test_at_lag_zero_every_ratio_is_one_and_nothing_clips(drawn: tuple, name: str) -> None:
    """C30: the first step on unchanged weights is plain policy gradient, whatever the preset."""
    case, theta, _ = drawn
    same = slow_oracle.change(case, prox=theta, beh=theta, u=[1.0] * len(case.u))
    ours = preset(name)
    result = run_step(batch_of(same, theta), ours)

    metrics = step_metrics(result.tally, ours)
    if metrics["tokens"] > 0:
        assert (metrics["ratio_mean"], metrics["clipfrac"], metrics["mismatch_raw_k3"]) == (1.0, 0.0, 0.0)
    simple = ObjectiveSettings(objective=Objective.REINFORCE, aggregation=ours.aggregation)
    if ours.level is RatioLevel.TOKEN:
        torch.testing.assert_close(result.gradient, run_step(batch_of(same, theta), simple).gradient)


@FEW
@given(REWARDS, st.floats(-100, 100), st.sampled_from(list(AdvantageEstimator)), st.sampled_from(list(StdKind)))
def test_a_shift_of_all_rewards_changes_no_advantage(
    rewards: list[float], shift: float, estimator: AdvantageEstimator, kind: StdKind
) -> None:
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    before = torch.tensor(rewards, dtype=torch.float64)

    plain = group_advantages(before, groups, estimator, std_kind=kind)
    moved = group_advantages(before + shift, groups, estimator, std_kind=kind)

    if bool(plain.zero_variance_G[0]) == bool(moved.zero_variance_G[0]):
        torch.testing.assert_close(plain.advantages_N, moved.advantages_N, rtol=1e-5, atol=1e-5)


@FEW
@given(
    st.lists(REWARDS, min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from(list(AdvantageEstimator)),
    st.sampled_from(list(StdKind)),
)
def test_member_and_group_order_change_not_one_bit(
    groups: list[list[float]], rng: random.Random, estimator: AdvantageEstimator, kind: StdKind
) -> None:
    """C18, C21."""
    members = [(number, reward) for number, group in enumerate(groups) for reward in group]
    order = list(range(len(members)))
    rng.shuffle(order)

    def of(chosen: list[int]) -> torch.Tensor:
        rewards = torch.tensor([members[place][1] for place in chosen], dtype=torch.float64)
        numbers = torch.tensor([members[place][0] for place in chosen])
        return group_advantages(rewards, numbers, estimator, std_kind=kind).advantages_N

    plain, shuffled = of(list(range(len(members)))), of(order)

    assert torch.equal(shuffled, plain[order])
    expected = [value for group in slow_oracle.advantages(groups, estimator, kind) for value in group]
    assert plain.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
