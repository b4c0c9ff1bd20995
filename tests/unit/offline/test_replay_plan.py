"""Which steps a replay trains: what is asked for, what has to be gone through first, and what cannot be."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from consumers.offline.replay.plan import NEWEST, ReplayPlan, plan_replay, same_weights_as
from consumers.offline.wholeness import Retirement
from schemas import policy_events as ev
from schemas.errors import UsageError
from schemas.policy_fold import PolicyFold
from tests.fakes.log_script import RUN, PolicyScript


def _fold(versions: int, *, with_state: Collection[int] | None = None, retired: Collection[int] = ()) -> PolicyFold:
    script = PolicyScript()
    script.started()
    for version in range(versions + 1):
        _publish(script, version, has_state=with_state is None or version in with_state)
    for version in retired:
        assert script.retired(version) is None
    return script.fold


def _publish(
    script: PolicyScript, version: int, *, has_state: bool, parent: int | None = None, depth: int | None = None
) -> None:
    event = ev.VersionPublished(
        run=RUN, at_us=0, version=version, parent=parent if parent is not None else version - 1 if version else None,
        depth=version if depth is None else depth, manifest_uri=f"demo/a{version}/manifest.json", manifest_sha256="s",
        bytes=1, optimizer_step=version, oldest_open_request=0, has_state=has_state,
    )  # fmt: skip
    assert script.tell(event) is None


def test_one_version_alone_and_ranges_up_to_a_version_and_to_the_newest() -> None:
    fold = _fold(5)

    assert plan_replay(fold, 3, None) == ReplayPlan(first=3, wanted=3, last=3)
    assert plan_replay(fold, 2, 4) == ReplayPlan(first=2, wanted=2, last=4)
    assert plan_replay(fold, 1, NEWEST) == ReplayPlan(first=1, wanted=1, last=5)


def test_a_range_begins_earlier_where_the_parent_has_no_state_and_says_why() -> None:
    plan = plan_replay(_fold(6, with_state=(0, 3, 6)), 3, 6)

    assert (plan.first, plan.wanted, plan.last) == (1, 3, 6)
    assert "its parent, version 2, was saved without optimizer state (checkpoints.state_every)" in plan.why_earlier
    assert "training begins with version 1" in plan.why_earlier


def test_a_version_alone_whose_parent_has_no_state_names_the_nearest_one_that_can_be() -> None:
    with pytest.raises(UsageError, match=r"by itself.*version 5, was saved without.*--version 4 --to 6"):
        plan_replay(_fold(6, with_state=(0, 3, 6)), 6, None)


def test_a_retired_parent_is_named_and_where_nothing_before_has_state_the_first_that_can_be() -> None:
    fold = _fold(5, retired=(0, 1, 2))

    with pytest.raises(UsageError, match=r"version 2 cannot be .*version 1, was retired.*the first that can be is 4"):
        plan_replay(fold, 2, NEWEST)

    retired = {1: Retirement(at_us=2_000_000, rule="keep=2")}
    with pytest.raises(UsageError) as caught:
        plan_replay(fold, 2, NEWEST, retired)
    removed = "its weights were removed at 1970-01-01T00:00:02.000000Z by rule keep=2"
    assert f"its parent, version 1, was retired: {removed}, and no version before has state" in str(caught.value)


def test_where_no_version_has_state_that_is_said() -> None:
    with pytest.raises(UsageError, match="no later one has it"):
        plan_replay(_fold(2, with_state=()), 1, None)


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (0, None, "version 0 was made by no training step .it is the initial policy; ask from 1 on"),
        (9, None, "version 9 was made by no training step .the newest is 3"),
        (1, 9, "version 9 was made by no training step"),
        (3, 2, "--version 3 --to 2: the range is empty"),
    ],
)
def test_versions_that_no_step_made_are_refused(first: int, last: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_replay(_fold(3), first, last)


def test_a_run_without_a_step_has_nothing_to_train_again() -> None:
    with pytest.raises(UsageError, match="no training step was made"):
        plan_replay(_fold(0), 1, NEWEST)


def test_a_branch_start_is_no_step_and_repeats_the_version_it_started_from() -> None:
    script = PolicyScript(_fold(3))
    assert script.branched(1) is None
    _publish(script, 4, has_state=True, parent=1, depth=1)
    _publish(script, 5, has_state=True, parent=4, depth=2)

    with pytest.raises(UsageError, match="version 4 .* starts a branch with the weights of version 1"):
        plan_replay(script.fold, 4, None)
    assert same_weights_as(script.fold, 4) == 1
    assert plan_replay(script.fold, 5, None) == ReplayPlan(first=5, wanted=5, last=5)


def test_the_step_behind_a_branch_start_without_state_may_start_from_the_version_it_repeats() -> None:
    script = PolicyScript(_fold(3))
    assert script.branched(1) is None
    _publish(script, 4, has_state=False, parent=1, depth=1)
    _publish(script, 5, has_state=True, parent=4, depth=2)

    assert plan_replay(script.fold, 5, None).first == 5
