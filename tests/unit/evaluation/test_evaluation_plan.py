"""Which versions are evaluated, and that the same question is asked the same way whoever asks."""

from __future__ import annotations

from consumers.evaluation_plan import Ask, choose, evaluation_requests, wanted_versions
from schemas.policy_fold import PolicyFold
from schemas.trajectory import Sampling
from tests.fakes.evaluated_run import GREEDY, SAMPLED
from tests.fakes.log_script import G0, PolicyScript
from tests.fakes.tiny_policy import TinyPrompts


def fold_of(*live: int, published: int | None = None, ended: bool = False) -> PolicyFold:
    """Versions 0..published (or the last live one); those named went live."""
    script = PolicyScript()
    script.started()
    script.joined(G0)
    for version in range(max(live) + 1 if published is None else published + 1):
        script.published(version)
        if version in live:
            script.goes_live(version, [G0], publish=False)
    if ended:
        script.ended(script.fold.newest or 0)
    return script.fold


def test_every_kth_activated_version_is_wanted_however_versions_are_numbered() -> None:
    assert wanted_versions(fold_of(0, 1, 2, 3, 4), 2) == (0, 2, 4)
    assert wanted_versions(fold_of(0, 3, 4, 8, 9), 2) == (0, 4, 9)


def test_a_version_that_was_never_live_is_wanted_only_as_the_newest_of_a_run_that_ended() -> None:
    assert wanted_versions(fold_of(0, 1, published=4), 1) == (0, 1)
    assert wanted_versions(fold_of(0, 1, published=4, ended=True), 1) == (0, 1, 4)
    assert wanted_versions(fold_of(0, 1, 2, ended=True), 2) == (0, 2)


def test_the_newest_wanted_version_is_chosen_and_the_others_are_left_out() -> None:
    choice = choose(fold_of(0, 1, 2), 1, ())

    assert choice.version == 2
    assert [version for version, _ in choice.skipped] == [0, 1]
    assert choice.skipped[0][1] == "version 2 was there before its turn came"


def test_nothing_below_a_settled_version_is_chosen_again() -> None:
    assert choose(fold_of(0, 1, 2), 1, {2}).version is None
    assert choose(fold_of(0, 1, 2, 3), 1, {0, 1}).version == 3


def test_a_retired_version_is_left_out() -> None:
    script = PolicyScript()
    script.started()
    script.joined(G0)
    for version in range(4):
        script.published(version)
        if version < 3:
            script.goes_live(version, [G0], publish=False)
    assert script.retired(1) is None

    assert choose(script.fold, 1, {0}).skipped == ((1, "retired"),)
    assert choose(script.fold, 1, {0}).version == 2


def test_a_request_depends_on_version_prompt_and_way_alone() -> None:
    source = TinyPrompts(4)
    prompts = [source.by_index(index) for index in range(4)]
    both = evaluation_requests(prompts, [GREEDY, SAMPLED], 5)
    alone = evaluation_requests(prompts[2:3], [SAMPLED], 5)

    assert len({request.group_id for request in both}) == 8
    assert alone[0].group_id == both[5].group_id
    assert not {r.group_id for r in both} & {r.group_id for r in evaluation_requests(prompts, [GREEDY, SAMPLED], 6)}
    warmer = Ask(sampling=Sampling(temperature=2.0, max_tokens=4), samples=4)
    assert evaluation_requests(prompts[2:3], [warmer], 5)[0].group_id == alone[0].group_id
