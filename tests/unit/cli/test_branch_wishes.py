"""`--from-version N`: refused with the way out, granted with what it gives up, and the second time the same branch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from consumers.offline.branches import branch_starts
from consumers.trainer.branching import BranchWish, branch_origin
from driftlog.__main__ import main
from driftlog.branches import branch_arguments, plan_branch
from driftlog.commands import train
from driftlog.view import plain_line
from driftlog.view_state import RunState
from schemas.errors import ConfigError
from tests.fakes.log_script import G0, RUN, PolicyScript, running


def ended_run(versions: int = 7) -> PolicyScript:
    """Versions 0-6, ended."""
    script, _ = running(G0, versions=versions)
    script.ended(versions - 1)
    return script


def branch(script: PolicyScript, from_version: int, *, steps: int, end: bool) -> None:
    """What the trainer writes for a branch, and some steps on it."""
    fold = script.fold
    if fold.ended:
        assert fold.segment is not None
        script.started(fold.segment + 1)
    assert fold.newest is not None
    start, depth = fold.newest + 1, fold.versions[from_version].depth
    assert script.branched(from_version) is None
    assert script.published(start, parent=from_version, depth=depth) is None
    for step in range(1, steps + 1):
        assert script.published(start + step, depth=depth + step) is None
    if end:
        assert script.ended(start + steps) is None


def without_state(script: PolicyScript, version: int, depth: int) -> None:
    """The next version, saved without optimizer state."""
    event = script.fold.versions[version - 1].event
    changes = {"version": version, "parent": version - 1, "depth": depth, "has_state": False}
    assert script.tell(event.model_copy(update=changes)) is None


def retired(script: PolicyScript) -> None:
    script.started(1)
    assert script.retired(2) is None


@pytest.mark.parametrize(
    ("change", "from_version", "words"),
    [
        (lambda s: None, 9, "--from-version 9: no such version; the run has versions 0-6"),
        (lambda s: None, -1, "--from-version -1: no such version"),
        (lambda s: None, 6, "--from-version 6: it is the newest version, training goes on from there anyway"),
        (retired, 2, "weights are retired (checkpoints.keep); the newest version that can be used is 6"),
        (lambda s: branch(s, 3, steps=3, end=True), 6, "6 training steps led to it and run.versions = 6"),
    ],
)
def test_a_wish_that_cannot_be_granted_says_why_and_what_can(
    change: Callable[[PolicyScript], None], from_version: int, words: str
) -> None:
    script = ended_run()
    change(script)

    with pytest.raises(ConfigError) as refused:
        plan_branch(script.fold, from_version, 6)

    assert words in str(refused.value)


def test_a_version_without_optimizer_state_is_refused_and_the_newest_with_it_named() -> None:
    script, _ = running(G0, versions=3)
    without_state(script, 3, 3)
    without_state(script, 4, 4)

    with pytest.raises(ConfigError, match=r"without optimizer state.*the newest version that can be used is 2"):
        plan_branch(script.fold, 3, 6)


def test_a_run_without_versions_has_nothing_to_go_on_from() -> None:
    with pytest.raises(ConfigError, match="the run has no version yet"):
        plan_branch(PolicyScript().fold, 3, 6)


def test_the_wish_names_the_newest_version_and_the_words_what_is_given_up() -> None:
    wish, words = plan_branch(ended_run().fold, 3, 6)

    assert wish == BranchWish(from_version=3, when_newest=6)
    assert words == "going on from version 3: versions 4-6 (3 steps) stay in the log as another branch"
    assert branch_arguments(wish) == ("--from-version", "3", "--when-newest", "6")


def test_a_trainer_that_is_started_again_with_the_same_arguments_does_not_branch_again() -> None:
    script = ended_run()
    wish, _ = plan_branch(script.fold, 3, 6)
    before = branch_origin(script.fold, 6, wish)
    branch(script, 3, steps=1, end=False)

    assert (before, branch_origin(script.fold, 8, wish)) == (3, None)


@pytest.mark.parametrize("steps", [0, 2])
def test_the_same_words_after_an_interruption_go_on_with_that_branch(steps: int) -> None:
    script = ended_run()
    branch(script, 3, steps=steps, end=False)

    assert plan_branch(script.fold, 3, 6) == (None, "going on with the branch from version 3, begun as version 7")


def test_the_same_words_after_the_end_say_that_it_is_done_and_how_to_branch_once_more() -> None:
    script = ended_run()
    branch(script, 3, steps=3, end=True)
    wish, words = plan_branch(script.fold, 3, 6)
    longer, going_on = plan_branch(script.fold, 3, 8)
    again, left = plan_branch(script.fold, 7, 6)

    assert wish is None
    assert "it began as version 7 and ended with 10" in words
    assert "say --from-version 7" in words
    assert (longer, going_on) == (None, "going on with the branch from version 3, begun as version 7")
    assert again == BranchWish(from_version=7, when_newest=10)
    assert left == "going on from version 7: versions 8-10 (3 steps) stay in the log as another branch"


def test_a_branch_that_was_left_for_another_one_is_begun_anew() -> None:
    script = ended_run()
    branch(script, 3, steps=3, end=True)
    branch(script, 8, steps=2, end=True)
    wish, words = plan_branch(script.fold, 3, 6)

    assert wish == BranchWish(from_version=3, when_newest=13)
    assert words == "going on from version 3: versions 7-8, 11-13 (3 steps) stay in the log as another branch"


def test_a_start_that_the_trainer_made_itself_for_want_of_state_does_not_end_the_branch() -> None:
    script = ended_run()
    branch(script, 3, steps=0, end=False)
    without_state(script, 8, 4)
    branch(script, 7, steps=1, end=False)

    assert plan_branch(script.fold, 3, 6)[0] is None


def test_the_starts_of_a_run_are_listed_with_what_each_left_behind() -> None:
    script = ended_run()
    branch(script, 3, steps=1, end=True)
    branch(script, 6, steps=0, end=False)

    assert [start.words for start in branch_starts(script.fold)] == [
        "version 7 goes on from version 3; versions 4-6 (3 steps) stay in the log as another branch",
        "version 9 goes on from version 6; versions 7-8 (1 step) stay in the log as another branch",
    ]


def test_up_refuses_to_branch_in_a_run_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    code = main(["up", "--run", "ghost", "--from-version", "3", "--set", f'run.directory="{runs}"'])

    assert code == 2
    assert "there is no run 'ghost'" in capsys.readouterr().err
    assert not runs.exists()


def test_a_trainer_under_up_takes_the_wish_it_is_handed_and_reads_no_log() -> None:
    assert train._wish(None, 3, 6) == BranchWish(from_version=3, when_newest=6)  # type: ignore[arg-type]
    assert train._wish(None, None, None) is None  # type: ignore[arg-type]


def test_the_view_of_a_branched_run_counts_training_steps() -> None:
    script = ended_run()
    branch(script, 3, steps=1, end=False)
    straight, branched = RunState(RUN), RunState(RUN)
    straight.fold, branched.fold = ended_run().fold, script.fold

    assert plain_line(straight, 6).startswith("version 6/6 (live ")
    assert plain_line(branched, 6).startswith("version 8, step 4/6 (live ")
