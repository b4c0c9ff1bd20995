"""Whole steps: rows P1 to P11 of the oracle table, and what a split or a rank may not change."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from consumers.objective import (
    Aggregation,
    DenominatorMismatch,
    Denominators,
    IllegalCombination,
    InvalidSetting,
    NonFinite,
    ObjectiveSettings,
    RecomputedBehaviour,
    aggregate,
    check_step,
    policy_loss,
    preset,
    scatter_to_rows,
    step_denominators,
    step_metrics,
    token_logprobs,
)
from tests.unit.objective.fixture_f import Batch, fixture_f, one_token, run_step

CUTS = [[[0], [1, 2]], [[0, 1], [2]], [[2], [0], [1]], [[1, 0, 2]]]


def with_mode(mode: Aggregation) -> ObjectiveSettings:
    return ObjectiveSettings(aggregation=mode, constant_length=8)


def test_parts_of_a_step_add_up_and_their_mean_is_wrong() -> None:
    """P1."""
    result = run_step(fixture_f(), ObjectiveSettings(), cut=[[0], [1, 2]])

    parts = [output.loss.item() for output in result.outputs]
    assert parts == pytest.approx([-0.401251, -0.083292], abs=2e-6)
    assert sum(parts) == pytest.approx(-0.484543, abs=2e-6)

    own = [run_step(fixture_f(mask=_only(rows)), ObjectiveSettings()).loss for rows in ([0], [1, 2])]
    assert sum(own) / 2 == pytest.approx(-0.601635, abs=2e-6)


def test_a_token_far_above_the_clip_is_bounded_by_dual_clip_only() -> None:
    """P4."""
    free = run_step(one_token(math.log(6), -1.0), ObjectiveSettings())
    assert (free.loss, free.gradient.item()) == pytest.approx((6.0, 6.0))

    bound = run_step(one_token(math.log(6), -1.0), ObjectiveSettings(dual_clip=3.0))
    assert (bound.loss, bound.gradient.item()) == pytest.approx((3.0, 0.0))


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(0.1, -1.0, 0.8), (1.3, 1.0, -1.2)])
def test_a_clipped_token_has_no_gradient(ratio: float, advantage: float, loss: float) -> None:
    """P5, P6."""
    result = run_step(one_token(math.log(ratio), advantage), ObjectiveSettings())

    assert result.loss == pytest.approx(loss)
    assert result.gradient.item() == 0.0


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "loss"),
    [(-1.0, None, 4.851652e8), (-1.0, 3.0, 3.0), (0.0, None, 0.0), (1.0, None, -1.2)],
)
def test_an_exponent_that_would_overflow_is_clamped_and_counted(
    advantage: float, dual_clip: float | None, loss: float
) -> None:
    """P7."""
    settings = ObjectiveSettings(dual_clip=dual_clip)

    result = run_step(one_token(95.0, advantage, torch.float32), settings)

    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.gradient.item() == 0.0
    metrics = step_metrics(result.tally, settings)
    assert metrics["log_ratio_clamped_fraction"] == 1.0
    assert metrics["log_ratio_max"] == pytest.approx(95.0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_nan_of_the_policy_is_refused_inside_the_mask_and_ignored_outside() -> None:
    """P8."""
    theta = fixture_f().theta
    theta[1, 2] = math.nan
    with pytest.raises(NonFinite) as caught:
        run_step(fixture_f(theta=theta), ObjectiveSettings())
    assert (caught.value.name, caught.value.row, caught.value.position) == ("theta", 1, 2)

    finite = {name: torch.nan_to_num(getattr(fixture_f(), name), nan=0.7) for name in ("theta", "behaviour")}
    clean = run_step(fixture_f(**finite), ObjectiveSettings())
    padded = run_step(fixture_f(), ObjectiveSettings())
    assert padded.loss == clean.loss
    assert torch.equal(padded.gradient, clean.gradient)


@pytest.mark.parametrize("mode", list(Aggregation))
def test_a_step_without_tokens_has_a_graph_and_leaves_everything_as_it_was(mode: Aggregation) -> None:
    """P9."""
    parameter = torch.nn.Parameter(torch.tensor([-0.5]))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
    _train(parameter, optimizer, with_mode(mode), mask=True)
    before = copy.deepcopy((parameter.detach(), optimizer.state_dict()))

    skipped = _train(parameter, optimizer, with_mode(mode), mask=False)

    assert skipped
    assert torch.equal(parameter.detach(), before[0])
    assert str(optimizer.state_dict()) == str(before[1])


def test_an_optimizer_step_on_a_zero_gradient_would_have_moved_the_weights() -> None:
    """P9: why the step is skipped and not merely harmless."""
    parameter = torch.nn.Parameter(torch.tensor([-0.5]))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    _train(parameter, optimizer, ObjectiveSettings(), mask=True)
    before = parameter.detach().clone()

    parameter.grad = torch.zeros(1)
    optimizer.step()

    assert not torch.equal(parameter.detach(), before)


@pytest.mark.parametrize("mode", list(Aggregation))
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_no_cut_changes_loss_gradient_or_metrics(mode: Aggregation, cut: list[list[int]]) -> None:
    """P10, C25."""
    settings = with_mode(mode)
    whole = run_step(fixture_f(), settings)

    parts = run_step(fixture_f(), settings, cut=cut)

    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-6, atol=0)
    assert step_metrics(parts.tally, settings) == pytest.approx(step_metrics(whole.tally, settings))


def test_wider_padding_full_of_garbage_changes_nothing() -> None:
    """P11, C24."""
    wide = _widened(fixture_f(), left=False)
    result, plain = run_step(wide, preset("gspo")), run_step(fixture_f(), preset("gspo"))

    assert result.loss == pytest.approx(plain.loss, rel=1e-12)
    torch.testing.assert_close(result.gradient[:, :4], plain.gradient)
    assert torch.all(result.gradient[:, 4:] == 0.0)


def test_left_padding_and_another_row_order_change_nothing() -> None:
    """P11, C24."""
    plain = run_step(fixture_f(), ObjectiveSettings())

    left = run_step(_widened(fixture_f(), left=True), ObjectiveSettings())
    assert left.loss == pytest.approx(plain.loss, rel=1e-12)
    torch.testing.assert_close(left.gradient[:, 5:], plain.gradient)

    order = [2, 0, 1]
    permuted = run_step(_reordered(fixture_f(), order), ObjectiveSettings())
    assert permuted.loss == pytest.approx(plain.loss, rel=1e-12)
    torch.testing.assert_close(permuted.gradient, plain.gradient[order])


@pytest.mark.parametrize("cut", [[[2], [8]], [[2, 8]], [[1, 1], [4], [4]], [[1], [1], [3], [3], [2]]])
def test_micro_batches_of_unequal_length_give_one_token_mean(cut: list[list[int]]) -> None:
    """C25: 2 tokens of loss 3.0 and 8 of loss 1.0; the mean of means would be 2.0."""
    lengths = [length for part in cut for length in part]
    losses, used = [], 0
    denominators = Denominators(tokens=10, rows=len(lengths), kept_tokens=10)
    for part in cut:
        mask = torch.tensor([[t < length for t in range(max(part))] for length in part])
        loss = torch.zeros(mask.shape, dtype=torch.float64)
        for row, length in enumerate(part):
            loss[row, :length] = 3.0 if used < 2 else 1.0
            used += length
        losses.append(aggregate(loss, mask, Aggregation.TOKEN_MEAN, denominators).item())

    assert sum(losses) == pytest.approx(1.4)


@pytest.mark.parametrize("mode", list(Aggregation))
def test_two_ranks_that_average_their_gradients_give_the_gradient_of_one(mode: Aggregation) -> None:
    """C25."""
    one = run_step(fixture_f(), with_mode(mode))

    two = run_step(fixture_f(), with_mode(mode), cut=[[0, 2], [1]], averaging_ranks=2)

    torch.testing.assert_close(two.gradient / 2, one.gradient)
    assert two.tally.named_sums()["loss"] == pytest.approx(one.loss)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, 0.0),
        (Aggregation.TOKEN_MEAN, 0.6),
        (Aggregation.SEQ_SUM_CONSTANT, 0.3),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, 3.0),
    ],
)
def test_each_aggregation_treats_length_in_its_own_way(mode: Aggregation, expected: float) -> None:
    """C26: A = +1 over 2 tokens, A = -1 over 8 tokens, ratio 1, constant 10."""
    mask = torch.tensor([[True] * 2 + [False] * 6, [True] * 8])
    theta = torch.full((2, 8), -0.5, dtype=torch.float64)
    batch = Batch(
        theta=theta,
        proximal=theta,
        behaviour=theta,
        mask=mask,
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        row_weights=torch.ones(2, dtype=torch.float64),
        policy_lag=torch.zeros(2, dtype=torch.int64),
    )

    result = run_step(batch, ObjectiveSettings(aggregation=mode, constant_length=10))

    assert result.loss == pytest.approx(expected, abs=1e-12)


def test_seq_sum_constant_needs_its_constant() -> None:
    with pytest.raises(IllegalCombination, match="constant_length"):
        run_step(fixture_f(), ObjectiveSettings(aggregation=Aggregation.SEQ_SUM_CONSTANT))
    with pytest.raises(InvalidSetting, match="constant_length"):
        aggregate(
            torch.zeros(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            Aggregation.SEQ_SUM_CONSTANT,
            Denominators(tokens=1, rows=1, kept_tokens=1),
            constant_length=0,
        )


def test_denominators_of_parts_add_up_and_refuse_other_rank_counts() -> None:
    batch, settings = fixture_f(), ObjectiveSettings()
    parts = [
        step_denominators(batch.proximal[at], batch.behaviour[at], batch.mask[at], settings)
        for at in (slice(0, 1), slice(1, 3))
    ]
    assert Denominators(tokens=8, rows=3, kept_tokens=8) == parts[0] + parts[1]

    with pytest.raises(IllegalCombination, match="ranks"):
        parts[0] + Denominators(tokens=1, rows=1, kept_tokens=1, averaging_ranks=2)
    with pytest.raises(InvalidSetting, match="counts"):
        Denominators(tokens=-1, rows=0, kept_tokens=0)


def test_denominators_of_a_micro_batch_are_refused_at_the_end_of_the_step() -> None:
    batch, settings = fixture_f(), ObjectiveSettings()
    of_part = step_denominators(batch.proximal[:1], batch.behaviour[:1], batch.mask[:1], settings)
    result = run_step(batch, settings)

    check_step(result.tally, settings, result.denominators)
    with pytest.raises(DenominatorMismatch, match="all rows of the optimizer step"):
        check_step(result.tally, settings, of_part)


def test_a_ratio_of_one_on_old_rows_is_taken_for_recomputed_log_probabilities() -> None:
    """Lag >= 1 with every log ratio exactly 0: what was stored is not what is used."""
    batch = fixture_f(theta=fixture_f().behaviour, policy_lag=torch.tensor([0, 1, 0]))
    result = run_step(batch, ObjectiveSettings())

    with pytest.raises(RecomputedBehaviour, match="old log-probabilities were recomputed from the current policy"):
        check_step(result.tally, ObjectiveSettings(), result.denominators)


@pytest.mark.parametrize(
    ("lags", "rows", "settings"),
    [
        ([0, 0, 0], [0, 1, 2], ObjectiveSettings()),
        ([0, 1, 0], [0, 1, 2], preset("decoupled")),
        ([0, 5, 0], [0, 2], ObjectiveSettings()),
    ],
    ids=["lag 0 may be exactly 1", "proximal denominator may be exactly 1", "a masked row is not live"],
)
def test_a_ratio_of_one_is_fine_elsewhere(lags: list[int], rows: list[int], settings: ObjectiveSettings) -> None:
    same = fixture_f().behaviour
    batch = fixture_f(theta=same, proximal=same, policy_lag=torch.tensor(lags), mask=_only(rows))
    result = run_step(batch, settings)

    check_step(result.tally, settings, result.denominators)


def test_one_log_ratio_that_moved_is_enough_for_old_rows() -> None:
    theta = fixture_f().behaviour.clone()
    theta[1, 0] += 1e-6
    batch = fixture_f(theta=theta, policy_lag=torch.tensor([0, 1, 0]))
    result = run_step(batch, ObjectiveSettings())

    check_step(result.tally, ObjectiveSettings(), result.denominators)


def test_a_small_policy_learns_through_hidden_states_to_parameters() -> None:
    """The pieces fit: chunked log-probabilities, padding, loss, and a finite, useful gradient."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8), torch.nn.Parameter(torch.randn(11, 8) * 0.1)
    targets, mask = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([[True, True, True], [True, True, False]])
    losses: list[float] = []
    old = torch.empty(0)
    for _ in range(3):
        found = token_logprobs(hidden, weight, targets, torch.ones(5), chunk_tokens=2)
        theta = scatter_to_rows(found.logprobs_N, mask)
        old = theta.detach() if not losses else old
        batch = Batch(
            theta=theta,
            proximal=old,
            behaviour=old,
            mask=mask,
            advantages=torch.tensor([1.0, -1.0]),
            row_weights=torch.ones(2),
            policy_lag=torch.zeros(2, dtype=torch.int64),
        )
        settings = preset("grpo")
        denominators = step_denominators(old, old, mask, settings)
        outputs = policy_loss(batch.inputs(), settings, denominators)
        outputs.loss.backward()
        losses.append(outputs.loss.item())
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
    assert losses[0] > losses[1] > losses[2]


