"""Prompt requests: fresh prompts in order, or the same prompt again with the next attempt."""

from __future__ import annotations

from typing import Any

import pytest

from consumers.trainer.pacing import PacingRules
from consumers.trainer.requests import Cursor, Head, Issued, RequestRules, issue, may_try_again
from schemas.ids import RunId
from schemas.ledger import OpenGroup
from schemas.policy_fold import PolicyFold
from schemas.trajectory import Sampling
from tests.fakes.log_script import G0, running
from tests.fakes.tiny_policy import TinyPrompts

RULES = RequestRules(
    run=RunId("demo"),
    group_size=4,
    max_lag=2,
    max_attempts=3,
    sampling=Sampling(max_tokens=4),
    pacing=PacingRules(groups_per_step=2, run_ahead=1, last_step=10),
)


def ask(
    fold: PolicyFold,
    head: Head,
    *,
    open_groups: tuple[OpenGroup, ...] = (),
    again: tuple[OpenGroup, ...] = (),
    cursor: Cursor = Cursor(next_request=0, prompt_cursor=0),  # noqa: B008 - a frozen value
) -> Issued:
    return issue(open_groups, again, cursor, head, TinyPrompts(5), fold, RULES, 17)


def old(group_id: str, **changes: Any) -> OpenGroup:
    attempt = int(group_id.rsplit("a", 1)[1])
    values = {"request_position": 0, "issued_at_us": 0, "attempt": attempt, "intended_step": 0} | changes
    return OpenGroup(group_id=group_id, **values)


def test_the_first_requests_fill_the_step_at_hand_and_the_run_ahead() -> None:
    issued = ask(PolicyFold(), Head(version=0, depth=0))

    assert [r.group_id for r in issued.requests] == [f"demo/p{i:06d}/e0/a0" for i in range(4)]
    assert [r.request_position for r in issued.requests] == [0, 1, 2, 3]
    assert [r.intended_step for r in issued.requests] == [0, 0, 1, 1]
    assert [r.min_version for r in issued.requests] == [0, 0, 0, 0]
    assert issued.cursor == Cursor(next_request=4, prompt_cursor=4)
    assert [g.group_id for g in issued.groups] == [r.group_id for r in issued.requests]


def test_the_source_goes_round_and_the_epoch_counts_the_rounds() -> None:
    issued = ask(PolicyFold(), Head(version=0, depth=0), cursor=Cursor(next_request=3, prompt_cursor=3))

    assert [r.group_id for r in issued.requests] == [
        "demo/p000003/e0/a0",
        "demo/p000004/e0/a0",
        "demo/p000000/e1/a0",
        "demo/p000001/e1/a0",
    ]


def test_a_dropped_prompt_is_asked_for_again_with_the_next_attempt_before_fresh_ones() -> None:
    script, _ = running(G0, versions=4)
    again = (old("demo/p000002/e0/a0"), old("demo/p000003/e1/a1"))

    issued = ask(
        script.fold, Head(version=3, depth=3), again=again, cursor=Cursor(next_request=20, prompt_cursor=9)
    )  # fmt: skip

    assert [r.group_id for r in issued.requests] == [
        "demo/p000002/e0/a1",
        "demo/p000003/e1/a2",
        "demo/p000004/e1/a0",
        "demo/p000000/e2/a0",
    ]
    assert [r.attempt for r in issued.groups] == [1, 2, 0, 0]
    assert issued.cursor == Cursor(next_request=24, prompt_cursor=11)


def test_a_prompt_is_tried_a_bounded_number_of_times() -> None:
    assert [may_try_again(old(f"demo/p000002/e0/a{n}"), RULES) for n in range(4)] == [True, True, False, False]


def test_versions_asked_for_are_steps_back_along_the_chain_and_never_above_the_newest() -> None:
    script, _ = running(G0, versions=6)
    open_groups = (old("demo/p000000/e0/a0", intended_step=5), old("demo/p000001/e0/a0", intended_step=5))

    issued = ask(script.fold, Head(version=5, depth=5), open_groups=open_groups)

    assert [r.intended_step for r in issued.requests] == [6, 6]
    assert [r.min_version for r in issued.requests] == [5, 5]
    assert [r.fallback_version for r in issued.requests] == [4, 4]


def test_a_version_that_the_transaction_itself_publishes_can_be_asked_for() -> None:
    script, _ = running(G0, versions=3)

    issued = ask(script.fold, Head(version=3, depth=3, parent=2))

    assert [r.min_version for r in issued.requests] == [2, 2, 3, 3]
    assert [r.fallback_version for r in issued.requests] == [1, 1, 2, 2]


def test_on_a_branch_the_versions_are_those_of_the_branch() -> None:
    script, _ = running(G0, versions=4)
    script.branched(1)
    script.published(4, parent=1, depth=1)
    script.published(5, parent=4, depth=2)

    issued = ask(script.fold, Head(version=5, depth=2))

    assert [r.min_version for r in issued.requests] == [4, 4, 5, 5]
    assert [r.fallback_version for r in issued.requests] == [0, 0, 4, 4]


def test_nothing_is_asked_for_beyond_the_last_step() -> None:
    script, _ = running(G0, versions=11)

    assert ask(script.fold, Head(version=10, depth=10)).requests == ()
    assert len(ask(script.fold, Head(version=9, depth=9)).requests) == 2


@pytest.mark.parametrize("head", [Head(version=0, depth=0)])
def test_a_request_carries_everything_a_worker_needs(head: Head) -> None:
    request = ask(PolicyFold(), head).requests[0]

    assert (request.group_size, request.task, request.prompt_id, request.issued_at_us) == (4, "tiny", "t0", 17)
    assert request.sampling == RULES.sampling
