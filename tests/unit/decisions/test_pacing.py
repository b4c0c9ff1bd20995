"""How many groups are asked for, and for which step: the invariant, by simulation of all possible orders."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.trainer.pacing import PacingRules, fallback_depth, intended_step, min_depth, requests_to_issue

RULES = PacingRules(groups_per_step=4, run_ahead=1, last_step=10)


@pytest.mark.parametrize(
    ("open_groups", "depth", "expected"),
    [(0, 0, 8), (4, 3, 4), (8, 3, 0), (9, 3, 0), (0, 9, 4), (4, 9, 0), (0, 10, 0), (0, 11, 0)],
)
def test_requests_fill_up_to_the_run_ahead_and_to_what_is_still_needed(
    open_groups: int, depth: int, expected: int
) -> None:
    assert requests_to_issue(open_groups, depth, RULES) == expected


def test_intended_steps_fill_up_one_after_the_other() -> None:
    steps: list[int] = []
    for _ in range(9):
        steps.append(intended_step(steps, 3, RULES))

    assert steps == [3, 3, 3, 3, 4, 4, 4, 4, 5]


def test_overdue_groups_count_for_the_step_at_hand() -> None:
    assert intended_step([1, 2, 3, 3], 3, RULES) == 4
    assert intended_step([1, 2, 3], 3, RULES) == 3


@pytest.mark.parametrize(("step", "newest", "expected"), [(0, 0, 0), (1, 0, 0), (5, 4, 4), (5, 9, 4), (5, 2, 2)])
def test_the_wanted_depth_is_the_step_less_the_run_ahead_and_never_above_the_newest(
    step: int, newest: int, expected: int
) -> None:
    assert min_depth(step, newest, RULES) == expected


def test_the_depth_for_the_fallback_is_the_hard_limit() -> None:
    assert [fallback_depth(5, 2), fallback_depth(1, 2), fallback_depth(5, 0)] == [3, 0, 5]


@given(
    groups_per_step=st.integers(1, 4), run_ahead=st.integers(0, 3), last_step=st.integers(1, 6),
    drops=st.lists(st.integers(0, 20), max_size=30),
)  # fmt: skip
def test_the_invariant_holds_in_every_transaction_until_the_end(
    groups_per_step: int, run_ahead: int, last_step: int, drops: list[int]
) -> None:
    """Each round either drops one open group (a settle) or trains the oldest ones (a step)."""
    rules = PacingRules(groups_per_step=groups_per_step, run_ahead=run_ahead, last_step=last_step)
    depth, opened, waiting = 0, [], list(drops)
    for _ in range(len(drops) + last_step + 1):
        for _ in range(requests_to_issue(len(opened), depth, rules)):
            step = intended_step(opened, depth, rules)
            assert min_depth(step, depth, rules) <= depth
            opened.append(step)
        needed = (last_step - depth) * groups_per_step
        assert len(opened) == min((run_ahead + 1) * groups_per_step, needed)
        assert max(Counter(max(step, depth) for step in opened).values(), default=0) <= groups_per_step
        assert all(step <= depth + run_ahead for step in opened)
        if depth == last_step:
            break
        if waiting:
            del opened[waiting.pop() % len(opened)]
        else:
            opened = sorted(opened)[groups_per_step:]
            depth += 1

    assert depth == last_step
    assert opened == []