def _train(
    parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, settings: ObjectiveSettings, *, mask: bool
) -> bool:
    """One step of the trainer's loop on one token; returns whether it was skipped."""
    batch = one_token(0.0, 1.0, torch.float32)
    theta = parameter[None, :] * 1.0
    batch = Batch(
        theta=theta,
        proximal=theta.detach(),
        behaviour=theta.detach(),
        mask=torch.full((1, 1), mask),
        advantages=batch.advantages,
        row_weights=batch.row_weights,
        policy_lag=batch.policy_lag,
    )
    denominators = step_denominators(batch.proximal, batch.behaviour, batch.mask, settings)
    outputs = policy_loss(batch.inputs(), settings, denominators)
    optimizer.zero_grad()
    outputs.loss.backward()
    assert parameter.grad is not None
    if denominators.skipped:
        assert outputs.loss.item() == 0.0
        assert parameter.grad.item() == 0.0
        return True
    optimizer.step()
    return False


def _only(rows: list[int]) -> torch.Tensor:
    mask = fixture_f().mask.clone()
    for row in range(3):
        if row not in rows:
            mask[row] = False
    return mask


def _widened(batch: Batch, *, left: bool) -> Batch:
    garbage = torch.tensor([[math.nan, math.inf, -math.inf, 1e30, -7.0]], dtype=torch.float64).expand(3, 5)
    empty = torch.zeros((3, 5), dtype=torch.bool)

    def join(real: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return torch.cat([more, real] if left else [real, more], dim=1)

    return fixture_f(
        theta=join(batch.theta, garbage),
        proximal=join(batch.proximal, garbage),
        behaviour=join(batch.behaviour, garbage),
        reference=join(batch.reference, garbage),
        mask=join(batch.mask, empty),
    )


def _reordered(batch: Batch, order: list[int]) -> Batch:
    names = ("theta", "proximal", "behaviour", "reference", "mask", "advantages", "row_weights", "policy_lag")
    return fixture_f(**{name: getattr(batch, name)[order] for name in names})
