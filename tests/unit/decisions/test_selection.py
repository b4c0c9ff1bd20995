"""Which groups make the next batch: order, waiting, and what dooms a group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from consumers.trainer.admission import AdmissionRules
from consumers.trainer.grouping import Assembler
from consumers.trainer.selection import DoomedGroup, ReadyGroup, SelectionRules, is_zero_variance, judge_group, select
from schemas.ledger import OpenGroup, Reason
from schemas.policy_fold import PolicyFold
from tests.fakes.log_script import G0, TOKENIZER, decoded, group, running, trajectory

RULES = SelectionRules(
    groups_per_step=2,
    order="issue",
    min_group=2,
    filter_zero_variance=False,
    admission=AdmissionRules(max_lag=2, barrier=True, tokenizer_digest=TOKENIZER),
)


def name(number: int) -> str:
    return f"demo/p{number:06d}/e0/a0"


def desk_of(groups: int, size: int = 4) -> Assembler:
    return Assembler(
        [
            OpenGroup(group_id=name(i), request_position=i, issued_at_us=0, attempt=0, intended_step=i // 2)
            for i in range(groups)
        ],
        size,
    )


def world(versions: int = 7) -> tuple[PolicyFold, dict[int, int]]:
    script, proofs = running(G0, versions=versions)
    return script.fold, {version: offset for (_, version), offset in proofs.items()}


def fill(found: Assembler, number: int, rewards: list[float | None], segments: list[tuple[int, int, int]]) -> None:
    found.add((0, number), decoded(group(name(number), rewards, segments=segments)))


def chosen(found: Assembler, fold: PolicyFold, rules: SelectionRules = RULES) -> tuple[list[int], list[str], list[str]]:
    """(request positions of the batch, ids waited for, reasons of the doomed)."""
    selection = select(found.buffers(), fold, fold.newest, rules, group_size=found.group_size)
    positions = [g.buffer.group.request_position for g in selection.batch]
    return positions, selection.waiting_for, [d.reason.value for d in selection.doomed]


def test_a_batch_in_order_of_issue_waits_for_the_oldest_groups() -> None:
    fold, proofs = world()
    found = desk_of(4)
    for number in (1, 2, 3):
        fill(found, number, [1, 0, 0, 1], [(6, 2, proofs[6])])
    waiting = chosen(found, fold)
    fill(found, 0, [1, 0, 0, 1], [(6, 2, proofs[6])])

    assert waiting == ([], [name(0)], [])
    assert chosen(found, fold) == ([0, 1], [], [])


def test_a_batch_in_order_of_arrival_takes_complete_groups_as_they_come() -> None:
    fold, proofs = world()
    found = desk_of(4)
    for number in (2, 3):
        fill(found, number, [1, 0, 0, 1], [(6, 2, proofs[6])])

    assert chosen(found, fold, replace(RULES, order="ready"))[0] == [2, 3]


HOLDING = replace(RULES, order="ready", hold_for_in_flight=True, run_ahead=1)
"""stale.action = wait: a group sampled one step ahead of its own may be trained two steps late"""


def desk_at_the_limit() -> tuple[PolicyFold, Assembler]:
    """Depth 2, groups 2 and 3 meant for step 1, 4 and 5 for step 2; 3 and 4 are in."""
    fold, proofs = world(3)
    found = desk_of(6)
    for number in (0, 1):
        found.close(name(number))
    for number in (3, 4):
        fill(found, number, [1, 0, 0, 1], [(2, 2, proofs[2])])
    return fold, found


def test_a_step_that_would_make_a_group_in_flight_too_old_is_held() -> None:
    fold, found = desk_at_the_limit()

    assert chosen(found, fold, HOLDING) == ([], [name(2)], [])
    assert chosen(found, fold, replace(HOLDING, hold_for_in_flight=False))[0] == [3, 4]


def test_a_held_step_goes_on_once_the_group_in_flight_is_in() -> None:
    fold, found = desk_at_the_limit()
    fill(found, 2, [1, 0, 0, 1], [(2, 2, world(3)[1][2])])

    assert chosen(found, fold, HOLDING) == ([2, 3], [], [])


def test_a_held_step_goes_on_once_the_group_in_flight_is_given_up() -> None:
    """Its time-out bounds the wait."""
    fold, found = desk_at_the_limit()
    found.close(name(2))

    assert chosen(found, fold, HOLDING) == ([3, 4], [], [])


def test_groups_in_flight_that_one_more_step_leaves_fresh_hold_nothing() -> None:
    """Groups 4 and 5 are meant for the step at hand: after it they are two steps old, which is allowed."""
    fold, proofs = world(3)
    found = desk_at_the_limit()[1]
    fill(found, 2, [1, 0, 0, 1], [(2, 2, proofs[2])])
    found.close(name(4))

    assert chosen(found, fold, HOLDING) == ([2, 3], [], [])
    assert chosen(found, fold, replace(HOLDING, run_ahead=2)) == ([], [name(5)], [])


def test_surplus_ready_groups_stay_for_the_next_batches() -> None:
    """C46: ten complete groups, four a batch: 4, 4 and 2, each once."""
    fold, proofs = world()
    found = desk_of(10)
    rules = replace(RULES, groups_per_step=4)
    for number in range(10):
        fill(found, number, [1, 0, 0, 1], [(6, 2, proofs[6])])
    batches = []
    while len(found):
        batch = chosen(found, fold, rules)[0]
        batches.append(batch)
        for number in batch:
            found.close(name(number))

    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_stale_member_is_withheld_and_its_reward_stays_in_the_baseline() -> None:
    """C48, rule ii: versions [5, 5, 5, 1], rewards [1, 0, 0, 1], trainer at 6, limit 2."""
    fold, proofs = world()
    found = desk_of(1)
    versions = [5, 5, 5, 1]
    rows = [
        trajectory(name(0), i, reward=reward, segments=[(version, 2, proofs[version])])
        for i, (version, reward) in enumerate(zip(versions, [1.0, 0.0, 0.0, 1.0], strict=True))
    ]
    found.add((0, 0), decoded(rows))

    ready = judge_group(found.buffers()[0], fold, 6, RULES, group_size=4)

    assert isinstance(ready, ReadyGroup)
    assert ready.baseline_rewards() == [1, 0, 0, 1]
    assert [m.trained for m in ready.members] == [True, True, True, False]
    assert [m.verdict.detail for m in ready.members] == ["", "", "", "lag 5 > 2"]


def test_a_group_of_stale_members_only_is_doomed_with_that_reason() -> None:
    fold, proofs = world()
    found = desk_of(2)
    fill(found, 0, [1, 0, 0, 1], [(1, 2, proofs[1])])
    fill(found, 1, [1, 0, 0, 1], [(6, 2, proofs[6])])

    assert chosen(found, fold) == ([], [], ["stale"])


def test_a_group_whose_proofs_are_not_read_yet_is_waited_for() -> None:
    fold, _ = world()
    found = desk_of(1)
    fill(found, 0, [1, 0, 0, 1], [(7, 2, fold.read_up_to + 5)])

    assert chosen(found, fold) == ([], [name(0)], [])


def test_a_spoilt_claim_dooms_its_group_and_says_how_much_was_good() -> None:
    fold, proofs = world()
    found = desk_of(1)
    rows = list(decoded(group(name(0), [1, 0, 0, 1], segments=[(6, 2, proofs[6])])))
    rows[2] = replace(rows[2], trajectory=None, code="nan_logprob")
    found.add((0, 0), tuple(rows))

    doomed = judge_group(found.buffers()[0], fold, 6, RULES, group_size=4)

    assert isinstance(doomed, DoomedGroup)
    assert (doomed.reason, doomed.detail) == (Reason.INCOMPLETE, "3/4 members are good")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, None, 0.0, 1.0], None),
        ([1.0, None, None, 0.0], None),
        ([1.0, None, None, None], "1 usable rewards, 2 needed"),
        ([None, None, None, None], "0 usable rewards, 2 needed"),
    ],
)
def test_a_group_needs_enough_usable_rewards(rewards: list[float | None], expected: str | None) -> None:
    fold, proofs = world()
    found = desk_of(1)
    fill(found, 0, rewards, [(6, 2, proofs[6])])

    outcome = judge_group(found.buffers()[0], fold, 6, RULES, group_size=4)

    assert (outcome.detail if isinstance(outcome, DoomedGroup) else None) == expected
    if isinstance(outcome, ReadyGroup):
        assert [m.trained for m in outcome.members] == [r is not None for r in rewards]
    else:
        assert outcome.reason is Reason.REWARD_FAILED


def test_a_group_whose_only_fresh_members_have_no_reward_trains_nothing() -> None:
    fold, proofs = world()
    found = desk_of(1, size=3)
    rows = [
        trajectory(name(0), i, group_size=3, reward=reward, segments=[(version, 2, proofs[version])])
        for i, (version, reward) in enumerate([(1, 1.0), (1, 0.0), (6, None)])
    ]
    found.add((0, 0), decoded(rows))

    outcome = judge_group(found.buffers()[0], fold, 6, RULES, group_size=3)

    assert isinstance(outcome, DoomedGroup)
    assert outcome.reason is Reason.REWARD_FAILED


def test_groups_of_equal_rewards_are_replaced_only_where_filtering_is_on() -> None:
    fold, proofs = world()
    found = desk_of(2)
    fill(found, 0, [1, 1, 1, 1], [(6, 2, proofs[6])])
    fill(found, 1, [1, 0, 1, 1], [(6, 2, proofs[6])])

    assert chosen(found, fold) == ([0, 1], [], [])
    assert chosen(found, fold, replace(RULES, filter_zero_variance=True)) == ([], [], ["zero_variance"])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 1, 1], True), ([0, 0], True), ([1, 1 + 1e-9], True), ([1, 0], False), ([1e6, 1e6 + 0.5], True)],
)
def test_equal_means_equal_within_the_rounding_of_the_rewards(rewards: list[float], expected: bool) -> None:
    assert is_zero_variance(rewards) is expected


def test_a_last_batch_of_fewer_groups_is_trained_when_nothing_else_is_open() -> None:
    fold, proofs = world()
    found = desk_of(1)
    fill(found, 0, [1, 0, 0, 1], [(6, 2, proofs[6])])

    assert chosen(found, fold)[0] == [0]


def test_no_open_group_is_no_batch() -> None:
    fold, _ = world()

    assert chosen(desk_of(0), fold) == ([], [], [])
